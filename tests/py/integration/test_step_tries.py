"""A step's own retry policy, timeout and deadline."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

from pgdefer import App, JobFailed, Retry, StepFailed, current_job

from .conftest import Jobs, running, steps

Connection = psycopg.Connection[Any]


class Shop:
    """Counts the calls of its methods, of which the first ones fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls: Counter[str] = Counter()
        self.caught: list[str] = []

    def charge(self, amount: int) -> int:
        self.calls["charge"] += 1
        if self.calls["charge"] <= self.failures:
            raise ValueError(f"no money {self.calls['charge']}")
        return amount

    async def charge_async(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.charge(amount)

    def refund(self) -> str:
        self.calls["refund"] += 1
        return "refunded"


def define(app: App, shop: Shop, *, is_async: bool, **options: Any) -> str:
    """A task that charges three times at most, and then refunds; it fails once in between."""

    @app.task(name="async", retry=2)
    async def coroutine() -> object:
        job = current_job()
        try:
            charged = await job.step_async("charge", shop.charge_async, 5, retry=3, **options)
        except StepFailed as error:
            shop.caught.append(f"{error.step}: {error.error}")
            charged = await job.step_async("refund", shop.refund)
        shop.calls["ends"] += 1
        if shop.calls["ends"] == 1:
            raise RuntimeError("later")
        return charged

    @app.task(name="sync", retry=2)
    def function() -> object:
        job = current_job()
        charge = job.step("charge", retry=3, **options)(shop.charge)
        try:
            charged: object = charge(5)
        except StepFailed as error:
            shop.caught.append(f"{error.step}: {error.error}")
            charged = job.step("refund", shop.refund)
        shop.calls["ends"] += 1
        if shop.calls["ends"] == 1:
            raise RuntimeError("later")
        return charged

    return "async" if is_async else "sync"


async def test_a_step_is_tried_again(
    app: App, jobs: Jobs, conn: Connection, is_async: bool
) -> None:
    shop = Shop(failures=2)
    job = app.defer(define(app, shop, is_async=is_async))
    async with running(app):
        assert await job.result_async(60) == 5
    assert shop.calls == {"charge": 3, "ends": 2}
    assert shop.caught == []
    (row,) = jobs()
    assert (row["attempts"], row["failures"]) == (4, 1)  # that of the handler
    query = "select name, failures, error from queue.steps"
    assert conn.execute(query).fetchall() == [("charge", 2, None)]
    # Without a run that was given back: on a busy machine its thread ends after the next claim.
    assert [(row["outcome"], row["error"]) for row in jobs.attempts()] == [
        ("failed", "ValueError: no money 1"),
        ("failed", "ValueError: no money 2"),
        ("failed", "RuntimeError: later"),
    ]


async def test_after_the_last_attempt_the_handler_goes_on(
    app: App, conn: Connection, is_async: bool
) -> None:
    shop = Shop(failures=9)
    job = app.defer(define(app, shop, is_async=is_async))
    async with running(app):
        assert await job.result_async(60) == "refunded"
    assert shop.calls == {"charge": 3, "refund": 1, "ends": 2}
    # In both runs that came to it, the same.
    assert shop.caught == ["charge: ValueError: no money 3"] * 2
    assert steps(conn, job.id).keys() == {"charge", "refund"}


async def test_an_operator_has_it_tried_again(app: App, conn: Connection) -> None:
    shop = Shop(failures=2)

    @app.task(name="t", retry=5)
    def t() -> int:
        job = current_job()
        job.step("before", lazy=True)(shop.refund)()
        charged: int = job.step("charge", shop.charge, 5, retry=2)
        return charged

    job = t.defer()
    async with running(app):
        with pytest.raises(
            JobFailed, match="StepFailed: step charge failed: ValueError: no money 2"
        ):
            await job.result_async(300)
        assert shop.calls == {"charge": 2, "refund": 1}
        conn.execute("select queue.retry(array[%s])", [job.id])
        assert await job.result_async(60) == 5
    assert shop.calls == {"charge": 3, "refund": 1}


async def test_a_step_has_a_timeout(app: App, conn: Connection, is_async: bool) -> None:
    timeout = dt.timedelta(seconds=2)  # long enough for the second try on a busy machine
    calls: Counter[str] = Counter()

    async def late_async() -> str:
        calls["late"] += 1
        if calls["late"] == 1:
            await asyncio.sleep(3600)
        return "in time"

    def late() -> str:
        calls["late"] += 1
        end = time.monotonic() + 3600
        while calls["late"] == 1 and time.monotonic() < end:
            time.sleep(0.01)
        return "in time"

    @app.task(name="async")
    async def coroutine() -> list[str]:
        job = current_job()
        found = [await job.step_async("late", late_async, retry=2, timeout=timeout)]
        calls["late"] = 0
        try:
            await job.step_async("other", late_async, timeout=timeout)
        except TimeoutError as error:
            found.append(str(error))
        return found

    @app.task(name="sync")
    def function() -> list[str]:
        job = current_job()
        found = [job.step("late", late, retry=2, timeout=timeout)]
        calls["late"] = 0
        try:
            job.step("other", late, timeout=timeout)
        except TimeoutError as error:
            found.append(str(error))
        return found

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        assert await job.result_async(60) == ["in time", "not done within 0:00:02"]
    assert steps(conn, job.id) == {"late": "in time"}
    # On a busy machine the second attempt may come before the first has ended here.
    outcomes = conn.execute("select outcome from queue.attempts where outcome <> 'released'")
    assert outcomes.fetchall() == [("timed_out",)]


async def test_a_timeout_is_of_its_own_step(app: App, conn: Connection, is_async: bool) -> None:
    """Not of a step within it, which has more time."""
    short, long = dt.timedelta(seconds=1), dt.timedelta(hours=1)

    @app.task(name="async")
    async def coroutine() -> object:
        job = current_job()

        async def outer() -> object:
            return await job.step_async("inner", asyncio.sleep, 3600, retry=3, timeout=long)

        return await job.step_async("outer", outer, retry=2, timeout=short)

    @app.task(name="sync")
    def function() -> object:
        job = current_job()

        def inner() -> None:
            end = time.monotonic() + 3600
            while time.monotonic() < end:
                time.sleep(0.01)

        def outer() -> object:
            return job.step("inner", inner, retry=3, timeout=long)

        return job.step("outer", outer, retry=2, timeout=short)

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        with pytest.raises(JobFailed, match=r"step outer failed: TimeoutError: .* 0:00:01"):
            await job.result_async(300)
    found = conn.execute("select name, failures from queue.steps where job_id = %s", [job.id])
    assert found.fetchall() == [("outer", 2)]


@pytest.mark.parametrize(
    "deadline", [dt.timedelta(hours=1), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)]
)
async def test_a_step_has_a_deadline(
    app: App, deadline: dt.datetime | dt.timedelta, is_async: bool
) -> None:
    shop = Shop(failures=9)
    retry = Retry(9, base=dt.timedelta(hours=2))

    @app.task(name="async")
    async def coroutine() -> None:
        step = current_job().step_async
        await step("charge", shop.charge_async, 5, retry=retry, deadline=deadline)

    @app.task(name="sync")
    def function() -> None:
        current_job().step("charge", shop.charge, 5, retry=retry, deadline=deadline)

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        with pytest.raises(JobFailed, match="step charge failed: ValueError: no money 1"):
            await job.result_async(300)
    assert shop.calls == {"charge": 1}


async def test_a_transaction_is_tried_again(
    app: App, jobs: Jobs, conn: Connection, is_async: bool
) -> None:
    conn.execute("create table effect (n integer)")
    insert = "insert into effect values (%s)"

    def check(attempt: int) -> None:
        if attempt < 3:
            raise ValueError("before the commit")

    @app.task(name="async")
    async def coroutine() -> None:
        job = current_job()
        async with job.transaction_async("book", retry=3) as connection:
            assert connection is not None
            await connection.execute(insert, [job.attempt])
            check(job.attempt)

    @app.task(name="sync")
    def function() -> None:
        job = current_job()
        with job.transaction("book", retry=3) as connection:
            assert connection is not None
            connection.execute(insert, [job.attempt])
            check(job.attempt)

    app.defer("async" if is_async else "sync")
    async with running(app):
        (row,) = await jobs.end()
    assert (row["state"], row["failures"], row["attempts"]) == ("succeeded", 0, 3)
    assert conn.execute("select n from effect").fetchall() == [(3,)]
    query = "select name, failures from queue.steps"
    assert conn.execute(query).fetchall() == [("book", 2)]


async def test_a_transaction_fails_for_good(app: App, conn: Connection, is_async: bool) -> None:
    blocks: list[int] = []
    caught: list[str] = []

    def end(error: StepFailed) -> None:
        caught.append(error.error)
        if len(caught) == 1:
            raise RuntimeError("later")

    @app.task(name="async", retry=2)
    async def coroutine() -> None:
        job = current_job()
        try:
            async with job.transaction_async("book", retry=2):
                blocks.append(job.attempt)
                raise ValueError("no room")
        except StepFailed as error:
            end(error)

    @app.task(name="sync", retry=2)
    def function() -> None:
        job = current_job()
        try:
            with job.transaction("book", retry=2):
                blocks.append(job.attempt)
                raise ValueError("no room")
        except StepFailed as error:
            end(error)

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        await job.result_async(300)
    # In the second run of the two that came to it from the stored step, before the block.
    assert caught == ["ValueError: no room"] * 2
    assert blocks == [1, 2]
    assert steps(conn, job.id).keys() == {"book"}


async def test_steps_of_one_name_run_at_once(app: App, conn: Connection) -> None:
    """The first fails after the second has finished."""
    calls: Counter[int] = Counter()
    stored = asyncio.Event()

    async def ask(n: int) -> int:
        calls[n] += 1
        if n == 1:
            await stored.wait()
            if calls[1] < 3:
                raise ConnectionError("no answer")
        return n

    @app.task(name="t")
    async def t() -> list[int]:
        job = current_job()

        async def second() -> int:
            found: int = await job.step_async("ask", ask, 2)
            stored.set()
            return found

        return list(await asyncio.gather(job.step_async("ask", ask, 1, retry=3), second()))

    job = app.defer("t")
    async with running(app):
        assert await job.result_async(60) == [1, 2]
    assert calls == {1: 3, 2: 1}
    assert steps(conn, job.id) == {"ask": 1, "ask#2": 2}


async def test_a_step_that_failed_beside_others_keeps_its_number(
    app: App, conn: Connection
) -> None:
    calls: Counter[object] = Counter()

    async def ask(n: int) -> int:
        calls[n] += 1
        if n == 2:
            await asyncio.sleep(0)  # the third begins
            raise ConnectionError("no answer")
        return n

    @app.task(name="t", retry=2)
    async def t() -> list[int]:
        job = current_job()
        asked = [job.step_async("ask", ask, n) for n in (1, 2, 3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        found[1] = await job.step_async("ask", ask, 4)
        if job.attempt == 1:
            raise RuntimeError("later")
        return [int(str(n)) for n in found]

    job = app.defer("t")
    async with running(app):
        assert await job.result_async(60) == [1, 4, 3]
    assert calls == {1: 1, 2: 2, 3: 1, 4: 1}
    assert steps(conn, job.id) == {"ask": 1, "ask#3": 3, "ask#4": 4}


async def test_options_that_are_refused(app: App) -> None:
    said: list[str] = []
    hour = dt.timedelta(hours=1)

    @app.task(name="t")
    def t() -> None:
        step: Any = current_job().step
        for options in (
            {"retry": 1},
            {"retry": "x"},
            {"timeout": 5},
            {"timeout": -hour},
            {"deadline": hour},
            {"retry": 3, "deadline": 5},
            {"retry": 3, "deadline": dt.datetime(2100, 1, 1)},  # noqa: DTZ001
            {"retry": 3, "deadline": -hour},
        ):
            try:
                step("a", len, "x", **options)
            except (TypeError, ValueError) as error:
                said.append(str(error))

    job = t.defer()
    async with running(app):
        await job.result_async(300)
    assert [text.partition(",")[0] for text in said] == [
        "a step: retry=1 is one attempt",
        "retry must be a number of attempts or a Retry(...)",
        "a step: timeout must be a timedelta",
        "a step: timeout must be positive",
        "a step: deadline ends the attempts of a policy: pass retry too",
        "a step: deadline must be a datetime or timedelta",
        "a step: deadline has no time zone: datetime.datetime(2100",
        "a step: deadline_in must be from 0 to 4",
    ]

"""Durable jobs: handlers that continue where they were."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import psycopg
import pytest

from pgdefer import (
    App,
    ClaimLost,
    JobAborted,
    JobCancelled,
    JobFailed,
    JobSuspended,
    Retry,
    StepChanged,
    current_job,
)

from .conftest import Jobs, running, steps, until

Connection = psycopg.Connection[Any]


async def test_a_step_runs_once(app: App, jobs: Jobs, conn: Connection, is_async: bool) -> None:
    runs: list[str] = []

    def charge(amount: int, *, currency: str) -> dict[str, Any]:
        runs.append(f"charge {amount} {currency}")
        return {"receipt": dt.date(2030, 1, 31)}

    async def ship() -> str:
        runs.append("ship")
        return "shipped"

    retry = Retry(max_attempts=3)
    if is_async:

        @app.task(name="order", retry=retry)
        async def coroutine() -> list[Any]:
            job = current_job()
            found = [await job.step_async("charge", charge, 5, currency="EUR")]
            found += [await job.step_async("loop", len, "ab" * n) for n in range(3)]
            if job.attempt == 1:
                raise ValueError("later")
            return [*found, await job.step_async("ship", ship)]
    else:

        @app.task(name="order", retry=retry)
        def function() -> list[Any]:
            job = current_job()
            found = [job.step("charge", charge, 5, currency="EUR")]
            found += [job.step("loop", len, "ab" * n) for n in range(3)]
            if job.attempt == 1:
                raise ValueError("later")
            return [*found, job.step("ship", lambda: runs.append("ship") or "shipped")]

    job = app.defer("order")
    async with running(app):
        result = await job.result_async(60)
    assert result == [{"receipt": dt.date(2030, 1, 31)}, 0, 2, 4, "shipped"]
    assert runs == ["charge 5 EUR", "ship"]
    assert steps(conn, job.id).keys() == {"charge", "loop", "loop#2", "loop#3", "ship"}


async def test_a_transaction_commits_with_its_step(
    app: App, jobs: Jobs, conn: Connection, is_async: bool
) -> None:
    conn.execute("create table effect (n integer)")
    retry = Retry(max_attempts=3)
    if is_async:

        @app.task(name="book", retry=retry)
        async def coroutine() -> None:
            job = current_job()
            async with job.transaction_async("book") as connection:
                if connection is not None:
                    await connection.execute("insert into effect values (%s)", [job.attempt])
                    if job.attempt == 1:
                        raise ValueError("before the commit")
            if job.attempt == 2:
                raise ValueError("after the commit")
    else:

        @app.task(name="book", retry=retry)
        def function() -> None:
            job = current_job()
            with job.transaction("book") as connection:
                if connection is not None:
                    connection.execute("insert into effect values (%s)", [job.attempt])
                    if job.attempt == 1:
                        raise ValueError("before the commit")
            if job.attempt == 2:
                raise ValueError("after the commit")

    app.defer("book")
    async with running(app):
        (row,) = await jobs.end()
    assert row["state"] == "succeeded"
    assert conn.execute("select n from effect").fetchall() == [(2,)]


async def test_a_job_sleeps_and_waits(
    app: App, jobs: Jobs, conn: Connection, is_async: bool
) -> None:
    seen: list[Any] = []
    soon = dt.timedelta(milliseconds=20)
    if is_async:

        @app.task(name="process")
        async def coroutine() -> list[Any]:
            job = current_job()
            try:
                await job.sleep_async("nap", soon)
                seen.append(await job.wait_for_async("approved"))
                seen.append(await job.wait_for_async("never", timeout=soon))
                return [await job.wait_for_async("open", event="shop open"), job.attempt]
            except Exception:
                return ["suspension is an Exception"]
    else:

        @app.task(name="process")
        def function() -> list[Any]:
            job = current_job()
            try:
                job.sleep("nap", soon)
                seen.append(job.wait_for("approved"))
                seen.append(job.wait_for("never", timeout=soon))
                return [job.wait_for("open", event="shop open"), job.attempt]
            except Exception:
                return ["suspension is an Exception"]

    job = app.defer("process")
    async with running(app, concurrency=1):
        await until(lambda: jobs()[0]["reason"] == "signal")
        assert job.why() == "at its step approved it waits for signal approved"
        await job.signal_async("approved", {"by": "a", "at": dt.date(2030, 1, 31)})
        await until(lambda: "open" in job.why())
        assert app.publish("shop open", [1]) is True
        assert app.publish("shop open") is False
        assert await job.result_async(60) == [[1], 5]
    assert seen[-2:] == [{"by": "a", "at": dt.date(2030, 1, 31)}, None]
    assert jobs()[0]["progress"] == 0


async def test_a_job_sleeps_within_a_task_group(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(name="grouped")
    async def task() -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(current_job().sleep_async("pause", dt.timedelta(milliseconds=1)))
        return "awake"

    job = await task.defer_async()
    async with running(app):
        assert await job.result_async(60) == "awake"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_children_run_on_one_slot(app: App, jobs: Jobs, is_async: bool) -> None:
    @app.task(name="child")
    async def child(n: int) -> int:
        if n == 13:
            raise ValueError("unlucky")
        return n * n

    if is_async:

        @app.task(name="parent")
        async def coroutine() -> Any:
            job = current_job()
            squares = await job.gather_async([child.prepare(n) for n in range(30) if n != 13])
            one = await job.call_async(child.prepare(7))
            try:
                await job.call_async(child.prepare(13))
            except JobFailed as error:
                return [sum(squares), one, str(error.error)]
    else:

        @app.task(name="parent")
        def function() -> Any:
            job = current_job()
            squares = job.gather([child.prepare(n) for n in range(30) if n != 13])
            one = job.call(child.prepare(7))
            try:
                job.call(child.prepare(13))
            except JobFailed as error:
                return [sum(squares), one, str(error.error)]

    job = app.defer("parent")
    async with running(app, concurrency=1):
        result = await job.result_async(60)
    expected = sum(n * n for n in range(30) if n != 13)
    assert result == [expected, 49, "ValueError: unlucky"]
    assert len(jobs()) == 32
    assert {row["parent"] for row in jobs() if row["task"] == "child"} == {job.id}


async def test_errors_of_children_may_stand_in_the_list(app: App, jobs: Jobs) -> None:
    @app.task(name="bad")
    async def bad() -> None:
        raise ValueError("no")

    @app.task(name="stopped")
    async def stopped() -> None:
        raise JobAborted

    @app.task(name="parent")
    async def parent() -> list[str]:
        calls = [bad.prepare(), stopped.configure(held=True).prepare()]
        found = await current_job().gather_async(calls, return_errors=True)
        return [type(each).__name__ for each in found]

    job = app.defer("parent")
    async with running(app):
        await until(lambda: job.why().startswith("it needs"))
        (held,) = [row["id"] for row in jobs() if row["state"] == "held"]
        app.job(held).unhold()
        assert await job.result_async(60) == ["JobFailed", JobCancelled.__name__]


async def test_a_result_that_cannot_be_decoded_hides_no_other(
    app: App, jobs: Jobs, is_async: bool
) -> None:
    @app.task(name="odd")
    def odd() -> object:
        return object()

    @app.task(name="even")
    def even() -> int:
        return 2

    def told(found: list[Any]) -> list[str]:
        return [type(one).__name__ for one in found]

    @app.task(name="async")
    async def coroutine() -> list[str]:
        calls = [odd.prepare(), even.prepare()]
        return told(await current_job().gather_async(calls, return_errors=True))

    @app.task(name="sync")
    def function() -> list[str]:
        return told(current_job().gather([odd.prepare(), even.prepare()], return_errors=True))

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        assert await job.result_async(300) == ["DecodeError", "int"]


async def test_streams_and_progress(app: App, jobs: Jobs, is_async: bool) -> None:
    go_on = threading.Event()

    @app.task(name="tokens")
    def tokens() -> None:
        job = current_job()
        for percent in (Fraction(1, 3), Decimal("-0.004"), 100.004):
            job.progress(percent)  # type: ignore[arg-type]
        job.progress(50, "half")
        for n in range(3):
            assert job.emit("out", {"n": n}) == n + 1
        assert go_on.wait(60)
        job.emit("out", "end")

    job = app.defer("tokens")
    async with running(app):
        found = []
        async for value in job.stream_async("out"):
            found.append(value)
            go_on.set()
        if not is_async:
            found = list(job.stream("out"))
    assert found == [{"n": 0}, {"n": 1}, {"n": 2}, "end"]
    assert list(job.stream("out", after=3)) == ["end"]
    assert (jobs()[0]["percent"], jobs()[0]["message"]) == (50, "half")


async def test_a_step_that_changed_does_not_run(app: App, jobs: Jobs) -> None:
    runs = []

    @app.task(name="t", retry=Retry(max_attempts=2))
    async def t() -> str:
        job = current_job()
        try:
            await job.step_async("a", runs.append, 1, fingerprint=f"v{job.attempt}")
        except StepChanged as error:
            return str(error.detail)
        raise ValueError("later")

    job = app.defer("t")
    async with running(app):
        assert "fingerprint: v1, now: v2" in await job.result_async(60)
    assert runs == [1]


async def test_a_step_that_fails_may_be_tried_again(app: App, conn: Connection) -> None:
    @app.task(name="t")
    async def t() -> int:
        for n in range(3):
            try:
                return int(await current_job().step_async("divide", lambda n=n: 10 // n))
            except ZeroDivisionError:
                pass
        return -1

    job = app.defer("t")
    async with running(app):
        assert await job.result_async(60) == 10
    assert steps(conn, job.id) == {"divide": 10}


async def test_steps_that_fetch_leaves_out_are_read(app: App, conn: Connection) -> None:
    runs: list[int] = []

    @app.task(name="t", retry=Retry(max_attempts=2))
    async def t() -> int:
        job = current_job()
        texts = [await job.step_async("big", big, n) for n in range(5)]
        if job.attempt == 1:
            raise ValueError("later")
        return sum(map(len, texts))

    def big(n: int) -> str:
        runs.append(n)
        return f"{n}" + "".join(chr(33 + i * 7919 % 90) for i in range(40_000))

    job = app.defer("t")
    async with running(app):
        assert await job.result_async(60) == 5 * 40_001
    assert runs == list(range(5))


async def test_a_lost_claim_finishes_no_step(app: App, jobs: Jobs, conn: Connection) -> None:
    lost: list[BaseException] = []
    first: dict[str, int] = {}

    @app.task(name="t", retry=Retry(max_attempts=2))
    def t() -> None:  # not a coroutine, which would be cancelled
        job = current_job()
        calls: list[Callable[[], object]] = [
            lambda: job.step("a", len, ""),
            lambda: job.sleep("b", dt.timedelta(0)),
            lambda: job.wait_for("c"),
            lambda: job.emit("d", 1),
        ]
        if job.claim == first.setdefault("claim", job.claim):
            conn.execute("select queue.retry(array[%s]::bigint[], force => true)", [job.id])
            for call in calls:
                try:
                    call()
                except (ClaimLost, JobSuspended) as error:
                    lost.append(error)

    job = app.defer("t")
    async with running(app):
        await job.result_async(60)
    assert [type(error) for error in lost] == [ClaimLost] * 4
    assert steps(conn, job.id) == {}


async def test_back_to_a_step(app: App, conn: Connection, is_async: bool) -> None:
    runs: list[str] = []

    @app.task(name="order")
    def order() -> None:
        for name in ("charge", "pack", "ship"):
            current_job().step(name, runs.append, name)

    job = app.defer("order")
    async with running(app):
        await job.result_async(60)
        if is_async:
            await job.retry_async(from_step="pack")
        else:
            job.retry(from_step="pack")
        with pytest.raises(StepChanged, match=r"no such step .*`pgdefer job steps 1`"):
            job.retry(from_step="zzz")
        await job.result_async(60)
        forked = await job.fork_async("ship") if is_async else job.fork("ship")
        await app.job(forked).result_async(60)
    assert runs == ["charge", "pack", "ship", "pack", "ship", "ship"]
    assert steps(conn, forked).keys() == {"charge", "pack", "ship"}


async def test_waits_name_the_argument_that_is_wrong(app: App, is_async: bool) -> None:
    said: list[str] = []
    naive = dt.datetime(2030, 1, 1)  # noqa: DTZ001

    def calls(sleep: Any, wait: Any) -> list[Callable[[], Any]]:
        return [
            lambda: sleep("w", 5),
            lambda: sleep("w", naive),
            lambda: sleep("w", dt.timedelta.max),
            lambda: sleep(5, dt.timedelta(1)),
            lambda: wait("w", signal=5),
            lambda: wait("w", event="a\0"),
            lambda: wait("w", timeout=5),
            lambda: wait("w", timeout=dt.timedelta.min),
        ]

    @app.task(name="async")
    async def coroutine() -> None:
        job = current_job()
        for call in calls(job.sleep_async, job.wait_for_async):
            with pytest.raises((TypeError, ValueError)) as caught:
                await call()
            said.append(str(caught.value))

    @app.task(name="sync")
    def function() -> None:
        job = current_job()
        for call in calls(job.sleep, job.wait_for):
            with pytest.raises((TypeError, ValueError)) as caught:
                call()
            said.append(str(caught.value))

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        await job.result_async(60)
    assert said == [
        "until must be a datetime or a timedelta, not 5",
        f"until has no time zone: {naive!r}",
        f"until must be from 0 to 4,000 years, not {dt.timedelta.max}",
        "name must be a text, not 5",
        "signal must be a text, not 5",
        "event has a character that PostgreSQL can't store ('a\\x00')",
        "timeout must be a timedelta, not 5",
        f"timeout must be from 0 to 4,000 years, not {dt.timedelta.min}",
    ]

"""Versions of arguments, and changes of code while jobs are under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from pgdefer import App, DecodeError, JobContext, current_job

from .conftest import Jobs, running, until

Connection = psycopg.Connection[Any]


@contextlib.asynccontextmanager
async def hurrying(conn: Connection) -> AsyncIterator[None]:
    """Let jobs that a worker gave back be offered again at once."""

    async def hurry() -> None:
        while True:
            conn.execute(
                "select queue.reschedule(id, now()) from queue.jobs j where state = 'scheduled'"
                " and exists (select from queue.attempts a where a.job_id = j.id"
                " and a.details ? 'unknown_task')"
            )
            await asyncio.sleep(0.05)

    task = asyncio.create_task(hurry())
    try:
        yield
    finally:
        task.cancel()


def test_a_stream_brings_args_of_known_tasks_up_to_date(app: App) -> None:
    @app.task(name="order", version=2)
    def order(order_id: int) -> None: ...

    @order.upgrade
    def _upgrade(args: dict[str, Any], version: int) -> dict[str, Any]:
        assert version == 1
        return {"order_id": args["id"]}

    app.defer("order", {"id": 1, "__version__": 1})
    order.defer(2)
    app.defer("other", {"id": 3, "__version__": 2})
    with app.stream_jobs(drain=True) as stream:
        seen = {}
        for job in stream:
            with job:
                seen[job.id] = job.args
    assert list(seen.values()) == [{"order_id": 1}, {"order_id": 2}, {"id": 3, "__version__": 2}]


async def test_args_are_brought_up_to_date(app: App, dsn: str, jobs: Jobs) -> None:
    asked: list[tuple[dict[str, Any], int]] = []

    @app.task(name="order", version=3)
    async def order(order_id: int, currency: str) -> str:
        return f"{order_id} {currency}"

    @order.upgrade
    def _upgrade(args: dict[str, Any], version: int) -> dict[str, Any]:
        asked.append((dict(args), version))
        if version == 1:
            args["order_id"] = args.pop("id")
        return {**args, "currency": "EUR"}

    old = [
        app.defer("order", {"id": 1, "__version__": 1}),
        app.defer("order", {"order_id": 2, "__version__": 2}),
        order.defer(3, "USD"),
        app.defer("order", {"order_id": 4, "currency": "CHF"}),
    ]
    with App(dsn) as other:  # which does not know the task, as a trigger
        old.append(other.defer("order", {"id": 5}))
    async with running(app):
        results = [await job.result_async(60) for job in old]
    assert results == ["1 EUR", "2 EUR", "3 USD", "4 CHF", "5 EUR"]
    assert sorted(asked, key=str) == [({"id": 1}, 1), ({"id": 5}, 1), ({"order_id": 2}, 2)]
    assert [row["args"].get("__version__") for row in jobs()] == [1, 2, 3, 3, None]


@pytest.mark.parametrize("version", [0, -1, 2.5, "2", True, None, [1], 2**31])
async def test_a_malformed_version_fails_the_job(app: App, jobs: Jobs, version: Any) -> None:
    @app.task(name="t", version=2, retry=3)
    def t() -> None: ...

    app.defer("t", {"__version__": version})
    async with running(app):
        (row,) = await jobs.end()
    assert (row["state"], row["attempts"]) == ("failed", 1)
    assert (
        f"{DecodeError.__name__}: __version__ of the arguments is {version!r}, but" in row["error"]
    )
    assert "Correct it by set_args" in row["error"]


async def test_what_an_upgrade_returns_is_checked(app: App, jobs: Jobs) -> None:
    @app.task(name="none", version=2)
    def none() -> None: ...

    @none.upgrade
    def _none(args: dict[str, Any], version: int) -> Any:
        return None

    @app.task(name="other", version=2)
    def other() -> None: ...

    @other.upgrade
    def _other(args: dict[str, Any], version: int) -> dict[str, Any]:
        return {"a": 1}

    for task in ("none", "other"):
        app.defer(task, {"__version__": 1})
    async with running(app):
        rows = await jobs.end()
    assert [row["state"] for row in rows] == ["failed", "failed"]
    assert "must return the arguments" in rows[0]["error"]
    assert "takes no argument a" in rows[1]["error"]


def test_versions_are_numbers_in_order(app: App) -> None:
    for options in ({"version": 0}, {"min_version": 0}):
        with pytest.raises(ValueError, match="must be from 1 to"):
            app.task(**options)(print)  # type: ignore[arg-type]
    for options in ({"version": 2, "min_version": 3}, {"min_version": 3}):
        with pytest.raises(ValueError, match="min_version, 3, must not be above version, "):
            app.task(**options)(print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an int"):
        app.task(version="2")(print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="can't be named"):

        @app.task
        def t(__version__: int) -> None: ...


async def test_a_worker_takes_its_range_of_versions(
    app: App, dsn: str, jobs: Jobs, conn: Connection
) -> None:
    ran: list[tuple[str, int]] = []

    @app.task(name="t", version=2)
    def older(n: int) -> None:
        ran.append(("older", n))

    newer = App(dsn)

    @newer.task(name="t", version=4, min_version=3)
    def newer_t(n: int) -> None:
        ran.append(("newer", n))

    for version in (1, 2, 3, 4):
        app.defer("t", {"n": version, "__version__": version})
    async with running(app), running(newer), hurrying(conn):
        rows = await jobs.end()
    assert {row["state"] for row in rows} == {"succeeded"}
    assert sorted(ran) == [("newer", 3), ("newer", 4), ("older", 1), ("older", 2)]
    assert all(row["attempts"] == 1 for row in rows)


@pytest.mark.parametrize(("oldest", "latest", "known"), [(2, 2, "2"), (2, 3, "2 to 3")])
async def test_the_log_names_a_version_that_is_too_old(
    app: App, caplog: pytest.LogCaptureFixture, oldest: int, latest: int, known: str
) -> None:
    @app.task(name="t", version=latest, min_version=oldest)
    def t() -> None: ...

    app.defer("t", {"__version__": 1})
    said = (
        "claim 1> was given back and is scheduled: "
        f"its arguments have version 1, known here is {known}"
    )
    async with running(app):
        await until(lambda: said in caplog.text)
    assert "does not know" not in caplog.text


class Deploy:
    """The same program before and after a deploy."""

    def __init__(self, dsn: str) -> None:
        self.ran: Counter[tuple[Any, ...]] = Counter()
        self.old, self.new = App(dsn), App(dsn)

    def note(self, job: JobContext, step: str) -> str:
        self.ran[job.id, step] += 1
        return step

    def define(self) -> None:
        old, new = self.old, self.new

        @old.task(name="removed")
        async def removed() -> None:
            self.ran["removed"] += 1

        @new.task(name="added")
        async def added() -> None:
            self.ran["added"] += 1

        @old.task(name="more")
        async def more_old(order_id: int) -> None:
            self.ran["more", order_id] += 1

        @new.task(name="more", version=2)
        async def more_new(order_id: int, currency: str) -> None:
            assert currency == "EUR"
            self.ran["more", order_id] += 1

        @more_new.upgrade
        def _more(args: dict[str, Any], version: int) -> dict[str, Any]:
            return {**args, "currency": "EUR"}

        @old.task(name="renamed")
        async def renamed_old(amount: int) -> None:
            self.ran["renamed", amount] += 1

        @new.task(name="renamed", version=2)
        async def renamed_new(total: int) -> None:
            self.ran["renamed", total] += 1

        @renamed_new.upgrade
        def _renamed(args: dict[str, Any], version: int) -> dict[str, Any]:
            return {"total": args["amount"]}

        self.define_durable()

    def define_durable(self) -> None:
        old, new, note = self.old, self.new, self.note

        @old.task(name="durable")
        async def durable_old() -> list[str]:
            job = current_job()
            found = [await job.step_async(name, note, job, name) for name in ("a", "b")]
            await job.wait_for_async("deployed")
            return [*found, await job.step_async("c", note, job, "c")]

        @new.task(name="durable")
        async def durable_new() -> list[str]:
            job = current_job()
            found = [await job.step_async(name, note, job, name) for name in ("b", "new", "a")]
            await job.wait_for_async("deployed")
            return [*found, await job.step_async("c", note, job, "c")]

        @old.task(name="changed", retry=3)
        async def changed_old() -> None:
            job = current_job()
            await job.step_async("a", note, job, "a", fingerprint="v1")
            await job.wait_for_async("deployed")

        @new.task(name="changed", retry=3)
        async def changed_new() -> None:
            job = current_job()
            await job.step_async("a", note, job, "a", fingerprint="v2")
            await job.wait_for_async("deployed")

    def defer_all(self, n: int) -> None:
        for i in range(n):
            self.old.defer("removed")
            self.old.defer("more", {"order_id": i})
            self.old.defer("renamed", {"amount": i})
            self.new.defer("added")
            self.new.defer("more", {"order_id": n + i, "currency": "EUR"})
            self.new.defer("renamed", {"total": n + i})


async def test_a_rolling_deploy(dsn: str, jobs: Jobs, conn: Connection) -> None:
    """Old and new workers, six changes of code: no job fails, no step is repeated."""
    n = 10
    deploy = Deploy(dsn)
    deploy.define()
    durable = [deploy.old.defer("durable").id for _ in range(n)]
    changed = deploy.old.defer("changed").id
    waiting = (
        "select count(*) from queue.jobs where state = 'waiting' and task in ('durable', 'changed')"
    )
    async with running(deploy.old), hurrying(conn):
        await until(lambda: conn.execute(waiting).fetchone() == (n + 1,))
        async with running(deploy.new):
            deploy.defer_all(n)
            both = [row["id"] for row in jobs() if row["id"] not in (*durable, changed)]
            await jobs.end(*both)
            # Some while both run, the others after it.
            for id in durable[: n // 2]:
                conn.execute("select queue.signal(%s, 'deployed')", [id])
            await jobs.end(*durable[: n // 2])
    async with running(deploy.new):
        for id in (*durable[n // 2 :], changed):
            conn.execute("select queue.signal(%s, 'deployed')", [id])
        rows = {row["id"]: row for row in await jobs.end()}
    refused = rows.pop(changed)
    assert {row["state"] for row in rows.values()} == {"succeeded"}
    assert {row["failures"] for row in rows.values()} == {0}
    ran = deploy.ran
    assert (ran.pop(("removed",), 0), ran["removed"], ran["added"]) == (0, n, n)
    for task in ("more", "renamed"):
        assert [ran[task, i] for i in range(2 * n)] == [1] * 2 * n
    steps = {key: times for key, times in ran.items() if key[0] in durable}
    assert set(steps.values()) == {1}
    assert all((id, name) in steps for id in durable for name in "abc")
    assert all((id, "new") in steps for id in durable[n // 2 :])
    # The seventh, a changed step, is refused before it runs.
    assert (refused["state"], refused["reason"]) == ("failed", "not_retryable")
    assert "StepChanged" in refused["error"]
    assert ran[changed, "a"] == 1

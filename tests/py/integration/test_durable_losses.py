"""Durable jobs whose connections are lost in their calls, as at a restart of the server."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from typing import Any

import psycopg
import pytest

from pgdefer import App, JobContext, PreparedJob, RetryLater, TransactionLost, current_job

from .conftest import Jobs, running, wait_for

Connection = psycopg.Connection[Any]

ALL = (
    "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
    " where datname = current_database() and application_name like 'pgdefer%'"
)
WAITING = f"{ALL} and wait_event_type = 'Lock'"

NAP, MOMENT = dt.timedelta(0), dt.timedelta(milliseconds=1)


class Loss:
    """A function that loses a session once: all at once, or the next that needs the claim's row."""

    def __init__(self, dsn: str) -> None:
        self._dsn: str | None = dsn
        self._ready = threading.Event()

    def __call__(self, *, at_once: bool = False) -> str:
        dsn, self._dsn = self._dsn, None
        if dsn is not None and at_once:
            with psycopg.connect(dsn, autocommit=True) as other:
                other.execute(ALL)
        elif dsn is not None:
            threading.Thread(target=self._lose, args=(dsn,), daemon=True).start()
            assert self._ready.wait(60)
        return "stored"

    def _lose(self, dsn: str) -> None:
        with psycopg.connect(dsn) as holder, psycopg.connect(dsn, autocommit=True) as other:
            holder.execute("select from queue.active_job where claim is not null for update")
            self._ready.set()
            wait_for(lambda: other.execute(WAITING).fetchall())


async def calls_async(job: JobContext, call: str, lose: Loss, child: PreparedJob[Any]) -> object:
    match call:
        case "step":
            return await job.step_async("s", lose)
        case "transaction":
            async with job.transaction_async("t", retry=3) as connection:
                if connection is not None:
                    lose(at_once=True)
                    await connection.execute("select 1")
            return "stored"
    await job.step_async("before", str)
    lose()
    match call:
        case "sleep":
            await job.sleep_async("nap", NAP)
        case "wait":
            await job.wait_for_async("w", timeout=MOMENT)
        case "gather":
            await job.gather_async([child])
        case "progress":
            await job.progress_async(50)
    return "stored"


def calls(job: JobContext, call: str, lose: Loss, child: PreparedJob[Any]) -> object:
    match call:
        case "step":
            return job.step("s", lose)
        case "transaction":
            with job.transaction("t", retry=3) as connection:
                if connection is not None:
                    lose(at_once=True)
                    connection.execute("select 1")
            return "stored"
    job.step("before", str)
    lose()
    match call:
        case "sleep":
            job.sleep("nap", NAP)
        case "wait":
            job.wait_for("w", timeout=MOMENT)
        case "gather":
            job.gather([child])
        case "progress":
            job.progress(50)
    return "stored"


@pytest.mark.parametrize("call", ["step", "transaction", "sleep", "wait", "gather", "progress"])
async def test_a_lost_session_is_no_failure(
    app: App, dsn: str, jobs: Jobs, is_async: bool, call: str
) -> None:
    """No attempt is used up: the default is one."""
    lose = Loss(dsn)

    @app.task(name="child")
    async def child() -> None: ...

    @app.task(name="async")
    async def coroutine() -> object:
        return await calls_async(current_job(), call, lose, child.prepare())

    @app.task(name="sync")
    def function() -> object:
        return calls(current_job(), call, lose, child.prepare())

    task: Any = coroutine if is_async else function
    async with running(app):
        job = await task.defer_async()
        await jobs.end()
    row = next(row for row in jobs() if row["id"] == job.id)
    assert (row["state"], row["failures"], row["result"]) == ("succeeded", 0, "stored")
    crashes = [each for each in jobs.attempts() if each["outcome"] == "crashed"]
    assert [each["error"].partition("\n")[0] for each in crashes] == [
        "TransactionLost: the connection was lost in a step of the job"
    ]


async def test_a_loss_in_a_task_group(app: App, dsn: str, jobs: Jobs) -> None:
    lose = Loss(dsn)

    @app.task(name="t")
    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(current_job().step_async("s", lose))

    async with running(app):
        await group.defer_async()
        (row,) = await jobs.end()
    assert (row["state"], row["failures"]) == ("succeeded", 0)
    assert [each["outcome"] for each in jobs.attempts()] == ["crashed"]


async def test_what_the_handler_says_of_a_loss_counts(app: App, dsn: str, jobs: Jobs) -> None:
    lose = Loss(dsn)

    @app.task(name="t")
    async def later() -> None:
        async with current_job().transaction_async("t") as connection:
            assert connection is not None
            lose(at_once=True)
            try:
                await connection.execute("select 1")
            except psycopg.OperationalError:
                raise RetryLater("lost") from None

    async with running(app):
        await later.defer_async()
        (row,) = await jobs.end()
    assert (row["state"], row["crashes"]) == ("succeeded", 0)
    assert [each["outcome"] for each in jobs.attempts()] == ["yielded"]


async def test_what_the_handler_itself_loses_is_a_failure(app: App, jobs: Jobs) -> None:
    """It has closed the connection, or another server is down."""

    @app.task(name="closes")
    async def closes() -> None:
        async with current_job().transaction_async("t") as connection:
            assert connection is not None
            await connection.close()
            await connection.execute("select 1")

    @app.task(name="other")
    async def other() -> None:
        await current_job().step_async("s", psycopg.connect, "host=localhost port=1")

    async with running(app):
        await closes.defer_async()
        await other.defer_async()
        rows = await jobs.end()
    assert [row["state"] for row in rows] == ["failed", "failed"]
    assert not any(row["error"].startswith(TransactionLost.__name__) for row in rows)

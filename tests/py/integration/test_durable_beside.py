"""Durable calls beside each other, in a TaskGroup, a gather or threads."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgdefer import App, ClaimLost, JobSuspended, Worker, current_job
from pgdefer.tasks.raised import suspension
from pgdefer.tasks.steps import Steps
from pgdefer.testing import TestQueue

from .conftest import Jobs, running, until

SOON = dt.timedelta(milliseconds=20)
Connection = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Suspended runs are not logged as errors."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelname == "ERROR"]


async def test_waits_beside_each_other(app: App, conn: Connection) -> None:

    @app.task(name="child")
    async def child(n: int) -> int:
        return n

    async def all_of(job: Any) -> list[Any]:
        return [
            job.sleep_async("a", SOON),
            job.sleep_async("b", SOON),
            job.wait_for_async("c", timeout=SOON),
            job.gather_async([child.prepare(1), child.prepare(2)]),
            job.call_async(child.prepare(3)),
        ]

    @app.task(name="grouped")
    async def grouped() -> list[Any]:
        async with asyncio.TaskGroup() as group:
            made = [group.create_task(one) for one in await all_of(current_job())]
        return [one.result() for one in made]

    @app.task(name="gathered")
    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*await all_of(current_job())))

    made = [await task.defer_async() for task in (grouped, gathered)]
    async with running(app):
        for job in made:
            assert await job.result_async(60) == [None, None, None, [1, 2], 3]
            states = conn.execute("select count(*) from queue.jobs where parent = %s", [job.id])
            assert states.fetchone() == (3,)


async def test_a_stream_goes_on_after_waits_beside_each_other(app: App, jobs: Jobs) -> None:
    made = [await app.defer_async("t") for _ in range(3)]
    hour = dt.timedelta(hours=1)
    async with app.stream_jobs(drain=True) as stream:
        async for job in stream:
            with job:
                async with asyncio.TaskGroup() as group:
                    for name in "abc":
                        group.create_task(job.sleep_async(name, hour))
    assert [row["state"] for row in jobs()] == ["scheduled"] * len(made)


def test_a_test_runs_waits_beside_each_other(app: App, conn: Connection) -> None:
    hour = dt.timedelta(hours=1)

    @app.task(name="t")
    async def t() -> None:
        job = current_job()

        async def refuse() -> None:
            raise ConnectionError("no answer")

        async with asyncio.TaskGroup() as group:
            group.create_task(job.sleep_async("a", hour))
            group.create_task(job.sleep_async("b", hour))
            group.create_task(job.step_async("c", refuse, retry=3))

    with conn.transaction(force_rollback=True), TestQueue(app, conn) as queue:
        t.defer()
        assert [ran.state for ran in queue.run(raise_errors=False)] == ["scheduled"]


async def test_a_worker_that_stops_cuts_short_what_follows_a_wait(app: App, jobs: Jobs) -> None:
    cut: list[type[BaseException]] = []

    @app.task(name="t")
    async def t() -> None:
        try:
            await current_job().wait_for_async("go")
        finally:
            try:
                await asyncio.sleep(60)
            except BaseException as error:
                cut.append(type(error))
                raise

    await t.defer_async()
    worker = Worker(app, shutdown_timeout=0.1)
    task = asyncio.create_task(worker.run_async())
    await until(lambda: jobs()[0]["state"] == "waiting")
    worker.stop()
    await task
    await app.close_async()
    assert cut == [asyncio.CancelledError]
    assert jobs()[0]["state"] == "waiting"


def test_what_suspends_a_run() -> None:
    ended = Steps(None)
    ended.suspended("slept", "scheduled")
    caused = JobSuspended()
    caused.__cause__ = ValueError("no answer")
    lost, plain = ClaimLost("lost"), JobSuspended()

    def group(*errors: BaseException) -> BaseException:
        return BaseExceptionGroup("", errors)

    for error, found in (
        (None, None),
        (plain, plain),
        (lost, None),
        (group(lost), None),
        (group(plain, lost), plain),
        (group(lost, group(plain, caused)), caused),
        (group(plain, ValueError()), None),
    ):
        assert suspension(error, ended) is found
    assert suspension(group(plain, lost), Steps(None)) is None
    assert suspension(group(group(plain)), Steps(None)) is plain

"""An App's lists and statistics, and the schedules that it makes outside of the code."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext import asyncio as sa_async

from pgdefer import App, JobContext, JobEvent, JobNotFound, Retry, current_job
from pgdefer.database.callers import OWN
from pgdefer.database.source import LAST
from support import url_of

from .conftest import Jobs, running

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


async def test_lists(app: App, conn: Connection, jobs: Jobs) -> None:
    @app.task(name="t", queue="mail", lock="customer:{customer}", retry=Retry(3))
    async def task(customer: int) -> None: ...

    @app.task(name="bad")
    async def bad() -> None:
        raise ValueError("no")

    for customer in (1, 1, 2):
        task.defer(customer=customer)
    app.defer("limited", concurrency_key="k", concurrency_limit=2)
    (failed,) = [bad.defer()]
    async with running(app, ["default"], name="w"):
        await jobs.end(failed.id)
        (worker,) = await app.list_workers_async()
        assert (worker.name, worker.queues, worker.is_alive) == ("w", ["default"], True)
    conn.execute("select queue.tick()")  # which settles what the worker could not
    assert [job.id for job in app.list_jobs(task)] == [3, 2, 1]
    assert [job.id for job in app.list_jobs(task, max_jobs=1, before=3)] == [2]
    assert [job.id for job in app.list_jobs("t", pattern='"customer": 2')] == [3]
    assert [job.id for job in app.list_jobs(pattern="customer:1", by="key")] == [2, 1]
    (found,) = app.list_jobs(state="failed")
    assert (found.id, found.task, found.queue, found.attempts) == (failed.id, "bad", "default", 1)
    assert found.error == "ValueError: no"
    assert found.started_at is not None
    assert found.finished_at is not None
    assert found.started_at <= found.finished_at
    queues = {queue.name: queue for queue in app.list_queues()}
    assert queues["mail"].ready == 2
    app.pause(task=task, queue="slow")
    known = {known.name: known.paused_in for known in app.list_tasks()}
    assert known == {"t": ["slow"], "bad": []}
    app.resume(task=task, queue="slow")
    assert [(lock.lock, lock.waiting) for lock in app.list_locks()] == [
        ("customer:1", 2),
        ("customer:2", 1),
    ]
    assert [(one.key, one.limit, one.used) for one in app.list_limits()] in ([("k", 2, 0)], [])
    stats = {(row.queue, row.task): row for row in app.stats()}
    assert stats["mail", "t"].ready == 2
    assert stats["default", "bad"].failed_5m == 1
    assert {check.status for check in app.health()} <= {"ok", "warn", "fail"}
    assert [job.id for job in app.retry_failed(bad)] == [failed.id]
    app.move_jobs([failed], "slow")
    assert app.list_jobs(bad)[0].queue == "slow"
    failed.cancel()
    assert app.prune("cancelled", older_than=dt.timedelta(0)) == 1
    await app.close_async()


async def test_what_is_known_of_a_job(app: App, conn: Connection, dsn: str) -> None:
    day = dt.date(2030, 1, 2)

    @app.task(name="t", lock="day:{day}", version=2)
    async def task(day: dt.date, pages: int = 1) -> tuple[int, ...]:
        return (pages,)

    task.upgrade(lambda args, version: args)
    job = task.configure(description="d", deadline=LAST).defer(day)
    info = job.info()
    assert (info.state, info.lock, info.description) == ("ready", "day:2030-01-02", "d")
    assert (info.args, info.result, info.headers) == ({"day": day, "__version__": 2}, None, None)
    assert [field.name for field in dataclasses.fields(info)] == [
        name
        for (name,) in conn.execute(
            "select attname::text from pg_attribute"
            " where attrelid = 'queue.jobs'::regclass and attnum > 0 order by attnum"
        )
    ]
    async with running(app):
        await job.result_async(60)
    engine = sa_async.create_async_engine(url_of(dsn))
    async with engine.connect() as alchemist, await psycopg.AsyncConnection.connect(dsn) as own:
        for connection in (OWN, alchemist, own):
            info = await job.info_async(connection=connection)
            assert (info.state, info.result, info.attempts) == ("succeeded", (1,), 1)
    await engine.dispose()
    with pytest.raises(JobNotFound):
        app.job(job.id + 1).info()
    with pytest.raises(JobNotFound):
        await app.job(job.id + 1).info_async()


async def test_the_arguments_of_a_running_job(app: App) -> None:
    """For middleware, hooks and helpers, which do not know the handler's parameters."""
    seen: list[Any] = []
    day = dt.date(2030, 1, 2)

    def note(job: JobContext) -> contextlib.AbstractContextManager[None]:
        seen.append(job.args)
        return contextlib.nullcontext()

    @app.on("exhausted")
    def exhausted(event: JobEvent) -> None:
        seen.append(event.job.args)

    @app.task(name="t", middleware=[note], version=2)
    async def task(day: dt.date, pages: int = 1) -> None:
        seen.append(current_job().args)
        raise ValueError("no")

    task.upgrade(lambda args, version: args)
    task.defer(day)
    await app.run_worker_async(drain=True)
    assert seen == [{"day": day}] * 3
    await app.close_async()


async def test_schedules_outside_of_the_code(app: App) -> None:
    @app.task(name="t")
    def task(customer: int, scheduled_for: str = "") -> None: ...

    next_run = app.schedule("customer 5", "0 9 * * *", task, {"customer": 5}, timezone="UTC")
    assert next_run is not None
    for wrong in ({"nope": True}, {}, {"customer": 5, "scheduled_for": "now"}):
        with pytest.raises(TypeError, match="the schedule 'other'"):
            app.schedule("other", "0 9 * * *", task, wrong)
    (found,) = await app.list_schedules_async()
    assert (found.name, found.task, found.args, found.next_run_at) == (
        "customer 5",
        "t",
        {"customer": 5},
        next_run,
    )
    assert (found.overlap, found.source, found.options) == ("allow", None, {})
    assert found.created_at <= found.changed_at
    job = await app.run_now_async("customer 5")
    assert job.state() == "ready"
    assert await app.unschedule_async("customer 5")
    assert not app.unschedule("customer 5")
    with pytest.raises(ValueError, match="the schedule 'x': 61 in '61 "):
        app.schedule("x", "61 * * * *", task)
    await app.close_async()

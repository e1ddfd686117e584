"""An App's lists and statistics, and the schedules that it makes outside of the code."""

from __future__ import annotations

import datetime as dt
from typing import Any

import psycopg
import pytest

from pgdefer import App, Retry

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
    queues = {queue.name: queue for queue in app.list_queues()}
    assert queues["mail"].ready == 2
    app.pause(task="t", queue="slow")
    known = {known.name: known.paused_in for known in app.list_tasks()}
    assert known == {"t": ["slow"], "bad": []}
    app.resume(task="t", queue="slow")
    assert [(lock.lock, lock.waiting) for lock in app.list_locks()] == [
        ("customer:1", 2),
        ("customer:2", 1),
    ]
    assert [(slot.key, slot.limit, slot.used) for slot in app.list_slots()] in ([("k", 2, 0)], [])
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


async def test_schedules_outside_of_the_code(app: App) -> None:
    @app.task(name="t")
    def task(customer: int, scheduled_for: str = "") -> None: ...

    next_run = app.schedule("customer 5", "0 9 * * *", task, {"customer": 5}, timezone="UTC")
    assert next_run is not None
    (found,) = await app.list_schedules_async()
    assert (found.name, found.task, found.args, found.next_run_at) == (
        "customer 5",
        "t",
        {"customer": 5},
        next_run,
    )
    job = await app.run_now_async("customer 5")
    assert job.state() == "ready"
    assert await app.unschedule_async("customer 5")
    assert not app.unschedule("customer 5")
    with pytest.raises(ValueError, match="the schedule 'x': 61 in '61 "):
        app.schedule("x", "61 * * * *", task)
    await app.close_async()

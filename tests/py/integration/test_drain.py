"""Draining ends when no job is left that would start by itself, and not before."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from pgdefer import App, Worker
from pgdefer.worker.fetcher import Fetcher

from .conftest import Jobs, until

pytestmark = pytest.mark.client

FETCH_WAITS = """
    select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like '%queue.fetch%'
"""


def some(conn: Connection[Any], count: int, **keys: str) -> None:
    """Defer that many identical jobs."""
    job = json.dumps({"task": "t", **keys})
    conn.execute(
        "select queue.defer_many((select jsonb_agg(%s::jsonb) from generate_series(1, %s)))",
        (job, count),
    )


def drain(app: App, how: str, queues: list[str] | None) -> None:
    """Drain the queues, with a worker or a stream."""

    @app.task(name="t")
    def task() -> None: ...

    if how == "worker":
        app.run_worker(queues, drain=True)
        return
    with app.stream_jobs(queues, drain=True) as stream:
        for job in stream:
            job.succeed()


@pytest.mark.parametrize("how", ["worker", pytest.param("stream", marks=pytest.mark.long)])
def test_behind_many_in_the_future(app: App, jobs: Jobs, conn: Connection[Any], how: str) -> None:
    some(conn, 30_000, scheduled_at="2999-01-01Z")
    job = app.defer("t")
    drain(app, how, None)
    assert jobs.states()[job.id] == "succeeded"


def test_behind_many_of_another_queue(app: App, jobs: Jobs, conn: Connection[Any]) -> None:
    """Those are admitted first, in slices, for as long as that takes."""
    some(conn, 5_000, queue="other", scheduled_at="2999-01-01Z")
    conn.execute("select queue.pause('other')")
    job = app.defer("t", queue="mine")
    drain(app, "worker", ["mine"])
    assert jobs.states()[job.id] == "succeeded"


async def test_where_a_fetch_has_no_time_to_look(
    app: App,
    jobs: Jobs,
    connect: Callable[..., psycopg.Connection[Any]],
    conn: Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine a fetch may give up before it has admitted anything."""

    @app.task
    async def task() -> None: ...

    some(conn, 200, task=task.name)
    busy = connect(autocommit=False)
    real = Fetcher.run_connected

    async def run_connected(self: Fetcher) -> None:
        busy.execute("lock table queue.lane in access exclusive mode")
        await real(self)

    monkeypatch.setattr(Fetcher, "run_connected", run_connected)
    ended = asyncio.create_task(Worker(app, drain=True).run_async())
    await until(lambda: conn.execute(FETCH_WAITS).fetchone())
    await asyncio.sleep(0.2)  # longer than a fetch continues: the test is about slowness
    busy.rollback()
    await ended
    await app.close_async()
    assert set(jobs.states().values()) == {"succeeded"}


async def test_while_another_admits(
    app: App, jobs: Jobs, connect: Callable[..., psycopg.Connection[Any]], conn: Connection[Any]
) -> None:
    @app.task
    async def task() -> None: ...

    some(conn, 200, task=task.name)
    busy = connect()
    with busy.transaction():
        busy.execute("select queue._lock_admission(true)")
        ended = asyncio.create_task(Worker(app, drain=True).run_async())
        await until(lambda: conn.execute(FETCH_WAITS).fetchone())
    await ended
    await app.close_async()
    assert set(jobs.states().values()) == {"succeeded"}


def test_without_the_listening_connection(dsn: str, jobs: Jobs) -> None:
    """Draining needs no notifications."""
    app = App(dsn, listen_dsn="host=/nowhere")
    job = app.defer("t")
    drain(app, "worker", None)
    app.close()
    assert jobs.states()[job.id] == "succeeded"


def test_what_a_limit_holds_back(app: App, jobs: Jobs, conn: Connection[Any]) -> None:
    """It starts without help, so the worker waits for it."""
    conn.execute(
        """select queue.configure_queue('slow', '{"rate": {"limit": 1, "per": "300 ms"}}')"""
    )
    some(conn, 3, queue="slow")
    drain(app, "worker", None)
    assert set(jobs.states().values()) == {"succeeded"}


def test_what_a_dead_worker_has_left(app: App, jobs: Jobs, conn: Connection[Any]) -> None:
    """Its claims are reaped, and crashed jobs run alone, before the end."""
    some(conn, 3)
    conn.execute("select queue.register_worker('dead')")
    conn.execute("select queue.fetch((select max(id) from queue.workers), null, 3)")
    conn.execute(
        "update queue.worker set last_seen_at = last_seen_at - interval '1 h', dead_after = '0'"
    )
    drain(app, "worker", None)
    assert set(jobs.states().values()) == {"succeeded"}


def test_what_needs_help_is_left(app: App, jobs: Jobs, conn: Connection[Any]) -> None:
    held = app.defer("t", held=True)
    app.defer("t", needs=[held])
    app.defer("t", delay=dt.timedelta(hours=1), lock="l")
    app.defer("t", lock="l")
    app.defer("t", queue="paused")
    conn.execute("select queue.pause('paused')")
    drain(app, "worker", None)
    assert sorted(jobs.states().values()) == [
        "blocked",
        "held",
        "ready",
        "scheduled",
        "upstream_failed",
    ]


def test_jobs_that_no_slot_takes(app: App, jobs: Jobs, conn: Connection[Any]) -> None:
    """Slots for urgent jobs only: the worker does not wait for the others."""

    @app.task(name="t")
    def task() -> None: ...

    soon = dt.datetime.now(dt.UTC) + dt.timedelta(minutes=30)
    app.defer("t")
    app.defer("t", deadline=soon)
    app.run_worker(drain=True, slots=["1:1h", "1:2h"])
    assert list(jobs.states().values()) == ["ready", "succeeded"]


async def test_while_others_defer_all_the_time(
    app: App, jobs: Jobs, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    """Jobs of other queues do not keep the worker."""
    is_over = threading.Event()

    def produce() -> None:
        conn = connect()
        while not is_over.is_set():
            conn.execute("select queue.defer('t', queue => 'other')")

    @app.task(name="t")
    async def task() -> None: ...

    app.defer("t", queue="mine")
    producer = asyncio.create_task(asyncio.to_thread(produce))
    try:
        async with asyncio.timeout(300):
            await Worker(app, ["mine"], drain=True).run_async()
    finally:
        is_over.set()
        await producer
        await app.close_async()
    assert jobs.states()[1] == "succeeded"

"""Handlers that outlive their timeouts, and their claims."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from pgdefer import App, Job, JobTimeout, Retry
from pgdefer.worker.claim import Claim
from pgdefer.worker.executor import Executor
from pgdefer.worker.fetcher import Fetcher
from pgdefer.worker.heartbeat import clock

from .conftest import Jobs, running, until, wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Connect = Callable[..., psycopg.Connection[Any]]


class Runs:
    """The runs of a handler, and the greatest number of simultaneous ones."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.most = 0

    def __enter__(self) -> None:
        self.begun += 1
        self.most = max(self.most, self.begun - self.ended)

    def __exit__(self, *_: object) -> None:
        self.ended += 1


def past(conn: psycopg.Connection[Any], job: Job, seconds: float) -> None:
    """Move the beginning of a job's attempt back, in the database."""
    by = f"interval '{seconds} s'"
    with conn.transaction():
        conn.execute(
            f"update queue.active_job set claimed_at = claimed_at - {by} where id = {job.id}"
        )
        conn.execute(f"update queue.lease set expires_at = expires_at - {by} where id = {job.id}")


OVERDUE = "select queue.why(%s) like '%%its timeout passed at %%still runs%%'"


@pytest.mark.parametrize("how", ["thread", "coroutine", "blocked loop"])
async def test_a_handler_that_outlives_its_timeout(
    app: App, jobs: Jobs, conn: Connection, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its claim, lock and slot until it ends: no second run begins beside it."""
    monkeypatch.setattr("pgdefer.worker.heartbeat.LOOK", 0.1)
    monkeypatch.setattr("pgdefer.worker.executor.LATE", 0.1)
    runs = Runs()
    release = threading.Event()
    aborted = threading.Event()
    abort = Executor.abort

    def abort_and_tell(self: Executor, claim: Claim, reason: str) -> None:
        abort(self, claim, reason)
        aborted.set()

    monkeypatch.setattr(Executor, "abort", abort_and_tell)
    options: Any = {
        "timeout": dt.timedelta(seconds=0.5),
        "retry": Retry(2),
        "lock": "l",
        "concurrency_key": "k",
        "concurrency_limit": 1,
    }

    @app.task(**options, name="thread")
    def thread() -> None:
        with runs:
            release.wait(300)  # runs no Python code meanwhile

    @app.task(**options, name="coroutine")
    async def coroutine() -> None:
        with runs:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)

    @app.task(**options, name="blocked loop")
    async def blocks() -> None:
        with runs:
            release.wait(300)

    def watch() -> None:
        try:
            wait_for(lambda: conn.execute(OVERDUE, (job.id,)).fetchone() == (True,))
            past(conn, job, 20)
            wait_for(lambda: conn.execute(OVERDUE, (job.id,)).fetchone() == (True,))
            assert conn.execute("select reaped from queue.reap()").fetchone() == (0,)
            health = "select status from queue.health() where name = 'timeouts'"
            assert conn.execute(health).fetchone() == ("warn",)
            assert list(jobs.states().values()) == ["running", "blocked"]
            if how != "blocked loop":
                wait_for(aborted.is_set)
        finally:
            release.set()

    app.client.register(conn)
    job = app.defer(how)
    app.defer(how)
    async with running(app):
        watching = asyncio.create_task(asyncio.to_thread(watch))
        await jobs.end()
        await watching
    first, second = jobs()
    assert (first["state"], first["failures"]) == ("succeeded", 1)
    assert second["state"] == "succeeded"
    assert (runs.begun, runs.most) == (3, 1)
    assert [a["outcome"] for a in jobs.attempts()] == ["timed_out"]


async def test_claims_that_can_not_be_kept_keep_no_others_waiting(
    app: App, jobs: Jobs, conn: Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another transaction holds their rows: heartbeats go on, and other claims are kept."""
    monkeypatch.setattr("pgdefer.worker.heartbeat.LOOK", 0.1)
    monkeypatch.setattr("pgdefer.worker.executor.LATE", 0.1)
    release = threading.Event()

    @app.task(name="deaf", timeout=dt.timedelta(seconds=0.5))
    def deaf() -> None:
        release.wait(300)

    first, second, third = app.defer_many([deaf.prepare() for _ in range(3)])
    async with running(app, heartbeat_every=1.0, dead_after=60) as worker:
        await until(lambda: len(worker.executor.running) == 3)
        with connect(autocommit=False) as busy:
            held = [first.id, third.id]
            busy.execute("select from queue.active_job where id = any(%s) for update", (held,))
            await until(lambda: conn.execute(OVERDUE, (second.id,)).fetchone() == (True,))
            for _ in range(3):
                beat = worker.heartbeat.beat_at
                await until(lambda beat=beat: worker.heartbeat.beat_at > beat)
            assert conn.execute(OVERDUE, (first.id,)).fetchone() == (False,)
        for job in (first, third):
            await until(lambda job=job: conn.execute(OVERDUE, (job.id,)).fetchone() == (True,))
        release.set()
        await jobs.end()


async def test_a_timeout_is_raised_in_a_thread(app: App, jobs: Jobs) -> None:
    ends = []

    @app.task(timeout=dt.timedelta(seconds=0.1))
    def endless() -> None:
        try:
            while True:
                with contextlib.suppress(Exception):
                    time.sleep(0.001)
        except JobTimeout:
            ends.append("timeout")
            raise
        finally:
            ends.append("finally")

    @app.task(timeout=dt.timedelta(seconds=0.1), name="stubborn")
    def stubborn() -> str:
        with contextlib.suppress(JobTimeout):
            while True:
                time.sleep(0.001)
        return "late"

    async with running(app):
        await endless.defer_async()
        await stubborn.defer_async()
        rows = await jobs.end()
    assert ends == ["timeout", "finally"]
    assert [row["error"] for row in rows] == ["TimeoutError: not done within 0:00:00.100000"] * 2
    assert [a["outcome"] for a in jobs.attempts()] == ["timed_out", "timed_out"]


@pytest.mark.long
async def test_a_timeout_is_raised_in_no_other_job(app: App, jobs: Jobs) -> None:
    """Jobs that end as their timeout passes, one after another in one thread."""

    @app.task(timeout=dt.timedelta(seconds=0.02), name="brief")
    def brief(n: int) -> None:
        time.sleep(0.018 + n % 5 * 0.001)

    @app.task(name="innocent")
    def innocent() -> None:
        end = time.monotonic() + 0.004
        while time.monotonic() < end:
            pass

    for n in range(150):
        app.defer("brief", {"n": n})
        app.defer("innocent")
    async with running(app, concurrency=1):
        rows = await jobs.end()
    assert {row["state"] for row in rows if row["task"] == "innocent"} == {"succeeded"}
    assert {row["outcome"] for row in jobs.attempts()} <= {"timed_out"}
    assert len(rows) == 300


async def test_what_waited_past_its_timeout_does_not_start(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a worker that was frozen after its fetch: others may have ended the claim by now."""
    delays = [7.0]
    late = 0.0
    real = Fetcher._take

    def take(self: Fetcher, rows: Any, *arguments: Any) -> int:
        nonlocal late
        if rows and delays:
            late += delays.pop()
        return real(self, rows, *arguments)

    @app.task(name="t", timeout=dt.timedelta(seconds=1))
    async def task() -> None: ...

    monkeypatch.setattr(Fetcher, "_take", take)
    for module in ("executor", "fetcher", "registration"):
        monkeypatch.setattr(f"pgdefer.worker.{module}.clock", lambda: clock() + late)
    await app.defer_async("t")
    async with running(app):
        (row,) = await jobs.end()
    assert "was claimed too long ago" in caplog.text
    assert (row["state"], row["attempts"], row["claims"]) == ("succeeded", 1, 2)


@pytest.mark.parametrize("how", ["thread", "coroutine"])
async def test_a_claim_that_was_ended_before_it_could_be_kept(
    dsn: str, jobs: Jobs, conn: Connection, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler is told to end, although no heartbeat arrives."""
    monkeypatch.setattr("pgdefer.worker.heartbeat.LOOK", 0.1)
    ended = []
    app = App(dsn, pgbouncer=True)

    @app.task(name="thread", timeout=dt.timedelta(hours=1))
    def thread() -> None:
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.append("thread")

    @app.task(name="coroutine", timeout=dt.timedelta(hours=1))
    async def coroutine() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("coroutine")

    job = await app.defer_async(how)
    async with running(app, heartbeat_every=60.0, dead_after=300.0) as worker:
        await until(lambda: worker.executor.running)
        past(conn, job, 3700)
        # its own first tick may be the one that ends it
        await until(
            lambda: conn.execute("select queue.reap()") and jobs.states()[job.id] == "failed"
        )
        (running_job,) = worker.executor.running
        worker.heartbeat.extend_after[running_job] = clock()
        await until(lambda: ended == [how])
        await until(lambda: not worker.executor.running)
    app.close()

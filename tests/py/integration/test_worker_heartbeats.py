"""Workers that say that they live, those that are given up for dead, and those that wake late."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from pgdefer import App, Retry, Worker, WorkerOptions, current_job
from pgdefer.worker.fetcher import Fetcher
from pgdefer.worker.heartbeat import Heartbeat

from .conftest import Jobs, give_up, running, until, wait_for
from .worker_program import Program

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Connect = Callable[..., psycopg.Connection[Any]]


async def test_a_graceful_stop_goes_on_to_say_that_it_lives(app: App, jobs: Jobs) -> None:
    begun = asyncio.Event()

    @app.task
    async def slow() -> str:
        begun.set()
        await asyncio.sleep(3.5)
        return "ended"

    worker = Worker(app, heartbeat_every=0.3, dead_after=1.5)
    task = asyncio.create_task(worker.run_async())
    job = await slow.defer_async()
    await begun.wait()
    worker.stop()
    async with running(app, ["other"], heartbeat_every=0.3):  # reaps dead workers
        await task
    (row,) = jobs()
    assert (row["id"], row["state"], row["attempts"]) == (job.id, "succeeded", 1)
    assert jobs.attempts() == []


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        pytest.param(3.5, {"heartbeat_every": 0.3, "dead_after": 1.5}, id="short"),
        pytest.param(60.0, {}, id="as by default", marks=pytest.mark.soak),
    ],
)
async def test_an_event_loop_that_is_blocked(
    app: App, jobs: Jobs, conn: Connection, seconds: float, options: WorkerOptions
) -> None:
    """It is not declared dead: heartbeats have a thread of their own."""
    is_over = False

    @app.task
    async def blocks() -> None:
        time.sleep(seconds)  # noqa: ASYNC251

    @app.task
    async def beside() -> None:
        await asyncio.sleep(0.1)

    def reap() -> None:
        while not is_over:
            conn.execute("select queue.reap()")
            time.sleep(0.1)

    reaper = asyncio.create_task(asyncio.to_thread(reap))
    async with running(app, **options) as worker:
        first = await beside.defer_async()
        second = await blocks.defer_async()
        await until(lambda: worker.finished == 2)
        number = worker.id
        is_over = True
        await reaper
        rows = await jobs.end()
        assert worker.id == number
    assert [(row["id"], row["state"], row["attempts"], row["crashes"]) for row in rows] == [
        (first.id, "succeeded", 1, 0),
        (second.id, "succeeded", 1, 0),
    ]


@pytest.mark.long
def test_a_zombie_that_wakes_late(app: App, jobs: Jobs, program: Program) -> None:
    options = {"heartbeat_every": 0.3, "dead_after": 1.5, "concurrency": 2}
    zombie = program(**options)
    assert zombie.stdout is not None
    slow = app.defer("slow", {"seconds": 1.0})
    quick = app.defer("slow", {"seconds": 0.0})
    for _ in range(2):
        assert zombie.stdout.readline() == "started\n"
    wait_for(lambda: jobs.states()[quick.id] == "succeeded")
    zombie.send_signal(signal.SIGSTOP)
    successor = program(**options)
    assert successor.stdout is not None
    assert successor.stdout.readline() == "started\n"  # slow, again
    zombie.send_signal(signal.SIGCONT)
    wait_for(lambda: jobs.states()[slow.id] == "succeeded")
    successor.send_signal(signal.SIGTERM)
    assert successor.wait(300) == 0
    # The zombie has registered again.
    after = app.defer("slow", {"seconds": 0.0})
    wait_for(lambda: jobs.states()[after.id] == "succeeded")
    zombie.send_signal(signal.SIGTERM)
    assert zombie.wait(300) == 0
    shown = {row["id"]: row for row in jobs()}
    ends = {id: (row["state"], row["attempts"], row["crashes"]) for id, row in shown.items()}
    assert ends == {
        slow.id: ("succeeded", 2, 1),
        quick.id: ("succeeded", 1, 0),
        after.id: ("succeeded", 1, 0),
    }
    assert [(a["job_id"], a["outcome"]) for a in jobs.attempts()] == [(slow.id, "crashed")]
    assert len({shown[id]["worker_id"] for id in (slow.id, quick.id, after.id)}) == 3


async def test_a_worker_given_up_for_dead_registers_again(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    cancelled = []
    started = asyncio.Event()

    @app.task(retry=Retry(1))
    async def slow(seconds: float) -> None:
        started.set()
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(current_job().claim)
            raise

    async with running(app, heartbeat_every=0.1) as worker:
        await slow.defer_async(30)
        await started.wait()
        first = worker.id
        give_up(conn)
        await until(lambda: worker.id not in (None, first))
        await until(lambda: cancelled)
        (job,) = jobs()
        conn.execute("select queue.cancel(%s, true)", (job["id"],))
        again = await slow.defer_async(0)
        await jobs.end(again.id)
    # The late outcome of the first claim was refused: it did not end the job.
    assert next(a["outcome"] for a in jobs.attempts() if a["job_id"] == job["id"]) == "crashed"


def test_a_worker_that_wakes_starts_nothing_that_others_have_done(
    app: App, jobs: Jobs, conn: Connection, connect: Connect, program: Program
) -> None:
    """It was frozen while the answer to a fetch was on its way."""
    process = program(heartbeat_every=0.3, dead_after=6)
    registered = "select max(id) from queue.workers where is_alive"
    wait_for(lambda: conn.execute(registered).fetchone() != (None,))
    with connect(autocommit=False) as busy:
        busy.execute("select queue._lock_admission(true)")
        ids = [app.defer("slow", {"seconds": 0}).id for _ in range(5)]
        waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query ~ 'fetch'"
        wait_for(lambda: conn.execute(waits).fetchone())
        process.send_signal(signal.SIGSTOP)
    wait_for(lambda: set(jobs.states().values()) == {"running"})
    dead = "select reaped from queue.reap() where reaped > 0"
    wait_for(lambda: conn.execute(dead).fetchone() == (5,))
    conn.execute("select queue.register_worker('other')")
    other = "(select max(id) from queue.workers where name = 'other')"
    done = f"""
        select queue.finish_many(jsonb_build_array(
            jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')))
        from queue.fetch({other}) f
    """
    for _ in ids:
        conn.execute(done)
    assert set(jobs.states().values()) == {"succeeded"}
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: conn.execute(f"{registered} and name <> 'other'").fetchone() != (None,))
    app.defer("slow", {"seconds": 0})
    wait_for(lambda: set(jobs.states().values()) == {"succeeded"})
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert said.split() == ["started", "stopping", "ended"]


async def test_heartbeats_that_fail_go_on(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the worker is to blame, as where its process has no memory left for a moment."""
    failures: list[object] = [None] * 3

    def memory() -> None:
        if failures:
            failures.pop()
            raise MemoryError

    async with running(app, heartbeat_every=0.1, dead_after=60) as worker:
        await until(lambda: worker.id)
        monkeypatch.setattr(worker.heartbeat, "_memory", memory)
        await until(lambda: not failures)
        beat = worker.heartbeat.beat_at
        await until(lambda: worker.heartbeat.beat_at > beat)
    assert caplog.text.count("heartbeats were interrupted") == 3


async def test_nothing_is_claimed_while_no_heartbeat_is_answered(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have to go back. What has ended is reported all the same."""
    begun, release = asyncio.Event(), asyncio.Event()
    pokes: list[object] = []

    @app.task(name="t")
    async def task() -> None:
        begun.set()
        await release.wait()

    first = app.defer("t")
    async with running(app, concurrency=2) as worker:
        await until(lambda: begun.is_set() and worker.state.is_waiting)
        monkeypatch.setattr(Heartbeat, "is_overdue", True)
        monkeypatch.setattr(worker.heartbeat, "poke", lambda: pokes.append(None))
        second = app.defer("t")
        release.set()
        await until(lambda: pokes and jobs.states()[first.id] == "succeeded")
        del pokes[:]
        await until(lambda: pokes)  # it has looked again
        assert [(row["id"], row["state"], row["claims"]) for row in jobs()][1:] == [
            (second.id, "ready", 0)
        ]
        monkeypatch.undo()
        rows = await jobs.end()
    assert [row["claims"] for row in rows] == [1, 1]


def overdue_after_a_fetch(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have heartbeats be overdue once something was fetched; without, nothing is."""
    real = Fetcher._take

    def take(self: Fetcher, rows: Any, *arguments: Any) -> int:
        if rows:
            monkeypatch.setattr(Heartbeat, "is_overdue", True)
        return real(self, rows, *arguments)

    monkeypatch.setattr(Fetcher, "_take", take)
    monkeypatch.setattr(worker.heartbeat, "poke", lambda: None)


async def test_what_was_claimed_waits_for_a_heartbeat(
    app: App, jobs: Jobs, connect: Connect, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the last one is long ago; once it is answered the jobs start after all."""

    @app.task(name="t")
    async def task() -> None: ...

    app.defer("t")
    async with running(app) as worker:
        await jobs.end()
        overdue_after_a_fetch(worker, monkeypatch)
        app.defer("t")
        await until(lambda: worker.executor.claimed)
        assert not worker.executor.running
        monkeypatch.undo()
        worker.heartbeat.poke()
        await jobs.end()


async def test_what_was_told_to_abort_before_it_starts(
    app: App, jobs: Jobs, connect: Connect, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler is not called."""
    runs = []

    @app.task(name="t")
    def task() -> None:
        runs.append(1)

    async with running(app) as worker:
        await until(lambda: worker.id)
        overdue_after_a_fetch(worker, monkeypatch)
        job = await app.defer_async("t")
        await until(lambda: worker.executor._is_held)
        conn.execute("select queue.cancel(%s, abort => true)", (job.id,))
        monkeypatch.undo()
        worker.heartbeat.poke()
        await jobs.end()
    assert (jobs.states(), runs) == ({job.id: "cancelled"}, [])

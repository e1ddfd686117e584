"""Claims ahead of need: what becomes of those that a worker holds and has not started."""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
import pytest

from pgdefer import App, current_job
from pgdefer.worker import executor, prefetch
from pgdefer.worker.heartbeat import clock
from workers import slowness

from .conftest import Jobs, Program, give_up, running, until, wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


class Blocked:
    """Quick jobs, then two that take both slots of a worker, then quick ones that have to wait."""

    def __init__(self, app: App, *, is_async: bool = True) -> None:
        self.ran: list[int] = []
        self.release = asyncio.Event()

        async def quick(n: int) -> None:
            self.ran.append(n)
            await asyncio.sleep(0)

        def quick_in_thread(n: int) -> None:
            self.ran.append(n)

        async def block() -> None:
            await self.release.wait()

        task: Any = app.task(name="quick")
        self.quick = task(quick if is_async else quick_in_thread)
        self.block = app.task(name="block")(block)

    def defer(self) -> None:
        self.quick.defer_many([{"n": n} for n in range(300)])
        self.block.defer_many([{}, {}])
        self.quick.defer_many([{"n": n} for n in range(300, 320)])


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a worker claim ahead however long jobs run, and keep these claims for long."""
    monkeypatch.setattr(executor, "WAIT", 3600.0)
    monkeypatch.setattr(prefetch, "AHEAD", 3600.0)


def shown(jobs: Jobs) -> dict[tuple[str, int], int]:
    """Return how many of the last 20 jobs have which state and number of attempts."""
    found: dict[tuple[str, int], int] = {}
    for row in jobs()[-20:]:
        key = row["state"], row["attempts"]
        found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.usefixtures("patience")
async def test_a_stop_gives_them_back(app: App, jobs: Jobs, is_async: bool) -> None:
    blocked = Blocked(app, is_async=is_async)
    blocked.defer()
    async with running(app, concurrency=2) as worker:
        await until(lambda: len(blocked.ran) == 300 and len(worker.executor.waiting) == 20)
        assert shown(jobs) == {("running", 1): 20}
        worker.stop()
        await until(lambda: shown(jobs) == {("ready", 0): 20})
        blocked.release.set()
    assert (len(blocked.ran), worker.given_back) == (300, 0)
    assert {row["error"] for row in jobs()} == {None}


@pytest.mark.usefixtures("patience")
async def test_a_pause_gives_them_back(app: App, jobs: Jobs, conn: Connection) -> None:
    blocked = Blocked(app)
    blocked.defer()
    async with running(app, concurrency=2) as worker:
        await until(lambda: len(blocked.ran) == 300 and len(worker.executor.waiting) == 20)
        conn.execute("select queue.pause('default')")
        await until(lambda: shown(jobs) == {("ready", 0): 20})
        blocked.release.set()
        await until(lambda: "running" not in jobs.states().values())
        assert len(blocked.ran) == 300
        conn.execute("select queue.resume('default')")
        await jobs.end()
    assert sorted(blocked.ran) == list(range(320))


@pytest.mark.parametrize("how", [(True, 2), (True, 80), (False, 2)])
async def test_a_pause_is_heard_before_more_begin(
    app: App, jobs: Jobs, conn: Connection, monkeypatch: pytest.MonkeyPatch, how: tuple[bool, int]
) -> None:
    """A handler blocks the loop meanwhile: others are started behind it, or claimed ahead."""
    is_async, concurrency = how
    monkeypatch.setattr(executor, "DEAF", 0.0)  # any time counts as long
    began: list[int] = []
    may_begin: set[int] = set()

    async def coroutine() -> None:
        began.append(current_job().id)

    def function() -> None:
        began.append(current_job().id)

    @app.task
    async def pause() -> None:
        conn.execute("select queue.pause('default')")
        select.select([worker.listener._descriptor], [], [])
        may_begin.update(began)
        if not is_async:
            may_begin.update(claim.job.id for claim in worker.executor.running)  # in threads

    quick = app.task(name="quick")(coroutine if is_async else function)
    quick.defer_many([{}] * 300)
    pause.defer()
    quick.defer_many([{}] * 200)
    async with running(app, concurrency=concurrency) as worker:
        await until(lambda: may_begin and "running" not in jobs.states().values())
        assert set(began) <= may_begin
        assert {row["attempts"] for row in jobs() if row["state"] == "ready"} == {0}
        conn.execute("select queue.resume('default')")
        await jobs.end()
    assert len(set(began)) == len(began) == 500


async def test_none_waits_for_long_while_another_worker_is_idle(
    app: App, jobs: Jobs, dsn: str
) -> None:
    blocked = Blocked(app)
    blocked.defer()
    async with running(app, concurrency=2) as worker:
        # On a busy machine it gives some quick ones back before it starts the two.
        await until(lambda: [r["task"] for r in jobs() if r["state"] == "running"] == ["block"] * 2)
        assert shown(jobs) == {("ready", 0): 20}
        assert worker.executor.waiting == []
        other = App(dsn)
        helper = Blocked(other)
        async with running(other, concurrency=2):
            await until(lambda: len(blocked.ran + helper.ran) == 320)
        blocked.release.set()
        await jobs.end()
    assert sorted(blocked.ran + helper.ran) == list(range(320))


async def test_those_are_kept_that_start_soon(
    app: App, jobs: Jobs, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "WAIT", 1.0)
    monkeypatch.setattr(prefetch, "AHEAD", 3600.0)
    monkeypatch.setattr(prefetch, "WAIT", 3600.0)  # at any pace all start within this
    longest = 0.0
    starts: list[float] = []

    @app.task
    async def quick() -> None:
        nonlocal longest
        now = clock()
        starts.append(now)
        longest = max([longest, *(now - claim.came_at for claim in worker.executor.waiting)])
        await asyncio.sleep(0.02)

    quick.defer_many([{}] * 150)
    async with running(app, concurrency=1) as worker:
        await jobs.end()
    assert longest > 1
    released = conn.execute("select from queue.attempts where outcome = 'released'").fetchall()
    # Some are given back where none has started since the last look, half of WAIT before.
    assert not released or max(b - a for a, b in pairwise(starts)) > executor.WAIT / 2
    assert len(starts) == 150


async def test_none_where_jobs_are_slow(app: App, jobs: Jobs) -> None:
    most = 0

    @app.task
    async def slow() -> None:
        nonlocal most
        most = max(most, len(worker.executor.waiting))
        await asyncio.sleep(0.06)

    slow.defer_many([{}] * 20)
    async with running(app, concurrency=2) as worker:
        await jobs.end()
    assert most == 0


async def test_few_where_long_jobs_use_most_slots(app: App, jobs: Jobs) -> None:
    most = 0
    took: list[float] = []
    release = asyncio.Event()

    @app.task
    async def quick() -> None:
        nonlocal most
        begun = clock()
        await asyncio.sleep(0.005)
        took.append(clock() - begun)
        most = max(most, len(worker.executor.waiting))

    @app.task
    async def block() -> None:
        await release.wait()

    block.defer_many([{}] * 19)
    async with running(app, concurrency=20) as worker:
        running_jobs = worker.executor.running
        await until(lambda: len(running_jobs) == 19)
        await until(lambda: all(clock() - it.started_at > prefetch.AHEAD for it in running_jobs))
        quick.defer_many([{}] * 400)
        await until(lambda: worker.finished == 400)
        release.set()
        await jobs.end()
    assert most <= prefetch.AHEAD / 0.005  # in the slot that is left
    assert most > 0 or median(took) > prefetch.AHEAD / 2  # on a busy machine


async def test_none_without_prefetch(app: App, jobs: Jobs) -> None:
    blocked = Blocked(app)
    blocked.defer()
    async with running(app, concurrency=2, prefetch=0) as worker:
        await until(lambda: len(blocked.ran) == 300)
        await until(lambda: len(worker.executor.running) == 2)
        assert shown(jobs) == {("ready", 0): 20}
        blocked.release.set()
        await jobs.end()


@pytest.mark.long
async def test_no_job_with_a_limit_is_among_them(app: App, jobs: Jobs, dsn: str) -> None:
    waited: set[str] = set()
    most = now = 0

    @app.task(concurrency_key="k", concurrency_limit=1)
    async def limited() -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.002)
        now -= 1

    @app.task
    async def plain() -> None:
        waited.update(claim.job.task for claim in worker.executor.waiting)
        await asyncio.sleep(0)

    for _ in range(20):
        plain.defer_many([{}] * 30)
        limited.defer_many([{}] * 2)
    async with running(app, concurrency=2) as worker:
        await jobs.end()
    assert (most, waited - {plain.name}) == (1, set())
    assert set(jobs.states().values()) == {"succeeded"}


async def test_no_more_than_max_jobs(app: App, jobs: Jobs) -> None:
    blocked = Blocked(app)
    blocked.quick.defer_many([{"n": n} for n in range(320)])
    async with running(app, concurrency=2, max_jobs=250) as worker:
        await until(lambda: worker.id is None and len(blocked.ran) >= 250)
    assert sorted(blocked.ran) == list(range(250))
    assert list(jobs.states().values()).count("ready") == 70


# Sudden ends

PROGRAM = """
import json, os, sys, time
from pgdefer import App, current_job
from pgdefer.worker import executor, fetcher, prefetch
from pgdefer.worker import worker as worker_module
from pgdefer.worker.heartbeat import clock
from pgdefer.worker.listener import Sleep, SleepListener
executor.WAIT = prefetch.AHEAD = 3600.0
app = App({dsn!r})

@app.task(name="quick")
async def quick() -> None:
    with open({ran!r}, "a") as file:
        file.write(f"{{current_job().id}}\\n")

@app.task(name="block")
def block() -> None:
    os.write(1, b"started\\n")
    while not os.path.exists({release!r}):
        time.sleep(0.005)

if __name__ == "__main__":
    app.run_worker(**json.loads(sys.argv[1]))
"""


@pytest.fixture
def program(app: App, dsn: str, tmp_path: Path) -> Iterator[Program]:
    """Jobs of which workers hold some ahead once both jobs of `block` have started."""
    for task, n in (("quick", 300), ("block", 2), ("quick", 20)):
        for _ in range(n):
            app.defer(task)
    with contextlib.closing(Program(PROGRAM, dsn, tmp_path)) as found:
        yield found


def start_blocked(program: Program, jobs: Jobs, **options: Any) -> subprocess.Popen[str]:
    process = program.start(lines=2, concurrency=2, **options)
    # All that ran before is reported, so that it does not run again.
    wait_for(lambda: Counter(jobs.states().values()) == {"succeeded": 300, "running": 22})
    assert shown(jobs) == {("running", 1): 20}
    return process


def test_a_worker_that_is_killed(program: Program, jobs: Jobs, conn: Connection) -> None:
    start_blocked(program, jobs).kill()
    give_up(conn)
    # Nobody knows which of them it had started: each may have killed it, and runs alone.
    assert shown(jobs) == {("ready", 1): 20}
    program.release.touch()
    assert program.start(drain=True).wait(300) == 0
    assert set(jobs.states().values()) == {"succeeded"}
    assert shown(jobs) == {("succeeded", 2): 20}
    assert {row["crashes"] for row in jobs()[-20:]} == {1}
    assert set(program.ran()) == {row["id"] for row in jobs() if row["task"] == "quick"}


def test_a_worker_that_freezes(program: Program, jobs: Jobs, conn: Connection) -> None:
    every = 0.3 * slowness()
    frozen = start_blocked(program, jobs, heartbeat_every=every, dead_after=5 * every)
    frozen.send_signal(signal.SIGSTOP)
    # Not by force: a worker that was silent for less than `dead_after` need not doubt its claims.
    wait_for(lambda: conn.execute("select from queue.reap() r where r.reaped > 0").fetchall())
    program.release.touch()
    assert program.start(drain=True).wait(300) == 0
    assert set(jobs.states().values()) == {"succeeded"}
    ended = sorted(program.ran())
    frozen.send_signal(signal.SIGCONT)
    wait_for(lambda: conn.execute("select count(*) from queue.workers where is_alive").fetchone())
    frozen.send_signal(signal.SIGTERM)
    assert frozen.wait(300) == 0
    # It has started none of those that it held: others have run them.
    assert sorted(program.ran()) == ended == sorted(set(ended))

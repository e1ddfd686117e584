"""Slots kept for urgent jobs; room for jobs that must run alone."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App, current_job

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


async def test_slots_for_urgent_jobs(app: App, jobs: Jobs) -> None:
    release = asyncio.Event()
    running_now: list[str] = []

    @app.task
    async def task(name: str) -> None:
        running_now.append(name)
        await release.wait()

    urgent = task.configure(deadline=dt.datetime.now(dt.UTC) + dt.timedelta(minutes=10))
    distant = task.configure(deadline=dt.datetime.now(dt.UTC) + dt.timedelta(hours=10))
    async with running(app, slots=["2:30m", 3]) as worker:
        await until(lambda: worker.id)
        for n in range(4):
            await distant.defer_async(f"distant {n}")
            await task.defer_async(f"plain {n}")
        await until(lambda: len(running_now) == 3)
        await asyncio.sleep(0.1)
        assert len(running_now) == 3
        for n in range(3):
            await urgent.defer_async(f"urgent {n}")
        await until(lambda: len(running_now) == 5)
        await asyncio.sleep(0.1)
        assert sorted(running_now[3:]) == ["urgent 0", "urgent 1"]
        release.set()
        rows = await jobs.end()
    assert {row["state"] for row in rows} == {"succeeded"}
    assert worker.finished == 11
    assert [slots.used for slots in worker.slots] == [0, 0]


async def test_urgent_jobs_take_the_other_slots_too(app: App, jobs: Jobs) -> None:
    now = most = 0

    @app.task
    async def task() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1

    deadline = dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)
    task.configure(deadline=deadline).defer_many([{}] * 40)
    async with running(app, slots=["2:30m", "2"]):
        await jobs.end()
    assert most == 4


def crash(conn: Connection, count: int) -> None:
    """Claim jobs for a worker that dies."""
    row = conn.execute("select queue.register_worker('dead')").fetchone()
    found = conn.execute("select * from queue.fetch(%s, null, %s)", (*row, count)).fetchall()  # type: ignore[misc]
    assert len(found) == count
    with conn.transaction():
        conn.execute(
            "update queue.worker set last_seen_at = now() - interval '1 h', dead_after = '0'"
            " where name = 'dead'"
        )
        conn.execute("select queue.reap()")


@pytest.mark.parametrize(("slots", "workers"), [(["3"], 1), (["1:30m", "2"], 1), (["2"], 2)])
async def test_busy_workers_make_room(
    app: App, jobs: Jobs, conn: Connection, slots: list[str], workers: int
) -> None:
    """Workers that are never idle also run crashed jobs, and each of these alone."""
    now: set[tuple[int, int]] = set()
    beside: dict[int, set[int]] = {}
    is_over = False

    @app.task(name="t")
    async def task(n: int) -> None:
        row = jobs._cursor.execute(
            "select worker_id from queue.jobs where id = %s", (current_job().id,)
        ).fetchone()
        assert row is not None
        where = row["worker_id"]
        now.add((where, n))
        here = {other for worker, other in now if worker == where}
        for other in here:
            beside.setdefault(other, set()).update(here - {other})
        await asyncio.sleep(0.03)
        now.discard((where, n))
        if n < 0 and not is_over:  # never idle: each job defers the next
            await task.defer_async(n - 10)

    suspects = [await task.defer_async(n) for n in range(1, 4)]
    crash(conn, 3)
    for n in range(-1, -11, -1):
        await task.defer_async(n)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(running(app, slots=slots, heartbeat_every=0.2))
        await jobs.end(*(job.id for job in suspects))
        is_over = True
        await jobs.end()
    assert {n: beside[n] for n in (1, 2, 3) if n in beside} == {1: set(), 2: set(), 3: set()}
    assert any(beside[n] for n in beside if n < 0)


PROGRAM = """
import os
from pgdefer import App

app = App({dsn!r})

@app.task(name="pid", run_in="process")
def pid() -> int:
    return os.getpid()

@app.task(name="slots")
def slots() -> list[int | str]:
    import gc
    from pgdefer import current_job
    from pgdefer.worker.claim import Claim
    claims = [one for one in gc.get_objects() if isinstance(one, Claim)]
    (claim,) = (one for one in claims if one.job is current_job())
    return [os.getpid(), str(claim.slots)]
"""


@pytest.mark.long
def test_the_command_line(dsn: str, app: App, jobs: Jobs, conn: Connection, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text(PROGRAM.format(dsn=dsn))

    def worker(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pgdefer", "worker", "-A", "mod:app", "--drain", *options],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"COLUMNS": "100"},
            timeout=300,
        )

    soon = dt.datetime.now(dt.UTC) + dt.timedelta(minutes=5)
    for _ in range(3):
        app.defer("pid")
    app.defer("slots", deadline=soon)
    app.defer("slots")
    done = worker("--slots", "1", "--slots", "1:30m", "--jobs-per-process", "2")
    assert done.returncode == 0, done.stderr
    rows = jobs()
    assert {row["state"] for row in rows} == {"succeeded"}
    pids = [row["result"] for row in rows[:3]]
    assert sorted(pids.count(pid) for pid in set(pids)) == [1, 2]
    assert {row["result"][0] for row in rows[3:]}.isdisjoint(pids)
    assert [row["result"][1] for row in rows[3:]] == ["1:0:30:00", "1"]
    info = conn.execute(
        "select info -> 'slots', info -> 'concurrency' from queue.workers"
    ).fetchall()
    assert info == [(["1:0:30:00", "1"], 2)]
    for options, message in [
        (["--slots", "0"], "slots are N or N:HORIZON"),
        (["--slots", "2:soon"], "not '2:soon'"),
        (["--slots", "2", "-c", "3"], "give slots or concurrency, not both"),
        (["--jobs-per-process", "0"], "Invalid value for '--jobs-per-process'"),
    ]:
        done = worker(*options)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr

"""Slots kept for urgent jobs; room for jobs that must run alone."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Any

import psycopg
import pytest

from pgdefer import App

from .conftest import Jobs, running, until

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
        assert not any(name.startswith("urgent") for name in running_now)
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
            "update queue.worker set last_seen_at = now() - interval '1 h' where name = 'dead'"
        )
        conn.execute("select queue.reap()")


@pytest.mark.parametrize("slots", [["3"], ["1:30m", "2"]])
async def test_a_busy_worker_makes_room(
    app: App, jobs: Jobs, conn: Connection, slots: list[str]
) -> None:
    """One that is never idle: jobs that crashed run all the same, and alone."""
    now: set[int] = set()
    beside: dict[int, set[int]] = {}
    is_over = False

    @app.task(name="t")
    async def task(n: int) -> None:
        me = asyncio.current_task()
        now.add(n)
        for other in now:
            beside.setdefault(other, set()).update(now - {other})
        await asyncio.sleep(0.03)
        now.discard(n)
        assert me is not None
        if n < 0 and not is_over:  # never idle: each job makes the next
            await task.defer_async(n - 3)

    suspects = [await task.defer_async(n) for n in range(1, 4)]
    crash(conn, 3)
    for n in (-1, -2, -3):
        await task.defer_async(n)
    async with running(app, slots=slots, heartbeat_every=0.2):
        await jobs.end(*(job.id for job in suspects), seconds=40)
        is_over = True
        await jobs.end(seconds=20)
    assert {n: beside[n] for n in (1, 2, 3) if n in beside} == {1: set(), 2: set(), 3: set()}
    assert any(beside[n] for n in beside if n < 0)

"""Jobs that kill their worker, or find no memory; they run alone when they come back."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App, current_job

from .conftest import Jobs, give_up, running, wait_for
from .worker_program import Program

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


@pytest.mark.long
@pytest.mark.parametrize(
    "death", [("kill -9", -9), ("os._exit", 3), ("segfault", -signal.SIGSEGV)], ids=lambda x: x[0]
)
def test_a_job_that_kills_its_worker(
    jobs: Jobs, conn: Connection, program: Program, tmp_path: Path, death: tuple[str, int]
) -> None:
    how, code = death
    app = App(conn.info.dsn)

    def defer(task: str, **args: object) -> int:
        return app.defer(task, args).id

    def start(**options: Any) -> tuple[subprocess.Popen[str], Callable[[], str]]:
        process = program(**options)
        assert process.stdout is not None
        return process, process.stdout.readline

    def shown() -> dict[int, tuple[Any, ...]]:
        names = ("state", "reason", "attempts", "crashes")
        return {row["id"]: tuple(row[name] for name in names) for row in jobs()}

    now, later = tmp_path / "now", tmp_path / "later"
    process, says = start(concurrency=2)
    before = defer("slow", seconds=0)
    wait_for(lambda: jobs.states()[before] == "succeeded")
    beside = defer("wait", path=str(later), how="")
    culprit = defer("wait", path=str(now), how=how)
    assert [says() for _ in range(3)] == ["started\n"] * 3
    behind = defer("slow", seconds=0)
    now.touch()
    assert process.wait(300) == code
    give_up(conn)
    assert shown() == {
        before: ("succeeded", None, 1, 0),
        beside: ("ready", None, 1, 1),
        culprit: ("ready", None, 1, 1),
        behind: ("ready", None, 0, 0),
    }
    # Jobs that have crashed run alone, so only the culprit does so again.
    later.touch()
    process, says = start(concurrency=2)
    assert process.wait(300) == code
    give_up(conn)
    process, says = start(drain=True)
    assert process.wait(300) == 0
    assert shown() == {
        before: ("succeeded", None, 1, 0),
        beside: ("succeeded", None, 2, 1),
        culprit: ("failed", "crash_loop", 2, 2),
        behind: ("succeeded", None, 1, 0),
    }
    assert [(a["job_id"], a["outcome"]) for a in jobs.attempts()] == [
        (beside, "crashed"),
        (culprit, "crashed"),
        (culprit, "crashed"),
    ]


async def test_out_of_memory(app: App, jobs: Jobs) -> None:
    """The kernel's reaction when memory runs out is "kill -9" above."""
    release = asyncio.Event()

    @app.task
    async def beside() -> None:
        await release.wait()

    @app.task
    async def coroutine() -> None:
        bytearray(1 << 60)

    @app.task
    def function() -> None:
        bytearray(1 << 60)

    async with running(app) as worker:
        first = await beside.defer_async()
        greedy = [await task.defer_async() for task in (coroutine, function)]
        await jobs.end(*(job.id for job in greedy))
        number = worker.id
        release.set()
        await jobs.end()
        assert worker.id == number
    ends = {row["id"]: (row["state"], row["error"], row["crashes"]) for row in jobs()}
    assert ends == {first.id: ("succeeded", None, 0)} | {
        job.id: ("failed", "MemoryError", 0) for job in greedy
    }


async def test_a_job_that_crashed_runs_alone(app: App, jobs: Jobs, conn: Connection) -> None:
    now: set[int] = set()
    beside: dict[int, set[int]] = {}

    @app.task(name="t")
    async def task() -> None:
        me = current_job().id
        now.add(me)
        for other in now:
            beside.setdefault(other, set()).update(now - {other})
        await asyncio.sleep(0.02)
        now.discard(me)

    suspect = await task.defer_async()
    conn.execute("select queue.register_worker('dead')")
    dead = conn.execute("select max(id) from queue.worker").fetchone()
    assert dead is not None
    assert len(conn.execute("select * from queue.fetch(%s)", dead).fetchall()) == 1
    give_up(conn)
    task.defer_many([{}] * 20)
    async with running(app, concurrency=4):
        rows = await jobs.end()
    assert {row["state"] for row in rows} == {"succeeded"}
    assert beside.get(suspect.id, set()) == set()
    assert any(beside.values())

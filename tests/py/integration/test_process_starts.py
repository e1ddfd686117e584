"""The start of a child process, with the import of the application, is not the handler's time."""

from __future__ import annotations

import datetime as dt
import importlib
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

MODULE = """
import datetime as dt, multiprocessing, os, time
from pgdefer import App

app = App({dsn!r})
if multiprocessing.parent_process() is not None:
    open({started!r}, "a").close()
    while not os.path.exists({go!r}):
        time.sleep(0.01)

@app.task(run_in="process", retry=3, timeout=dt.timedelta(seconds=0.5))
def pid() -> int:
    return os.getpid()

@app.task(run_in="process", timeout=dt.timedelta(seconds=0.5))
def endless() -> None:
    while True:
        pass
"""

QUICK = """
import multiprocessing, os
from pgdefer import App

if multiprocessing.parent_process() is None:
    from slow_to_import import app
else:
    app = App()

@app.task(name="quick", run_in="process")
def pid() -> int:
    return os.getpid()
"""


class Slow:
    """An application whose import ends in child processes when `go` exists."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.started, self.go = folder / "started", folder / "go"
        text = MODULE.format(dsn=dsn, started=str(self.started), go=str(self.go))
        (folder / "slow_to_import.py").write_text(text)
        self.tasks: Any = importlib.import_module("slow_to_import")
        self.app: App = self.tasks.app


@pytest.fixture
def slow(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.syspath_prepend(tmp_path)
    slow = Slow(dsn, tmp_path)
    yield slow
    slow.app.close()
    del sys.modules["slow_to_import"]


async def test_an_import_that_takes_longer_than_the_timeout(slow: Slow, jobs: Jobs) -> None:
    async with running(slow.app) as worker:
        job = await slow.tasks.pid.defer_async()
        endless = await slow.tasks.endless.defer_async()
        await until(slow.started.exists)
        begun = time.monotonic()
        await until(lambda: time.monotonic() - begun > 1.5)
        slow.go.touch()
        await job.result_async(300)
        await jobs.end()
        assert worker.finished == 2
    rows = {row["id"]: row for row in jobs()}
    assert (rows[job.id]["attempts"], rows[job.id]["state"]) == (1, "succeeded")
    assert rows[endless.id]["error"].startswith("TimeoutError: not done within 0:00:00.5")
    assert [a["outcome"] for a in jobs.attempts()] == ["timed_out"]


async def test_jobs_that_cannot_wait_for_it_go_back(
    slow: Slow, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgdefer.worker.executor.TOO_LATE", 0.0)
    async with running(slow.app):
        job = await slow.tasks.pid.defer_async()
        await until(lambda: jobs()[0]["claims"] > 2)
        (child,) = multiprocessing.active_children()
        slow.go.touch()
        assert await job.result_async(300) == child.pid
        await jobs.end()
    (row,) = jobs()
    assert (row["attempts"], row["failures"], row["crashes"]) == (1, 0, 0)


async def test_an_abort_leaves_the_process(
    slow: Slow, jobs: Jobs, conn: psycopg.Connection[Any]
) -> None:
    async with running(slow.app):
        first = await slow.tasks.pid.configure(timeout=dt.timedelta(hours=1)).defer_async()
        await until(slow.started.exists)
        (child,) = multiprocessing.active_children()
        conn.execute("select queue.cancel(%s, abort => true)", (first.id,))
        (row,) = await jobs.end()
        assert (row["state"], row["reason"]) == ("cancelled", "aborted")
        second = await slow.tasks.pid.defer_async()
        slow.go.touch()
        assert await second.result_async(300) == child.pid


async def test_an_import_that_never_ends(
    slow: Slow, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgdefer.worker.processes.MAX_PREPARATION", 0.5)
    async with running(slow.app):
        await slow.tasks.pid.configure(retry={"on_crash": "fail"}).defer_async()
        (row,) = await jobs.end()
    assert (row["state"], row["reason"]) == ("failed", "crashed")
    assert row["error"] == ("ProcessDied: its process had not imported slow_to_import after 0.5 s")


async def test_a_process_that_imports_another_module_is_left_alone(
    slow: Slow, jobs: Jobs, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    (tmp_path / "quick_to_import.py").write_text(QUICK)
    quick = importlib.import_module("quick_to_import")
    try:
        async with running(slow.app):
            first = await slow.tasks.pid.configure(timeout=None).defer_async()
            await until(slow.started.exists)
            (child,) = multiprocessing.active_children()
            conn.execute("select queue.cancel(%s, abort => true)", (first.id,))
            await jobs.end()
            second = await quick.pid.defer_async()
            assert await second.result_async(300) != child.pid
            slow.go.touch()
            third = await slow.tasks.pid.defer_async()
            assert await third.result_async(300) == child.pid
    finally:
        del sys.modules["quick_to_import"]
    rows = {row["id"]: row for row in jobs()}
    assert (rows[second.id]["attempts"], rows[second.id]["crashes"]) == (1, 0)

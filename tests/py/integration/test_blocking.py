"""A coroutine that blocks the worker's event loop is named, while it does so."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from pgdefer import App

from .conftest import wait_for

pytestmark = pytest.mark.client


@pytest.fixture
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgdefer.worker.heartbeat.LOOK", 0.2)
    monkeypatch.setattr("pgdefer.worker.heartbeat.SAY_EVERY", 0.1)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if "blocked the event loop" in record.getMessage()
    ]


@pytest.mark.usefixtures("_looks_often")
def test_a_job_that_blocks_the_loop_is_named(
    app: App, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end = tmp_path / "end"

    @app.task(name="blocks")
    async def blocks() -> None:
        wait_for(end.exists)

    @app.task(name="awaits")
    async def awaits() -> None:
        await asyncio.sleep(1)

    @app.task(name="in a thread")
    def in_a_thread() -> None:
        time.sleep(1)

    awaits.defer()
    in_a_thread.defer()
    app.run_worker(drain=True)
    assert warnings(caplog) == []
    job = blocks.defer()
    thread = threading.Thread(target=app.run_worker, kwargs={"drain": True})
    thread.start()
    try:
        wait_for(lambda: len(warnings(caplog)) > 1)  # it is said again
    finally:
        end.touch()
        thread.join()
    said = warnings(caplog)[0]
    assert said.startswith(f"<job {job.id} blocks attempt 1 ")
    line = blocks.function.__code__.co_firstlineno + 2
    assert f", at {__file__}:{line}: the worker's other jobs stand still" in said


@pytest.mark.usefixtures("_looks_often")
def test_a_loop_that_goes_on_is_asked_again(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.task(name="twice")
    async def twice() -> None:
        for _ in range(2):
            before = len(warnings(caplog))
            wait_for(lambda before=before: len(warnings(caplog)) > before)
            await asyncio.sleep(0.5)

    twice.defer()
    app.run_worker(drain=True)
    assert len(warnings(caplog)) >= 2

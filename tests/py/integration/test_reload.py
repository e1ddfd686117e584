"""`pgdefer worker --reload`: a worker that restarts when its code changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App
from pgdefer.cli import Exit

from .conftest import Jobs, wait_for

pytestmark = pytest.mark.client

MODULE = """
from pgdefer import App

app = App({dsn!r})
VERSION = 1

@app.task(name="version")
def version() -> int:
    return VERSION
"""
ALIVE = "select max(id) from queue.workers where is_alive"


@pytest.fixture
def module(tmp_path: Path, dsn: str) -> Path:
    path = tmp_path / "mod.py"
    path.write_text(MODULE.format(dsn=dsn))
    return path


def command(*options: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pgdefer", "worker", "-A", "mod", "--reload", *options]


@pytest.fixture
def reloading(module: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (module.parent / "log").open("wb") as log:
        process = subprocess.Popen(command(), cwd=module.parent, start_new_session=True, stderr=log)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_change_of_the_code_starts_the_worker_anew(
    app: App,
    conn: psycopg.Connection[Any],
    jobs: Jobs,
    module: Path,
    reloading: subprocess.Popen[bytes],
) -> None:
    def alive() -> int:
        row = conn.execute(ALIVE).fetchone()
        return (row and row[0]) or 0

    def change(old: str, new: str) -> None:
        module.write_text(module.read_text().replace(old, new))

    def run() -> Any:
        id = app.defer("version").id
        wait_for(lambda: jobs.states()[id] == "succeeded")
        return next(row["result"] for row in jobs() if row["id"] == id)

    first = wait_for(alive)
    assert run() == 1
    # of another length each: Python finds stale bytecode by the second and the size of the source
    change("VERSION = 1", "VERSION = 20")
    second: int = wait_for(lambda: (found := alive()) > first and found)
    assert run() == 20
    change("VERSION = 20", "VERSION = ")  # its import fails, so the worker ends
    wait_for(lambda: not alive())
    change("VERSION = ", "VERSION = 300")
    wait_for(lambda: alive() > second)
    assert run() == 300
    reloading.send_signal(signal.SIGTERM)
    assert reloading.wait(300) == 0
    wait_for(lambda: not alive())
    said = (module.parent / "log").read_text()
    assert "serves all queues" in said
    assert "raising KeyboardInterrupt" not in said, "watchfiles says so"


@pytest.mark.parametrize(
    "option", [["--processes", "2"], ["--drain"], ["--max-jobs", "3"]], ids=lambda option: option[0]
)
def test_what_it_does_not_go_with(module: Path, option: list[str]) -> None:
    done = subprocess.run(
        command(*option), cwd=module.parent, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == Exit.USAGE
    assert "--reload can't be combined" in done.stderr

"""A program whose worker runs jobs that sleep, block, or kill it: for tests that stop it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import asyncio, ctypes, json, logging, os, sys, time
from pgdefer import App, Retry
app = App({dsn!r})

def say(what: str) -> None:
    os.write(1, what.encode() + b"\\n")  # at once, whatever other threads say

class Stopping(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("stopping"):
            say("stopping")
        if "blocks the event loop" in record.getMessage():
            say("blocked")

logging.getLogger("pgdefer").addHandler(Stopping())
logging.getLogger("pgdefer").setLevel("INFO")

@app.task(name="slow")
async def slow(seconds: float) -> None:
    say("started")
    await asyncio.sleep(seconds)

@app.task(name="deaf")
async def deaf() -> None:
    say("started")
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

@app.task(name="block")
async def block(path: str) -> None:
    say("started")
    while not os.path.exists(path):
        time.sleep(0.005)

@app.task(name="stuck")
def stuck() -> None:
    say("started")
    time.sleep(60)

@app.task(name="wait", retry=Retry(1, max_crashes=2))
def wait(path: str, how: str) -> None:
    say("started")
    while not os.path.exists(path):
        time.sleep(0.005)
    if how == "kill -9":  # by whomever; the kernel does so, too, where it has no memory left
        os.kill(os.getpid(), 9)
    elif how == "os._exit":
        os._exit(3)
    elif how == "segfault":
        ctypes.string_at(0)

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if "handle_signals" in options:
        asyncio.run(app.run_worker_async(**options))
    else:
        app.run_worker(**options)
    say("ended")
"""


Program = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def program(dsn: str, tmp_path: Path) -> Iterator[Program]:
    """Start the program, with options for its worker."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(dsn=dsn))
    started: list[subprocess.Popen[str]] = []

    def start(**options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(path), json.dumps(options)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()

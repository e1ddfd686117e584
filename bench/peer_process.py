"""The processes of bench_peers.py: drivers, whose lines tell what they do (workers/peer.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import Place

# Nothing has happened for so long: a job is lost.
PATIENCE = 120.0


class Process:
    """A driver, whose lines a thread reads."""

    def __init__(self, place: Place, action: str, **options: Any) -> None:
        self.first: float | None = None
        self.answer: dict[str, float] | None = None
        self.waits: list[float] = []
        self._ran: dict[int, int] = {}
        self.ready = threading.Event()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by kill)
        self.process = subprocess.Popen(
            [
                *place.on.client_prefix(),
                *place.system.command(action),
                place.dsn,
                json.dumps(options),
            ],
            cwd=place.system.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            if "ready" in line:
                self.ready.set()
            elif "first" in line:
                self.first = min(line["first"], self.first or line["first"])
            elif "ran" in line:
                self._ran[line["pid"]] = line["ran"]
            elif "waits" in line:
                self.waits += line["waits"]
            else:
                self.answer = line

    @property
    def ran(self) -> int:
        return sum(self._ran.values())

    def go(self) -> None:
        """Let it begin, once it is ready."""
        until(self.ready.is_set, self.check)
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def check(self) -> None:
        """Raise an error if it has ended with one."""
        if self.process.poll() not in {None, 0}:
            self._errors.seek(0)
            msg = f"{self.process.args} failed:\n{self._errors.read()[-3000:]}"
            raise RuntimeError(msg)

    def wait(self) -> dict[str, float]:
        """Return its answer, once it has ended."""
        self.process.wait(timeout=900)
        self._reader.join(10)
        self.check()
        return self.answer or {}

    def pids(self) -> list[int]:
        """Return all processes of its session."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and os.getsid(int(folder.name)) == self.process.pid:
                    found.append(int(folder.name))
        return found

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._errors.close()


def until(condition: Callable[[], object], check: Callable[[], None], every: float = 0.005) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        check()
        if time.monotonic() > end:
            raise TimeoutError("nothing has happened for two minutes: a job has not run")
        time.sleep(every)

"""What runs in a worker's child process: jobs, one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import queue
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

from . import _attempt, _memory
from ._connect import SyncPool
from ._context import JobContext
from ._task import Task, find_task

if TYPE_CHECKING:
    from ._app import App

__all__ = ["Answer", "main"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A job's outcome, and whether the process is fit for another job."""

    outcome: str | None
    may_go_on: bool


class _Line:
    """What the worker sends: jobs, and words to the one that runs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._job: JobContext | None = None
        self._word: str | None = None
        self._is_idle = True

    def read(self) -> None:
        """Read until the worker is gone: without it no job goes on."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                received = self._connection.recv()
                if not isinstance(received, str):
                    self._is_idle = False
                    self._jobs.put(received)
                    continue
                self._word = received
                if self._job is not None:
                    self._job._abort = received
        if not self._is_idle:
            os._exit(1)
        self._jobs.put(None)

    def jobs(self) -> Iterator[Any]:
        return iter(self._jobs.get, None)

    def begin(self, job: JobContext) -> None:
        self._job = job
        job._abort = self._word

    def end(self, answer: Answer) -> None:
        self._job = self._word = None
        self._is_idle = True
        self._connection.send(answer)


def main(connection: Connection, dsn: str) -> None:
    """Run jobs until the worker closes the line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        # They are meant for the worker, which tells when to stop. (To ignore them would be
        # inherited by what a handler starts.)
        signal.signal(number, lambda *_: None)
    line = _Line(connection)
    threading.Thread(target=line.read, name="pgdefer-line", daemon=True).start()
    tasks: dict[tuple[str, str], tuple[Task[..., Any], SyncPool]] = {}
    for module, name, row in line.jobs():
        try:
            if (module, name) not in tasks:
                importlib.import_module(module)
                task = find_task(module, name)
                task.app.move(dsn)
                tasks[module, name] = task, SyncPool(task.app.source)
        except Exception as error:
            nobody = JobContext(cast("App", None), row)
            line.end(Answer(_attempt.outcome_of(nobody, None, error), may_go_on=False))
            continue
        task, pool = tasks[module, name]
        job = JobContext(task.app, row)
        line.begin(job)
        outcome = _attempt.run(job, task, pool, None)
        line.end(Answer(outcome, may_go_on=not _memory.watch.has_run_out))

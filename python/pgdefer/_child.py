"""What runs in a worker's child process: jobs, one at a time."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import importlib
import logging
import logging.handlers
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

from . import _attempt, _memory
from ._connect import SyncPool
from ._context import JobContext
from ._task import Task, find_task

if TYPE_CHECKING:
    from ._app import App

__all__ = ["Answer", "Begun", "Word", "main"]

PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Word:
    """What the worker says to the job of a claim: why it is to end."""

    claim: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Begun:
    """The process has the job: should it die from now on, it may be the job's doing."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A job's outcome, whether the process is fit for another job, and what it has to log."""

    outcome: str | None
    may_go_on: bool
    logged: Sequence[logging.LogRecord] = ()


class _Notes(logging.handlers.QueueHandler):
    """Keeps what this package logs, for the worker, who knows how it is to be written."""

    def __init__(self) -> None:
        super().__init__(cast("Any", None))
        self._records: list[logging.LogRecord] = []
        ours = logging.getLogger("pgdefer")
        ours.addHandler(self)
        ours.setLevel(logging.DEBUG)
        ours.propagate = False

    def enqueue(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def take(self) -> list[logging.LogRecord]:
        """Return what was logged since the last time."""
        taken, self._records = self._records, []
        return taken


class _Line:
    """What the worker sends: jobs, and words to the one that runs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._job: JobContext | None = None
        self._word: Word | None = None
        self._is_idle = True

    def read(self) -> None:
        """Read until the worker is gone: without it no job goes on."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                received = self._connection.recv()
                if isinstance(received, Word):
                    self._word = received
                    self._pass_on()
                else:
                    self._is_idle = False
                    self._jobs.put(received)
        if not self._is_idle:
            os._exit(1)
        self._jobs.put(None)

    def jobs(self) -> Iterator[Any]:
        for received in iter(self._jobs.get, None):
            self._connection.send(Begun())
            yield received

    def begin(self, job: JobContext) -> None:
        self._job = job
        self._pass_on()

    def end(self, answer: Answer) -> None:
        self._job = None
        self._is_idle = True
        self._connection.send(answer)

    def _pass_on(self) -> None:
        # A word may come before its job has begun, and after it has ended.
        job, word = self._job, self._word
        if job is not None and word is not None and word.claim == job.claim:
            job._abort = word.reason


def main(connection: Connection, dsn: str) -> None:
    """Run jobs until the worker closes the line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        # They are meant for the worker, which tells when to stop. (To ignore them would be
        # inherited by what a handler starts.)
        signal.signal(number, lambda *_: None)
    _die_with_parent()
    notes = _Notes()
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
            outcome: str | None = _attempt.outcome_of(nobody, None, error)
            line.end(Answer(outcome, may_go_on=False, logged=notes.take()))
            continue
        task, pool = tasks[module, name]
        job = JobContext(task.app, row)
        line.begin(job)
        outcome = contextvars.copy_context().run(_attempt.run, job, task, pool, None)
        is_fit = not _memory.watch.has_run_out
        line.end(Answer(outcome, may_go_on=is_fit, logged=notes.take()))


def _die_with_parent() -> None:
    """Have this process killed when its parent dies, also where a handler lets no thread run.

    On Linux; elsewhere, and as a rule, it ends when it reads that the line was closed.
    """
    parent = multiprocessing.parent_process()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)

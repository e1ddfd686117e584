"""The main loop of a worker's child process, which runs one job at a time.

Tests: integration/test_processes.py, integration/test_process_starts.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import importlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

from pgdefer.client.client import Client
from pgdefer.database.pool import SyncPool
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.task import Task, find_task
from pgdefer.worker import ending, handler, memory
from pgdefer.worker.outcomes import Settled
from pgdefer.worker.process_log import Forwarder, Outbox
from pgdefer.worker.unix_signals import not_ignored

__all__ = ["AbortRequest", "Prepare", "Prepared", "Recall", "Result", "Started", "main"]

PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class AbortRequest:
    """Asks the job of a claim to end, with the reason."""

    claim: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Recall:
    """Asks to give the job of a claim back, if its handler waits for a connection."""

    claim: int


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Asks the process to import a module before it gets a job of that module."""

    module: str


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Says that the module is imported, or that its import has failed."""


@dataclasses.dataclass(frozen=True)
class Started:
    """Says that the process has the job: if it dies from now on, the job may be the cause."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A job's outcome, and whether the process can take another job.

    None in place of the outcome: the handler has not begun.
    """

    outcome: str | Settled | None
    may_go_on: bool


class _Inbox:
    """Receives jobs from the worker, and requests to the running job."""

    def __init__(self, connection: Connection, outbox: Outbox) -> None:
        self._connection = connection
        self._outbox = outbox
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._job: JobContext | None = None
        self._request: AbortRequest | None = None
        self._recall: Recall | None = None
        self.is_idle = True

    def read(self) -> None:
        """Read until the worker is gone; without it no job continues."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                received = self._connection.recv()
                if isinstance(received, AbortRequest):
                    self._request = received
                    self._pass_on()
                elif isinstance(received, Recall):
                    self._recall = received
                    self._pass_on()
                else:
                    self.is_idle = False
                    self._jobs.put(received)
        if not self.is_idle:
            os._exit(1)
        self._jobs.put(None)

    def jobs(self) -> Iterator[Any]:
        """Yield the jobs, and the requests to prepare for some."""
        for received in iter(self._jobs.get, None):
            if not isinstance(received, Prepare):
                self._outbox.send(Started())
            yield received

    def begin(self, job: JobContext) -> None:
        self._job = job
        self._pass_on()

    def end(self, answer: Result | Prepared) -> None:
        self._job = None
        self.is_idle = True
        self._outbox.send(answer)

    def _pass_on(self) -> None:
        # A request may come before its job has begun, and after it has ended.
        job, request, recall = self._job, self._request, self._recall
        if job is not None and request is not None and request.claim == job.claim:
            job._abort_reason = request.reason
        if job is not None and recall is not None and recall.claim == job.claim:
            job._is_recalled = True


def main(connection: Connection, dsn: str, log_level: int) -> None:
    """Run jobs until the worker closes the connection."""
    for number in not_ignored():
        # These signals are for the worker, which says when to stop. (If the process ignored them,
        # programs that a handler starts would inherit that.)
        signal.signal(number, lambda *_: None)
    _die_with_parent()
    outbox = Outbox(connection)
    inbox = _Inbox(connection, outbox)
    Forwarder(outbox, lambda: inbox.is_idle).install(log_level)
    threading.Thread(target=inbox.read, name="pgdefer-inbox", daemon=True).start()
    tasks: dict[tuple[str, str, int], tuple[Task[..., Any], SyncPool]] = {}
    failed: dict[str, Exception] = {}
    for received in inbox.jobs():
        if isinstance(received, Prepare):
            try:
                importlib.import_module(received.module)
            except Exception as error:
                failed[received.module] = error  # becomes the error of the job
            inbox.end(Prepared())
            continue
        wanted, row = received
        try:
            if wanted[0] in failed:
                raise failed[wanted[0]]
            if wanted not in tasks:
                task = find_task(*wanted)
                task.client.move(dsn)
                tasks[wanted] = task, SyncPool(task.client.source)
        except Exception as error:
            nobody = JobContext(cast("Client", None), row)
            outcome: str | Settled | None = ending.outcome_of(nobody, None, error)
            inbox.end(Result(outcome, may_go_on=False))
            continue
        task, pool = tasks[wanted]
        job = JobContext(task.client, row)
        inbox.begin(job)
        outcome = contextvars.copy_context().run(handler.run, job, task, pool, None)
        is_fit = not memory.cap.was_hit
        inbox.end(Result(outcome, may_go_on=is_fit))


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, even if no thread here can run.

    This works on Linux. Elsewhere, and usually, the process ends when it reads that the connection
    was closed.
    """
    parent = multiprocessing.parent_process()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)

"""Processes for handlers that use much CPU or memory, or may crash."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import _child, _outcome
from ._attempt import outcome_of
from ._connect import Source
from ._context import JobAborted, JobContext
from ._errors import PgDeferError
from ._text import logger

if TYPE_CHECKING:
    from ._task import Task

__all__ = ["Processes"]

log = logger("pgdefer.worker")

# How long a process has to end once it has nothing more to do.
LINGER = 2.0
# How many new processes may die before they have begun the job, in a row.
STILLBORN = 3


class Processes:
    """Processes that run one job at a time each, started when needed and used again.

    `run` and `close` wait, so they are called in threads, `run` in ones that live on until `close`
    has returned. A process is replaced after `jobs_per_process` jobs, and after a job that ran out
    of memory.
    """

    def __init__(self, source: Source, jobs_per_process: int) -> None:
        self._source = source
        self._jobs_per_process = jobs_per_process
        self._idle: list[_Process] = []
        self._busy: dict[JobContext, _Process] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, job: JobContext, task: Task[..., Any]) -> str | None:
        """Run a job and return its outcome, None where it has been written already."""
        stillborn = 0
        try:
            while not (process := self._take(job)).begin(job, task):
                # It died before the job began: whatever killed it, that job did not.
                stillborn += not process.jobs
                self._put_back(job, process, is_good=False)
                if stillborn == STILLBORN:
                    return _crashed(job, process)
                if job._abort is not None:
                    return outcome_of(job, task.handling, JobAborted(job._abort))
        except Exception as error:
            log.exception("no process could be started for %r", job)
            return _outcome.crashed(job.id, job.claim, error)
        answer = process.receive()
        self._put_back(job, process, is_good=answer is not None and answer.may_go_on)
        if answer is not None:
            _write(answer.logged)
            return answer.outcome
        if job._abort is not None:
            return outcome_of(job, task.handling, JobAborted(job._abort))
        return _crashed(job, process)

    def tell(self, job: JobContext, reason: str) -> None:
        """Tell the job that it should end."""
        if process := self._busy.get(job):
            process.tell(_child.Word(job.claim, reason))

    def kill(self, job: JobContext) -> None:
        """End the job's process at once."""
        with self._lock:
            if process := self._busy.get(job):
                process.kill()

    def close(self) -> None:
        """End all processes, those that run a job at once."""
        with self._lock:
            self._is_closed = True
            for process in self._busy.values():
                process.kill()
            idle, self._idle = self._idle, []
        # All at once: each has to be scheduled to hear of it, and to end.
        for process in idle:
            process.hang_up()
        end = time.monotonic() + LINGER
        for process in idle:
            process.close(end - time.monotonic())

    def _take(self, job: JobContext) -> _Process:
        dead = []
        try:
            with self._lock:
                while self._idle:
                    process = self._idle.pop()
                    if process.is_alive:
                        self._busy[job] = process
                        return process
                    dead.append(process)
        finally:
            for process in dead:
                process.close()
        process = _Process(self._source.conninfo())
        with self._lock:
            if not self._is_closed:
                self._busy[job] = process
                return process
        process.kill()
        process.close()
        raise ProcessDied("the worker ends")

    def _put_back(self, job: JobContext, process: _Process, *, is_good: bool) -> None:
        with self._lock:
            del self._busy[job]
            if is_good and not process.is_killed and process.jobs < self._jobs_per_process:
                self._idle.append(process)
                return
        process.close()


class ProcessDied(PgDeferError):  # noqa: N818
    """A job's process ended before the job did."""


def _write(records: Iterable[logging.LogRecord]) -> None:
    """Log what a process has noted."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _crashed(job: JobContext, process: _Process) -> str:
    error = ProcessDied(process.how_it_ended())
    log.warning("%r crashed: %s", job, error)
    return _outcome.crashed(job.id, job.claim, error)


class _Process:
    """One child process and the line to it."""

    def __init__(self, dsn: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_child.main, args=(theirs, dsn), name="pgdefer")
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self.jobs = 0
        self.is_killed = False

    @property
    def is_alive(self) -> bool:
        """Whether it seems fit for a job: it may die in the next moment."""
        return self._process.exitcode is None

    def begin(self, job: JobContext, task: Task[..., Any]) -> bool:
        """Send a job; returns whether the process has taken it up."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send((task.module, task.name, job._row))
        if job._abort is not None:
            self.tell(_child.Word(job.claim, job._abort))
        return isinstance(self._next(), _child.Begun)

    def tell(self, word: _child.Word) -> None:
        """Say something to the job that runs."""
        if not self._lock.acquire(blocking=False):
            # It is being sent; whoever does that looks afterwards whether there is a word.
            return
        try:
            with contextlib.suppress(OSError):
                self._connection.send(word)
        finally:
            self._lock.release()

    def receive(self) -> _child.Answer | None:
        """Return the job's answer; None where the process ended without one."""
        self.jobs += 1
        answer = self._next()
        return answer if isinstance(answer, _child.Answer) else None

    def _next(self) -> object:
        """Return what comes next; None where the process has ended."""
        with contextlib.suppress(OSError, EOFError):
            # What a handler has started may hold the line open beyond the process's end.
            while not self._connection.poll(1.0):
                if not self.is_alive and not self._connection.poll():
                    return None
            received: object = self._connection.recv()
            return received
        return None

    def kill(self) -> None:
        """End it at once."""
        self.is_killed = True
        self._process.kill()

    def hang_up(self) -> None:
        """Tell it to end, by closing the line."""
        self._connection.close()

    def close(self, seconds: float = LINGER) -> None:
        """Let it end; end it where it does not within that time."""
        self.hang_up()
        self._process.join(max(seconds, 0.0))
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def how_it_ended(self) -> str:
        """Say so, once it was closed."""
        code = self._process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
            return f"its process was ended by signal {-code}"  # a real-time one has no name
        return f"its process exited with {code}"

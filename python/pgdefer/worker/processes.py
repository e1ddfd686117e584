"""Processes for handlers that use much CPU or memory, or may crash."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

from pgdefer._text import logger
from pgdefer.database.source import Source
from pgdefer.errors import PgDeferError
from pgdefer.tasks.context import JobAborted, JobContext
from pgdefer.tasks.task import Task
from pgdefer.worker import outcomes, process_main
from pgdefer.worker.ending import outcome_of
from pgdefer.worker.outcomes import Settled

__all__ = ["Processes"]

log = logger("pgdefer.worker")

# How long a process has to end once it has nothing more to do.
LINGER = 2.0
# How many new processes in a row may die before they have begun the job.
MAX_EARLY_DEATHS = 3


class Processes:
    """Processes that run one job at a time each, started when needed and used again.

    `run` and `close` block, so they are called in threads; those of `run` must live until `close`
    has returned. A process is replaced after `jobs_per_process` jobs, and after a job that ran out
    of memory.
    """

    def __init__(self, source: Source, jobs_per_process: int) -> None:
        self._source = source
        self._jobs_per_process = jobs_per_process
        self._idle: list[ChildProcess] = []
        self._busy: dict[JobContext, ChildProcess] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, job: JobContext, task: Task[..., Any]) -> str | Settled:
        """Run a job and return its outcome."""
        died_early = 0
        try:
            while not (process := self._take(job)).begin(job, task):
                # It died before the job began, so the job is not the cause.
                died_early += not process.jobs
                self._put_back(job, process, is_good=False)
                if died_early == MAX_EARLY_DEATHS:
                    return _crashed(job, process)
                if job._abort_reason is not None:
                    return outcome_of(job, task.failure_policy, JobAborted(job._abort_reason))
        except Exception as error:
            log.exception("no process could be started for %r", job)
            return outcomes.crashed(job.id, job.claim, error)
        result = process.receive()
        self._put_back(job, process, is_good=result is not None and result.may_go_on)
        if result is not None:
            _write(result.logged)
            return result.outcome
        if job._abort_reason is not None:
            return outcome_of(job, task.failure_policy, JobAborted(job._abort_reason))
        return _crashed(job, process)

    def pids(self) -> list[int]:
        """Return the numbers of the processes, also of those that have nothing to do."""
        with self._lock:
            return [process.pid for process in (*self._idle, *self._busy.values())]

    def tell(self, job: JobContext, reason: str) -> None:
        """Tell the job to end."""
        if process := self._busy.get(job):
            process.tell(process_main.AbortRequest(job.claim, reason))

    def kill(self, job: JobContext) -> None:
        """End the job's process at once."""
        with self._lock:
            if process := self._busy.get(job):
                process.kill()

    def close(self) -> None:
        """End all processes; kill those that run a job."""
        with self._lock:
            self._is_closed = True
            for process in self._busy.values():
                process.kill()
        self.close_idle()

    def close_idle(self) -> None:
        """End the processes that have nothing to do."""
        with self._lock:
            idle, self._idle = self._idle, []
        # All at once, because each needs some time to notice it and to end.
        for process in idle:
            process.hang_up()
        end = time.monotonic() + LINGER
        for process in idle:
            process.close(end - time.monotonic())

    def _take(self, job: JobContext) -> ChildProcess:
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
        process = ChildProcess(self._source.conninfo())
        with self._lock:
            if not self._is_closed:
                self._busy[job] = process
                return process
        process.kill()
        process.close()
        raise ProcessDied("the worker ends")

    def _put_back(self, job: JobContext, process: ChildProcess, *, is_good: bool) -> None:
        with self._lock:
            del self._busy[job]
            if is_good and not process.is_killed and process.jobs < self._jobs_per_process:
                self._idle.append(process)
                return
        process.close()


class ProcessDied(PgDeferError):  # noqa: N818
    """A job's process ended before the job did."""


def _write(records: Iterable[logging.LogRecord]) -> None:
    """Log the records of a process."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _crashed(job: JobContext, process: ChildProcess) -> str:
    job._error = error = ProcessDied(process.how_it_ended())
    return outcomes.crashed(job.id, job.claim, error)


class ChildProcess:
    """One child process and the connection to it."""

    def __init__(self, dsn: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=process_main.main, args=(theirs, dsn), name="pgdefer"
        )
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self.jobs = 0
        self.is_killed = False

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it seems able to run a job; it may die in the next moment."""
        return self._process.exitcode is None

    def begin(self, job: JobContext, task: Task[..., Any]) -> bool:
        """Send a job; return whether the process has taken it."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send((task.module, task.name, job._row))
        if job._abort_reason is not None:
            self.tell(process_main.AbortRequest(job.claim, job._abort_reason))
        return isinstance(self._next(), process_main.Started)

    def tell(self, request: process_main.AbortRequest) -> None:
        """Send a request to the running job."""
        if not self._lock.acquire(blocking=False):
            # The job is being sent; the sender checks afterwards whether it must end.
            return
        try:
            with contextlib.suppress(OSError):
                self._connection.send(request)
        finally:
            self._lock.release()

    def receive(self) -> process_main.Result | None:
        """Return the job's result; None if the process ended without one."""
        self.jobs += 1
        result = self._next()
        return result if isinstance(result, process_main.Result) else None

    def _next(self) -> object:
        """Return the next message; None if the process has ended."""
        with contextlib.suppress(OSError, EOFError):
            # A program that a handler has started may keep the connection open after the process.
            while not self._connection.poll(1.0):
                if not self.is_alive and not self._connection.poll():
                    return None
            received: object = self._connection.recv()
            return received
        return None

    def kill(self) -> None:
        """Kill it."""
        self.is_killed = True
        self._process.kill()

    def hang_up(self) -> None:
        """Tell it to end, by closing the connection."""
        self._connection.close()

    def close(self, seconds: float = LINGER) -> None:
        """Let it end; kill it if it does not end in time."""
        self.hang_up()
        self._process.join(max(seconds, 0.0))
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def how_it_ended(self) -> str:
        """Return a text that says so, after it was closed."""
        code = self._process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
            return f"its process was ended by signal {-code}"  # real-time signals have no name
        return f"its process exited with {code}"

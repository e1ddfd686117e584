"""Processes for handlers that use much CPU or memory, or may crash."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from pgdefer._text import logger
from pgdefer.database.source import Source
from pgdefer.errors import PgDeferError
from pgdefer.tasks.context import JobAborted, JobContext
from pgdefer.tasks.task import Task
from pgdefer.worker import outcomes, process_log, process_main
from pgdefer.worker.ending import outcome_of
from pgdefer.worker.outcomes import Settled
from pgdefer.worker.state import JOB_PROCESS

__all__ = ["Processes"]

log = logger("pgdefer.worker")

# How long a process may take to end once it has nothing more to do, in seconds.
LINGER = 2.0
# How many new processes in a row may die before they have begun the job.
MAX_EARLY_DEATHS = 3
# How long a process may take to start and to import a module, in seconds.
MAX_PREPARATION = 300.0
# How much longer a wait for a message may take to write log records that have come, in seconds.
DRAIN = 1.0
# How often to check whether a job still waits for that, in seconds.
LOOK_EVERY = 0.1


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

    def run(
        self,
        job: JobContext,
        task: Task[..., Any],
        is_too_late: Callable[[], bool],
        begun: Callable[[], None],
    ) -> str | Settled | None:
        """Run a job and return its outcome; None if it has not begun, and it is too late.

        The time until a process has imported the task's module does not count for the handler, so
        `begun` is called after the import. If the job can't wait so long, the process goes on with
        the import, for the next job.
        """
        died_early = 0
        try:
            while True:
                process = self._take(job, task.module)
                is_ready = process.prepare(task.module, lambda: _must_end(job, is_too_late))
                if is_ready is None:
                    self._put_back(job, process, is_good=True)
                    return _ended(job, task)
                if is_ready and process.begin(job, task, is_too_late):
                    break
                # It died before the job began, so the job is not the cause.
                died_early += not process.jobs
                self._put_back(job, process, is_good=False)
                if process.was_slow or died_early == MAX_EARLY_DEATHS:
                    return _crashed(job, process)
                if _must_end(job, is_too_late):
                    return _ended(job, task)
        except Exception as error:
            said = "no process could be started for %r"
            log.exception(said, job, extra=job._log_fields())
            return outcomes.crashed(job.id, job.claim, error)
        begun()
        result = process.receive(job)
        self._put_back(job, process, is_good=result is not None and result.may_go_on)
        if result is not None:
            return result.outcome
        return _ended(job, task) or _crashed(job, process)

    def pids(self) -> list[int]:
        """Return the pids of the processes, idle ones included."""
        with self._lock:
            return [process.pid for process in (*self._idle, *self._busy.values())]

    def tell(self, job: JobContext, reason: str) -> None:
        """Tell the job to end."""
        if process := self._busy.get(job):
            process.tell(process_main.AbortRequest(job.claim, reason))

    def kill(self, job: JobContext) -> None:
        """End the job's process at once, if it has received the job."""
        with self._lock:
            if (process := self._busy.get(job)) and process.has_job:
                process.kill()

    def close(self) -> None:
        """End all processes; kill those that run a job."""
        with self._lock:
            self._is_closed = True
            for process in self._busy.values():
                process.kill()
        self.close_idle()

    def close_idle(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        # All at once, because each needs some time to notice it and to end.
        for process in idle:
            process.hang_up()
        end = time.monotonic() + LINGER
        for process in idle:
            process.close(end - time.monotonic())

    def _take(self, job: JobContext, module: str) -> ChildProcess:
        dead = []
        try:
            with self._lock:
                while (process := self._pop_idle(module)) is not None:
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

    def _pop_idle(self, module: str) -> ChildProcess | None:
        """Return an idle process: one that has imported the module, or imports it, or is free to.

        A process that still imports another module is for jobs of that module.
        """
        fit = [process for process in self._idle if process.prepares in (None, module)]
        if not fit:
            return None
        found = max(reversed(fit), key=lambda one: (module in one.modules, one.prepares == module))
        self._idle.remove(found)
        return found

    def _put_back(self, job: JobContext, process: ChildProcess, *, is_good: bool) -> None:
        with self._lock:
            del self._busy[job]
            if is_good and not process.is_killed and process.jobs < self._jobs_per_process:
                self._idle.append(process)
                return
        process.close()


class ProcessDied(PgDeferError):  # noqa: N818
    """A job's process ended before the job did."""


def _must_end(job: JobContext, is_too_late: Callable[[], bool]) -> bool:
    """Whether a job that has not begun must not begin any more."""
    return job._abort_reason is not None or is_too_late()


def _ended(job: JobContext, task: Task[..., Any]) -> str | None:
    """Return the outcome of a job that was aborted."""
    if job._abort_reason is None:
        return None
    return outcome_of(job, task.failure_policy, JobAborted(job._abort_reason))


def _crashed(job: JobContext, process: ChildProcess) -> str:
    job._error = error = ProcessDied(process.how_it_ended())
    return outcomes.crashed(job.id, job.claim, error)


class ChildProcess:
    """One child process and the connection to it."""

    def __init__(self, dsn: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=process_main.main, args=(theirs, dsn, logging.root.level), name=JOB_PROCESS
        )
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._received: object = None
        self.jobs = 0
        self.is_killed = False
        #: Whether it has received the job that it is to run.
        self.has_job = False
        #: The modules that it has imported, and the one that it imports now.
        self.modules: set[str] = set()
        self.prepares: str | None = None
        self._prepares_since = 0.0
        #: Whether it was killed because an import took too long.
        self.was_slow = False

    @property
    def pid(self) -> int:
        """The pid of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can run a job, as far as is known: it may die the next moment."""
        return self._process.exitcode is None

    def prepare(self, module: str, must_end: Callable[[], bool]) -> bool | None:
        """Let it import a module, and return True once it has tried; False if it died.

        Return None if `must_end` became true first; the import then goes on.
        """
        if module in self.modules:
            return True
        if self.prepares is None:
            self.prepares, self._prepares_since = module, time.monotonic()
            with self._lock, contextlib.suppress(OSError):
                self._connection.send(process_main.Prepare(module))
        while not self._poll(LOOK_EVERY):
            if must_end():
                return None
            if time.monotonic() - self._prepares_since > MAX_PREPARATION and not self.is_killed:
                self.was_slow = True
                self.kill()
        if not isinstance(self._next(), process_main.Prepared):
            return False
        self.modules.add(module)
        self.prepares = None
        return True

    def begin(self, job: JobContext, task: Task[..., Any], is_too_late: Callable[[], bool]) -> bool:
        """Send a job; return whether the process has taken it."""
        self.has_job = True
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(((task.module, task.name, task.place), job._row))
        if job._abort_reason is not None:
            self.tell(process_main.AbortRequest(job.claim, job._abort_reason))
        while not self._poll(1.0):
            if is_too_late():
                self.kill()
        return isinstance(self._next(), process_main.Started)

    def tell(self, request: process_main.AbortRequest | process_main.Recall) -> None:
        """Send a request to the running job."""
        if not self._lock.acquire(blocking=False):
            # The job is being sent; the sender checks afterwards whether it must end.
            return
        try:
            with contextlib.suppress(OSError):
                self._connection.send(request)
        finally:
            self._lock.release()

    def receive(self, job: JobContext) -> process_main.Result | None:
        """Return the job's result; None if the process ended without one."""
        self.jobs += 1
        is_told = False
        while not self._poll(1.0):
            if job._is_recalled and not is_told:
                self.tell(process_main.Recall(job.claim))
                is_told = True
        result = self._next()
        self.has_job = False
        return result if isinstance(result, process_main.Result) else None

    def _poll(self, seconds: float) -> bool:
        """Wait for a message, or for the end of the process; return whether one has come.

        Log records are no messages: those that have come are written.
        """
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError, EOFError):
            while self._received is None and time.monotonic() < end + DRAIN:
                # A program that a handler has started may keep the connection open afterwards.
                if not self._connection.poll(max(end - time.monotonic(), 0.0)):
                    if self.is_alive:
                        return False
                    if not self._connection.poll():
                        return True
                self._received = process_log.receive(self._connection)
            return self._received is not None
        return True

    def _next(self) -> object:
        """Return the message that has come; None if the process has ended."""
        received, self._received = self._received, None
        return received

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
        """Return how the process ended, for an error message. Call `close` first."""
        code = self._process.exitcode
        if self.was_slow:
            return f"its process had not imported {self.prepares} after {MAX_PREPARATION:g} s"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
            return f"its process was ended by signal {-code}"  # real-time signals have no name
        return f"its process exited with {code}"

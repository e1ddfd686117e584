"""Processes for handlers that use much CPU or memory, or may crash."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from typing import TYPE_CHECKING, Any

from . import _child, _outcome
from ._attempt import outcome_of
from ._connect import Source
from ._context import JobAborted, JobContext
from ._errors import PgDeferError

if TYPE_CHECKING:
    from ._task import Task

__all__ = ["Processes"]

# How long a process has to end once it has nothing more to do.
LINGER = 2.0


class Processes:
    """Processes that run one job at a time each, started when needed and used again.

    `run` and `close` wait, so they are called in threads. A process is replaced after
    `jobs_per_process` jobs, and after a job that ran out of memory.
    """

    def __init__(self, source: Source, jobs_per_process: int) -> None:
        self._source = source
        self._jobs_per_process = jobs_per_process
        self._idle: list[_Process] = []
        self._busy: dict[JobContext, _Process] = {}
        self._lock = threading.Lock()

    def run(self, job: JobContext, task: Task[..., Any]) -> str | None:
        """Run a job and return its outcome, None where it has been written already."""
        try:
            process = self._take(job)
            while not process.send((task.module, task.name, job._row)):
                # It ended while it was idle, and the job has not begun.
                self._put_back(job, process, is_good=False)
                process = self._take(job)
        except Exception as error:
            return outcome_of(job, task, error)
        if job._abort is not None:
            process.send(job._abort)
        answer = process.receive()
        self._put_back(job, process, is_good=answer is not None and answer.may_go_on)
        if answer is not None:
            return answer.outcome
        if job._abort is not None:
            return outcome_of(job, task, JobAborted(job._abort))
        return _outcome.crashed(job.id, job.claim, ProcessDied(process.how_it_ended()))

    def tell(self, job: JobContext, reason: str) -> None:
        """Tell the job that it should end."""
        if process := self._busy.get(job):
            process.send(reason, wait=False)

    def kill(self, job: JobContext) -> None:
        """End the job's process at once."""
        with self._lock:
            if process := self._busy.get(job):
                process.kill()

    def close(self) -> None:
        """End all processes, those that run a job at once."""
        with self._lock:
            for process in self._busy.values():
                process.kill()
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def _take(self, job: JobContext) -> _Process:
        with self._lock:
            if self._idle:
                process = self._busy[job] = self._idle.pop()
                return process
        process = _Process(self._source.conninfo())
        with self._lock:
            self._busy[job] = process
        return process

    def _put_back(self, job: JobContext, process: _Process, *, is_good: bool) -> None:
        with self._lock:
            del self._busy[job]
            if is_good and not process.is_killed and process.jobs < self._jobs_per_process:
                self._idle.append(process)
                return
        process.close()


class ProcessDied(PgDeferError):  # noqa: N818
    """A job's process ended before the job did."""


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

    def send(self, message: object, *, wait: bool = True) -> bool:
        """Send a job, or a word to the one that runs; returns whether it was sent."""
        if not self._lock.acquire(blocking=wait):
            # A job is being sent; whoever does that looks afterwards whether there is a word.
            return False
        try:
            self._connection.send(message)
        except OSError:
            return False
        finally:
            self._lock.release()
        return True

    def receive(self) -> _child.Answer | None:
        """Return the job's answer; None where the process ended without one."""
        self.jobs += 1
        with contextlib.suppress(OSError, EOFError):
            # What a handler has started may hold the line open beyond the process's end.
            while not self._connection.poll(1.0):
                if self._process.exitcode is not None and not self._connection.poll():
                    return None
            answer: _child.Answer = self._connection.recv()
            return answer
        return None

    def kill(self) -> None:
        """End it at once."""
        self.is_killed = True
        self._process.kill()

    def close(self) -> None:
        """Let it end; end it where it does not."""
        self._connection.close()
        self._process.join(LINGER)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def how_it_ended(self) -> str:
        """Say so, once it was closed."""
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process exited with {code}"

"""The runners of handlers: the worker's event loop, threads, and child processes.

Tests: integration/test_worker.py, integration/test_processes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime as dt
import functools
import time
from collections.abc import Callable
from typing import Any

from pgdefer._text import logger
from pgdefer.database.pool import AsyncPool, SyncPool
from pgdefer.tasks.context import JobContext, JobTimeout
from pgdefer.tasks.interruptible import Interruptible
from pgdefer.tasks.registry import Registry
from pgdefer.tasks.task import Task
from pgdefer.worker import outcomes
from pgdefer.worker.claim import Claim, Keeper
from pgdefer.worker.ending import outcome_of
from pgdefer.worker.handler import Call, run, run_async, run_function
from pgdefer.worker.outcomes import Settled
from pgdefer.worker.processes import Processes
from pgdefer.worker.state import GRACE
from pgdefer.worker.threads import Threads

__all__ = ["FunctionRunner", "LoopRunner", "ProcessRunner", "ThreadRunner"]

log = logger("pgdefer.worker")

# How often JobTimeout is raised again in a thread that goes on, in seconds.
AGAIN = 10.0


class ThreadRunner:
    """Runs functions in threads, in which a timeout can raise an exception."""

    def __init__(self, threads: Threads, pool: SyncPool, keeper: Keeper) -> None:
        self._threads = threads
        self._pool = pool
        self._keeper = keeper

    def start(self, claim: Claim) -> None:
        """Call the handler, with arguments that are decoded in its thread."""
        self.start_call(claim, None)

    def start_call(self, claim: Claim, call: Call | None) -> None:
        """Call the handler; if the arguments are already decoded, `call` calls it with them."""
        context = contextvars.copy_context()
        function = functools.partial(context.run, run, claim.job, task_of(claim), self._pool, call)
        claim.runner = self
        claim.call = Interruptible(function)
        submit(self._threads, claim, claim.call.run, self._keeper)

    def abort(self, claim: Claim, reason: str) -> None:
        """Do nothing: the handler sees it in `should_abort`."""

    def interrupt(self, claim: Claim) -> None:
        """Raise JobTimeout in the thread; repeat that if it was lost, as in a destructor."""
        if not claim.has_left and claim.call is not None:
            claim.call.interrupt(JobTimeout)
            if claim.timer is not None:
                claim.timer.cancel()
            loop = asyncio.get_running_loop()
            claim.timer = loop.call_later(AGAIN, self.interrupt, claim)


class LoopRunner:
    """Runs coroutines in the worker's event loop. Create it in the worker's own task."""

    def __init__(self, pool: AsyncPool, thread_runner: ThreadRunner, keeper: Keeper) -> None:
        self._pool = pool
        self._thread_runner = thread_runner
        self._keeper = keeper
        self._worker = asyncio.current_task()

    def start(self, claim: Claim) -> None:
        """Run a coroutine. For an ordinary function decode the arguments; a thread calls it."""
        if claim.job.timeout is not None:
            note_end(claim.job, claim.job.timeout)
        claim.coroutine = asyncio.get_running_loop().create_task(self._run(claim))

    async def _run(self, claim: Claim) -> None:
        if not self._keeper.let_begin(claim):
            return
        try:
            ended: str | Settled | Call | None = await run_async(
                claim.job, task_of(claim), self._pool, self._worker
            )
        except BaseException as error:
            ended = internal_error(claim, error)
        if ended is None:
            self._keeper.give_back_unbegun(claim)
        elif isinstance(ended, tuple):
            claim.coroutine = None
            self._thread_runner.start_call(claim, ended)
        else:
            self._keeper.end(claim, ended)

    def abort(self, claim: Claim, reason: str) -> None:
        """Cancel the coroutine."""
        if claim.coroutine is not None:
            # A coroutine that has not begun ends without a result.
            claim.coroutine.add_done_callback(functools.partial(self._never_began, claim))
            claim.coroutine.cancel(reason)

    def _never_began(self, claim: Claim, coroutine: asyncio.Task[None]) -> None:
        if not claim.has_left and claim.coroutine is coroutine:
            error = asyncio.CancelledError()
            self._keeper.end(claim, outcome_of(claim.job, claim.failure_policy, error))

    def interrupt(self, claim: Claim) -> None:
        """Do nothing: a coroutine is cancelled once."""


class FunctionRunner:
    """Lets the database run tasks that the app does not know, if it has functions for them."""

    def __init__(
        self, threads: Threads, pool: SyncPool, keeper: Keeper, registry: Registry
    ) -> None:
        self._threads = threads
        self._pool = pool
        self._keeper = keeper
        self._registry = registry

    def start(self, claim: Claim) -> None:
        """Let a thread call the function."""
        context = contextvars.copy_context()
        task = self._registry.tasks.get(claim.job.task)
        if task is None:
            hint = self._registry.import_hint
            why = f"this worker does not know the task. To run it here: {hint}"
        else:  # known in another version
            why = task.versions.not_understood(claim.job._stored)
        function = functools.partial(context.run, run_function, claim.job, self._pool, why)
        submit(self._threads, claim, function, self._keeper)

    def abort(self, claim: Claim, reason: str) -> None:
        """Do nothing: the claim is lost, so the function's transaction will be rolled back."""

    def interrupt(self, claim: Claim) -> None:
        """Do nothing: the server ends the function at its timeout."""


class ProcessRunner:
    """Runs functions in child processes, and kills those that do not end when told to."""

    def __init__(self, threads: Threads, processes: Processes, keeper: Keeper) -> None:
        self._threads = threads
        self._processes = processes
        self._keeper = keeper

    def start(self, claim: Claim) -> None:
        """Let a process call the handler; a thread waits for it."""
        loop = asyncio.get_running_loop()
        if claim.timer is not None:  # the handler begins once a process has taken the job
            claim.timer.cancel()
            claim.timer = None

        def begun() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
                loop.call_soon_threadsafe(self._keeper.handler_begins, claim)

        context = contextvars.copy_context()
        too_late = functools.partial(self._keeper.is_too_late, claim)
        run_job = self._processes.run
        function = functools.partial(
            context.run, run_job, claim.job, task_of(claim), too_late, begun
        )
        submit(self._threads, claim, function, self._keeper)

    def abort(self, claim: Claim, reason: str) -> None:
        """Tell the process to end its job; kill it if the handler has not ended a moment later."""
        self._processes.tell(claim.job, reason)
        asyncio.get_running_loop().call_later(GRACE, self._kill, claim)

    def _kill(self, claim: Claim) -> None:
        if not claim.has_left:
            self._processes.kill(claim.job)
            asyncio.get_running_loop().call_later(GRACE, self._kill, claim)

    def interrupt(self, claim: Claim) -> None:
        """Do nothing: `abort` kills the process."""

    def close_idle(self) -> None:
        """End the processes that have nothing to do. Called in a thread."""
        self._processes.close_idle()

    def close(self) -> None:
        """End all processes."""
        self._processes.close()


def note_end(job: JobContext, timeout: dt.timedelta) -> None:
    """Note when the timeout of a job that starts now passes: a coroutine may block the timer."""
    job._late_at = time.monotonic() + timeout.total_seconds()


def task_of(claim: Claim) -> Task[..., Any]:
    """Return the task of a running claim."""
    assert claim.task is not None
    return claim.task


def submit(
    threads: Threads,
    claim: Claim,
    function: Callable[[], str | Settled | None],
    keeper: Keeper,
) -> None:
    """Run a function in a thread; it returns a job's outcome, or None if the job has not begun."""

    def work() -> Callable[[], None]:
        try:
            ended = None if keeper.is_too_late(claim) else function()
        except JobTimeout as error:
            # Raised outside of the handler, before or after it.
            ended = outcome_of(claim.job, claim.failure_policy, error)
        except BaseException as error:
            ended = internal_error(claim, error)
        if ended is None:
            return functools.partial(keeper.give_back_unbegun, claim)
        return functools.partial(keeper.end, claim, ended)

    threads.submit(work)


def internal_error(claim: Claim, error: BaseException) -> str:
    """Return an outcome for a job whose own outcome could not be made, so that no slot is lost."""
    said = "%r: its outcome could not be made"
    log.error(said, claim, exc_info=error, extra=claim.job._log_fields())
    return outcomes.failed(claim.job.id, claim.job.claim, error)

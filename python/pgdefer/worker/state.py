"""The state that a worker's parts share: its id, whether it is stopping, the fetcher's wake-up.

Tests: unit/test_executor.py, integration/test_worker_stops.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import sys

from pgdefer.errors import PgDeferError, WorkerGone

__all__ = ["GRACE", "JOB_PROCESS", "WorkerState", "check_may_run"]

# The name of a process that runs jobs of its worker.
JOB_PROCESS = "pgdefer-job"
# How long jobs, hooks and tasks may take to end after the worker has told them to, in seconds.
GRACE = 1.0


class WorkerState:
    """The shared state. Only the worker's loop may use it, except `id` and `tell_to_stop`.

    A worker stops in three steps, each of which includes those before it. Once it is told to stop,
    from any thread, it begins no more jobs. When its loop hears of that, it is stopping, and gives
    back the jobs that have not begun. Finally, if it must stop at once, it aborts the running jobs.
    """

    def __init__(self, max_jobs: int | None) -> None:
        #: The worker's id in the database while it is registered.
        self.id: int | None = None
        #: Whether it was told to stop, by a signal or a thread; the loop hears of that later.
        self.is_told_to_stop = False
        self.stopping = asyncio.Event()
        self.must_stop_at_once = asyncio.Event()
        #: How many jobs it may still claim.
        self.jobs_left = max_jobs or math.inf
        self._waiter: asyncio.Future[bool] | None = None
        self._was_hinted = False

    @property
    def claims_no_more(self) -> bool:
        """Whether it claims no more jobs."""
        return self.is_told_to_stop or self.jobs_left <= 0

    def tell_to_stop(self) -> None:
        """Let no more jobs be claimed or begin. May be called anywhere, also in signal handlers."""
        self.is_told_to_stop = True

    @property
    def is_stopping(self) -> bool:
        """Whether the worker's loop has heard that it is to stop."""
        return self.stopping.is_set()

    def registered(self) -> int:
        """Return the worker's id. Raises WorkerGone if it has none."""
        if self.id is None:
            raise WorkerGone("the worker is gone")
        return self.id

    # Waking

    @property
    def is_waiting(self) -> bool:
        """Whether the fetcher waits for a hint."""
        return self._waiter is not None

    def hint(self) -> None:
        """Make the fetcher look again: now, or when it is next about to wait."""
        if self._waiter is None:
            self._was_hinted = True
        else:
            _resolve(self._waiter, True)

    def forget_hint(self) -> bool:
        """Return whether there was a hint that nobody has waited for, and clear it."""
        was_hinted, self._was_hinted = self._was_hinted, False
        return was_hinted

    async def wait(self, seconds: float | None) -> bool:
        """Wait for a hint; return whether it came in time."""
        if self.forget_hint():
            return True
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = None
        if seconds is not None:
            timer = loop.call_later(seconds, _resolve, waiter, False)
        try:
            hinted: bool = await waiter
            return hinted
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    async def pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the worker begins to stop, or then must stop at once."""
        step = self.must_stop_at_once if self.is_stopping else self.stopping
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(step.wait(), seconds)


def _resolve(waiter: asyncio.Future[bool], value: bool) -> None:
    if not waiter.done():
        waiter.set_result(value)


def check_may_run(*, has_run: bool) -> None:
    """Raise PgDeferError if no worker may run here, or not this one."""
    if has_run:
        raise PgDeferError("a worker runs once", hint="Make another one.")
    if multiprocessing.current_process().name == JOB_PROCESS:
        raise PgDeferError(
            "a process that runs jobs may not start a worker",
            hint='In a module that it imports, start it below `if __name__ == "__main__":`; '
            "in a handler, start it in a process of its own.",
        )
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise PgDeferError(
            "a worker can't run where gevent has patched threads",
            hint="Such a program may defer jobs and read results. Start the worker in another, "
            "which patches nothing.",
        )

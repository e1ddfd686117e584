"""The runner that hands jobs to the application's own loop.

Tests: integration/test_stream.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from pgdefer._text import logger
from pgdefer.errors import PgDeferError
from pgdefer.tasks.context import JobAborted
from pgdefer.tasks.handling import RETRY_POLICY_ONLY
from pgdefer.worker.claim import Claim
from pgdefer.worker.ending import failed, outcome_of
from pgdefer.worker.executor import Executor
from pgdefer.worker.handler import decode_args_async
from pgdefer.worker.outcomes import Settled

__all__ = ["StreamRunner", "reader"]

log = logger("pgdefer.worker")


class StreamRunner:
    """Passes each claim with its arguments to `give`, and calls no handler.

    The executor, in the worker's thread, decides which jobs run and have not ended yet;
    `handed_out` only records which claims a reader has.
    """

    def __init__(self, executor: Executor, give: Callable[[Claim, dict[str, Any]], None]) -> None:
        self._executor = executor
        self._give = give
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoding: set[asyncio.Task[None]] = set()
        #: Claims that a reader has, with the thread or coroutine; None: its end is being reported.
        self.handed_out: dict[Claim, object] = {}

    # In the worker's thread

    def start(self, claim: Claim) -> None:
        """Decode the arguments, and pass the claim on."""
        self._loop = asyncio.get_running_loop()
        task = self._loop.create_task(self._decode(claim))
        self._decoding.add(task)
        task.add_done_callback(self._decoding.discard)

    async def _decode(self, claim: Claim) -> None:
        try:
            args = await decode_args_async(claim.job)
            if claim.task is not None:
                args = claim.task.versions.upgraded(args)
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            own = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and own is not None and own.cancelling():
                raise
            self._executor.end(claim, failed(claim.job, None, error))
            return
        if not claim.is_released:
            self._give(claim, args)

    def abort(self, claim: Claim, reason: str) -> None:
        """Do nothing: the reader sees it in `should_abort`."""

    def interrupt(self, claim: Claim) -> None:
        """Do nothing: the worker must not interrupt the reader's thread."""

    def end_all(self, *, is_over: bool) -> None:
        """End jobs that nobody will end any more."""
        for claim in list(self._executor.running):
            holder = self.handed_out.get(claim, self)
            if holder is self or (is_over and holder is not None):
                self._executor.give_back(claim)
            elif holder is not None:
                self._fail(claim, "it was left without an outcome")

    def _fail(self, claim: Claim, why: str) -> None:
        self.handed_out.pop(claim, None)
        if claim in self._executor.running:
            outcome = failed(claim.job, RETRY_POLICY_ONLY, PgDeferError(why))
            self._executor.end(claim, outcome)

    def _take_end(self, claim: Claim, outcome: str | Settled) -> None:
        self.handed_out.pop(claim, None)
        if claim in self._executor.running:
            self._executor.end(claim, outcome)
        else:
            said = "%r: its end comes too late, it was given back or has failed"
            log.warning(said, claim, extra=claim.job._log_fields())

    # From any thread

    def hand_out(self, claim: Claim) -> bool:
        """Record that the caller has a claim; return whether it should still run."""
        if claim.is_released:
            return False
        if claim.job.should_abort():
            error = JobAborted(str(claim.job._abort_reason))
            self.finish(claim, outcome_of(claim.job, RETRY_POLICY_ONLY, error))
            return False
        if self._executor.is_too_late(claim):
            self._call_soon(self._executor.give_back_unbegun, claim)
            return False
        self.handed_out[claim] = reader()
        return True

    def finish(self, claim: Claim, outcome: str | Settled) -> None:
        """Record how a job has ended."""
        self.handed_out[claim] = None
        if not self._call_soon(self._take_end, claim, outcome):
            said = "%r: its end comes too late, the worker has ended"
            log.warning(said, claim, extra=claim.job._log_fields())

    def drop(self, claim: Claim) -> None:
        """Record that nobody has the job any more. Called wherever Python collects garbage."""
        self.handed_out[claim] = None
        self._call_soon(self._fail, claim, "it was dropped without an outcome")

    def _call_soon(self, function: Callable[..., None], *args: object) -> bool:
        """Call in the worker's loop; return whether that has not ended."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True


def reader() -> object:
    """Return the reader that asks for a job: a coroutine's task, or a thread."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return threading.get_ident()

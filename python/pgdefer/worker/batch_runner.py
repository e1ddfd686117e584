"""The runner of batches.

Tests: integration/test_batch.py.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pgdefer.database.own_threads import enter_coroutine
from pgdefer.tasks.batch import BatchJob
from pgdefer.tasks.context import JobContext, JobTimeout
from pgdefer.tasks.interruptible import Interruptible
from pgdefer.tasks.task import Task
from pgdefer.worker.claim import Claim, Keeper
from pgdefer.worker.ending import outcome_of
from pgdefer.worker.handler import decode_args, decode_args_async
from pgdefer.worker.invoke_batch import run_batch
from pgdefer.worker.invoke_batch_async import run_batch_async
from pgdefer.worker.runners import ThreadRunner, internal_error, note_end, task_of
from pgdefer.worker.threads import Threads

__all__ = ["BatchRunner"]


class BatchRunner:
    """Runs batches: coroutines in the worker's event loop, functions in threads.

    Create it in the worker's own task. Each method takes any claim of a batch. The handler is told
    to end only once all its jobs are told to: the others could not go on without it.
    """

    def __init__(self, threads: Threads, thread_runner: ThreadRunner, keeper: Keeper) -> None:
        self._threads = threads
        self._thread_runner = thread_runner
        self._keeper = keeper
        self._worker = asyncio.current_task()

    def start(self, claim: Claim) -> None:
        """Start the handler; when it has ended, tell the keeper the outcome of each claim."""
        task = task_of(claim)
        claims = claim.members
        loop = asyncio.get_running_loop()
        if task.is_async:
            if claim.job.timeout is not None:
                for each in claims:
                    note_end(each.job, claim.job.timeout)
            claim.coroutine = loop.create_task(self._run(task, claims))
            return
        jobs = jobs_of(claims)
        decode = functools.partial(_decode, loop)
        context = contextvars.copy_context()
        claim.call = Interruptible(functools.partial(context.run, run_batch, task, jobs, decode))
        self._threads.submit(functools.partial(self._work, claims, claim.call.run))

    async def _run(self, task: Task[..., Any], claims: Sequence[Claim]) -> None:
        if not self._keeper.let_begin(claims[0]):
            return
        try:
            jobs = jobs_of(claims)
            enter_coroutine()
            outcomes = await run_batch_async(task, jobs, decode_args_async, self._worker)
        except BaseException as error:
            outcomes = [internal_error(claim, error) for claim in claims]
        self._end(claims, outcomes)

    def _work(self, claims: Sequence[Claim], call: Callable[[], list[str]]) -> Callable[[], None]:
        """Call the handler, in a thread; return what the loop is to call then."""
        if self._keeper.is_too_late(claims[0]):
            return functools.partial(self._keeper.give_back_unbegun, claims[0])
        try:
            outcomes = call()
        except JobTimeout as error:
            # Raised outside of the handler, before or after it.
            outcomes = [outcome_of(c.job, c.failure_policy, error) for c in claims]
        except BaseException as error:
            outcomes = [internal_error(claim, error) for claim in claims]
        return functools.partial(self._end, claims, outcomes)

    def _end(self, claims: Sequence[Claim], outcomes: Sequence[str]) -> None:
        for claim, outcome in zip(claims, outcomes, strict=True):
            self._keeper.end(claim, outcome)

    def abort(self, claim: Claim, reason: str) -> None:
        """Cancel a coroutine if all its jobs are told to end."""
        first = claim.members[0]
        if first.coroutine is not None and are_told(claim.members):
            # A coroutine that has not begun ends without a result.
            first.coroutine.add_done_callback(functools.partial(self._never_began, first))
            first.coroutine.cancel(reason)

    def _never_began(self, first: Claim, coroutine: asyncio.Task[None]) -> None:
        if first.coroutine is coroutine:
            error = asyncio.CancelledError()
            claims = first.members
            self._end(claims, [outcome_of(c.job, c.failure_policy, error) for c in claims])

    def interrupt(self, claim: Claim) -> None:
        """Raise JobTimeout in a function's thread if all its jobs are told to end."""
        if are_told(claim.members):
            self._thread_runner.interrupt(claim.members[0])


def jobs_of(claims: Iterable[Claim]) -> list[BatchJob[Any]]:
    """Return the jobs of a batch's claims."""
    return [claim.job for claim in claims if isinstance(claim.job, BatchJob)]


def are_told(claims: Iterable[Claim]) -> bool:
    """Whether all these jobs are told to end."""
    return all(claim.job.should_abort() for claim in claims)


def _decode(loop: asyncio.AbstractEventLoop, job: JobContext) -> dict[str, Any]:
    """Return a job's arguments, in a thread; the worker's loop awaits asynchronous codecs."""
    codec = job.client.codec
    if codec.how(job._stored) == "async":
        decoding = asyncio.run_coroutine_threadsafe(codec.decode_stored_async(job._stored), loop)
        decoded: dict[str, Any] = decoding.result()
        return decoded
    return decode_args(job)

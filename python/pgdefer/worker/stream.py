"""Jobs for a loop of your own: `app.stream_jobs()`.

A worker runs in a thread. It does not call handlers, but puts each job into a queue. It also takes
care of connections, heartbeats, batches and reconnecting.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from pgdefer.database.own_threads import in_own_thread
from pgdefer.errors import PgDeferError
from pgdefer.tasks.context import JobContext, RetryLater, enter_job, leave_job
from pgdefer.tasks.handling import RETRY_POLICY_ONLY, Decision
from pgdefer.tasks.raised import suspension
from pgdefer.tasks.registry import Registry
from pgdefer.worker import outcomes
from pgdefer.worker.claim import Claim
from pgdefer.worker.ending import outcome_of, success
from pgdefer.worker.handler import middleware
from pgdefer.worker.options import WorkerOptions
from pgdefer.worker.stream_runner import StreamRunner, reader
from pgdefer.worker.worker import Worker

__all__ = ["ClaimedJob", "JobStream"]


class ClaimedJob(JobContext):
    """A job of a stream: a `JobContext` with the arguments in `args`, and methods that end it.

    Within its `with` block it is `current_job()`, inside the app's middleware. When the block is
    left, the job ends, unless it was ended before: as succeeded, or as failed by an exception,
    which is swallowed. A raised RetryLater lets it run again later. If the program itself must end
    (KeyboardInterrupt, a cancelled coroutine), the job is given back and the exception propagates,
    as does any exception after the job has ended. If middleware raises when it is entered, the job
    ends in the same way, and the exception propagates.

    The stream reports an end at once, but does not wait for the answer: if the report comes too
    late, or is refused because the claim was lost, this is logged. A job that is garbage-collected
    before it has ended fails.
    """

    __slots__ = ("__weakref__", "_claim", "_dropped", "_inside", "_runner", "args")

    args: dict[str, Any]

    def __init__(self, claim: Claim, args: dict[str, Any], runner: StreamRunner) -> None:
        super().__init__(claim.job.client, claim.job._row)
        self.steps = claim.job.steps
        self.args = args
        # The worker's record of the job, which also says whether to abort.
        self._claim = claim
        self._runner = runner
        # Alive until it has ended.
        self._dropped = weakref.finalize(self, runner.drop, claim)
        self._dropped.atexit = False
        self._inside = contextlib.ExitStack()

    def should_abort(self) -> bool:
        """Whether the job was cancelled, timed out, or lost."""
        return self._claim.job.should_abort()

    def check_abort(self) -> None:
        """Raise JobAborted if `should_abort` is true."""
        self._claim.job.check_abort()

    def succeed(self, result: object = None) -> None:
        """End the job as succeeded. If the result can't be stored, a note of that replaces it."""
        if isinstance(result, RetryLater):
            raise TypeError("a RetryLater is no result: pass it to retry_later")
        self._end(success(self._claim.job, RETRY_POLICY_ONLY, result))

    def fail(self, error: str | BaseException, decision: Decision | None = None) -> None:
        """End the job as failed; the retry policy, or the decision, says what follows.

        A text is stored as it is, an exception by its type and message. Raises TypeError for
        anything else.
        """
        said = error if isinstance(error, str) else None
        if isinstance(error, str):
            error = PgDeferError(error)
        elif not isinstance(error, BaseException):
            raise TypeError(f"error must be a text or an exception, not {error!r}")
        if not isinstance(decision, Decision | None):
            raise TypeError(f"decision must be a Decision(...) or None, not {decision!r}")
        options = None if decision is None else decision.as_options()
        self._claim.job._error = error
        outcome = outcomes.failed(self.id, self.claim, error, options, said)
        self._end(outcomes.with_steps(outcome, self.steps.take_kept()))

    def retry_later(self, asked: RetryLater) -> None:
        """Let the job run again later. This is not a failure."""
        if not isinstance(asked, RetryLater):
            raise TypeError(f"asked must be a RetryLater, not {asked!r}")
        self._end(success(self._claim.job, RETRY_POLICY_ONLY, asked))

    def release(self) -> None:
        """Give the job back as if it had never been claimed."""
        outcome = outcomes.released(self.id, self.claim)
        self._end(outcomes.with_steps(outcome, self.steps.take_kept()))

    def __enter__(self) -> Self:
        if not self._dropped.alive:
            raise PgDeferError(f"job {self.id} was ended before")
        token = enter_job(self)
        self._inside.callback(leave_job, token)
        try:
            self._inside.enter_context(middleware(self, self.client.middleware))
        except BaseException as error:
            self._inside.close()
            self._end_by(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            if isinstance(error, RetryLater):
                self._inside.close()  # it is no error
            elif self._inside.__exit__(kind, error, trace):
                error = None
        except BaseException as other:
            if self._end_by(other):
                return True
            raise
        return self._end_by(error)

    def _end_by(self, error: BaseException | None) -> bool:
        """End it according to an exception or None; return whether to swallow the exception."""
        if not self._dropped.alive:
            return error is None
        if self.steps.ended_as is not None:
            self._end(outcomes.Settled(*self.steps.ended_as))
            return error is None or suspension(error, self.steps) is not None
        if error is None:
            self.succeed()
        elif isinstance(error, Exception):
            self._end(outcome_of(self._claim.job, RETRY_POLICY_ONLY, error))
        else:
            self.release()
            return False
        return True

    def _end(self, outcome: str | outcomes.Settled) -> None:
        if not self._dropped.detach():
            raise PgDeferError(f"job {self.id} was ended before")
        self._runner.finish(self._claim, outcome)


class JobStream:
    """Jobs one after another: `with app.stream_jobs(...) as jobs:`, then `for job in jobs:`.

    Both may be `async`. The stream ends when a worker would, as with `drain`; otherwise never. If
    an error ends the worker for good, such as missing rights, the loop raises it. PgDeferError is
    raised outside of the block, in another event loop than that of `async with`, by a second block,
    and if a reader asks for the next job of a stream of one at a time before it has ended the last
    one.

    Leaving the block gives back the jobs that were not handed out. Jobs that were handed out and
    have not ended fail. But if the program itself must end (KeyboardInterrupt, a cancelled
    coroutine), those are given back too, and the stream waits only a moment.
    """

    def __init__(
        self, app: Registry, queues: Sequence[str] | None, **options: Unpack[WorkerOptions]
    ) -> None:
        if not options.keys() & {"concurrency", "slots"}:
            options["concurrency"] = 1
        self._worker = Worker(app, queues, **options)
        self._runner = StreamRunner(self._worker.executor, self._give)
        self._worker.only_runner = self._runner
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_started = threading.Event()
        self._is_closed = False
        self._error: BaseException | None = None
        #: Jobs to hand out; None, repeated for each reader: there will be no more.
        self._waiting: queue.SimpleQueue[_Claimed | None] = queue.SimpleQueue()
        self._news: asyncio.Event | None = None
        self._wake: Callable[[], object] = _nobody
        self._caller: asyncio.AbstractEventLoop | None = None

    # In the caller's threads

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise PgDeferError("a stream can be used once", hint="Make another.")
        self._worker.app.client.check_worker()
        self._thread = threading.Thread(target=self._run, name="pgdefer-stream", daemon=True)
        self._thread.start()
        self._is_started.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind)
        if self._thread is not None:
            self._thread.join()

    def __iter__(self) -> Iterator[ClaimedJob]:
        while True:
            self._check(None)
            jobs = self._taken(self._waiting.get())
            if jobs is None:
                return
            while jobs:
                yield jobs.pop()  # keeps no job alive that the reader has dropped

    async def __aenter__(self) -> Self:
        self._caller = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._wake = functools.partial(self._caller.call_soon_threadsafe, self._news.set)
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind)
        if self._thread is not None:
            await in_own_thread(self._thread.join)

    async def __aiter__(self) -> AsyncIterator[ClaimedJob]:
        while True:
            self._check(asyncio.get_running_loop())
            try:
                claimed = self._waiting.get_nowait()
            except queue.Empty:
                assert self._news is not None
                self._news.clear()
                await self._news.wait()
                continue
            jobs = self._taken(claimed)
            if jobs is None:
                return
            while jobs:
                yield jobs.pop()

    def _check(self, caller: asyncio.AbstractEventLoop | None) -> None:
        """Raise an error if waiting would take forever."""
        if self._thread is None or caller is not self._caller:
            raise PgDeferError(
                "the stream is not open here",
                hint="Read it with `for` in a `with` block, `async for` in `async with`.",
            )
        if self._worker.concurrency == 1 and reader() in self._runner.handed_out.values():
            raise PgDeferError(
                "the last job has not ended",
                hint="End each before you ask for the next, as `with job:` does.",
            )

    def _taken(self, claimed: _Claimed | None) -> list[ClaimedJob] | None:
        """Return the next job, or nothing if it should no longer run; None if there are no more.

        Raises the error that ended the worker.
        """
        if claimed is None:
            self._waiting.put(None)  # for the other readers
            self._wake()
            if self._error is not None:
                raise self._error
            return None
        claim, args = claimed
        return [ClaimedJob(claim, args, self._runner)] if self._runner.hand_out(claim) else []

    def _leave(self, kind: type[BaseException] | None) -> None:
        is_over = kind is not None and not issubclass(kind, Exception)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the worker has ended
                self._loop.call_soon_threadsafe(self._close, is_over)

    # In the worker's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._run_async())
        except BaseException as error:
            self._error = error
        self._is_started.set()
        self._offer(None)

    async def _run_async(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_started.set()
        await self._worker.run_async()

    def _give(self, claim: Claim, args: dict[str, Any]) -> None:
        if self._is_closed:
            self._worker.executor.give_back(claim)
        else:
            self._offer((claim, args))

    def _offer(self, claimed: _Claimed | None) -> None:
        self._waiting.put(claimed)
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._wake()

    def _close(self, is_over: bool) -> None:
        self._is_closed = True
        # Ends from other threads that came before go first.
        asyncio.get_running_loop().call_soon(self._end_all, is_over)

    def _end_all(self, is_over: bool) -> None:
        self._runner.end_all(is_over=is_over)
        if is_over:
            self._worker.stop_at_once()
        else:
            self._worker.stop()


_Claimed = tuple[Claim, dict[str, Any]]


def _nobody() -> None:
    """Wake nobody: the reader blocks in its thread."""

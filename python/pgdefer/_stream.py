"""Jobs for a loop of your own: `app.stream_jobs()`.

A worker runs in a thread, and puts each job into a queue where others would call its handler.
Connections, heartbeats, batches and reconnecting are the worker's.
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
from typing import TYPE_CHECKING, Any, Self, Unpack

from . import _outcome
from ._attempt import decoded_async, failed, middleware, outcome_of, success
from ._context import JobContext, RetryLater, _current
from ._errors import PgDeferError
from ._handling import Decision, Handling
from ._worker import Worker, WorkerOptions

if TYPE_CHECKING:
    from ._app import App

__all__ = ["ClaimedJob", "JobStream"]

# No task of ours says anything of errors: the retry policy decides.
_HANDLING = Handling()


class ClaimedJob(JobContext):
    """A job in your hands: what a `JobContext` says, the arguments as `args`, and how to end it.

    As a context it is `current_job()`, within the app's middleware, and ends when left: succeeded,
    unless it was ended before; an exception fails it, and goes no further. RetryLater, raised,
    yields. Where the program itself is to end (KeyboardInterrupt, a cancelled coroutine) it is
    given back, and the exception goes on, as does any once the job has ended.

    An end is reported by the stream, at once but without waiting: what then is refused, as the
    claim was lost, is logged. A job that nobody holds any more, and that has not ended, fails.
    """

    __slots__ = ("__weakref__", "_claim", "_dropped", "_finish", "_inside", "args")

    def __init__(self, claim: JobContext, args: dict[str, Any], giver: _Giver) -> None:
        super().__init__(claim.app, claim._row)
        self.args = args
        # What the worker knows it as, and where it hears that it is to abort.
        self._claim = claim
        self._finish = giver.finish
        self._dropped = weakref.finalize(self, giver.drop, claim)
        self._dropped.atexit = False
        self._inside = contextlib.ExitStack()

    def should_abort(self) -> bool:
        """Whether the job was cancelled, timed out, or lost."""
        return self._claim.should_abort()

    def check_abort(self) -> None:
        """Raise JobAborted where `should_abort` is true."""
        self._claim.check_abort()

    def succeed(self, result: object = None) -> None:
        """End it as succeeded. A result that can't be stored is replaced by a note of that."""
        self._end(success(self, _HANDLING, result))

    def fail(self, error: str | BaseException, decision: Decision | None = None) -> None:
        """End it as failed: what becomes of it, its retry policy says, or the decision."""
        if not isinstance(error, BaseException):
            error = PgDeferError(error)
        options = None if decision is None else decision.to_json()
        self._end(_outcome.failed(self.id, self.claim, error, options))

    def retry_later(self, asked: RetryLater) -> None:
        """Have it called again later, which is no failure."""
        self._end(success(self, _HANDLING, asked))

    def release(self) -> None:
        """Give it back, as if never claimed."""
        self._end(_outcome.released(self.id, self.claim))

    def __enter__(self) -> Self:
        token = _current.set(self)
        self._inside.callback(_current.reset, token)
        try:
            self._inside.enter_context(middleware(self))
        except BaseException as error:
            self._inside.close()
            self._end(outcome_of(self._claim, _HANDLING, error))
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            if self._inside.__exit__(kind, error, trace):
                error = None
        except BaseException as other:
            if self._end_by(other):
                return True
            raise
        return self._end_by(error)

    def _end_by(self, error: BaseException | None) -> bool:
        """End it as an exception says, None for none, and return whether that goes no further."""
        if not self._dropped.alive:
            return error is None
        if error is None:
            self.succeed()
        elif isinstance(error, Exception):
            self._end(outcome_of(self._claim, _HANDLING, error))
        else:
            self.release()
            return False
        return True

    def _end(self, outcome: str) -> None:
        self._dropped.detach()
        self._finish(self._claim, outcome)


class JobStream:
    """Jobs one after another: `with app.stream_jobs(...) as jobs:`, then `for job in jobs:`.

    Or both with `async`. It ends where a worker would, as with `drain`; else never. What ends the
    worker for good, such as missing rights, is raised by the loop.

    Leaving the block gives back what was claimed and not handed out; what was handed out and has
    not ended fails.
    """

    def __init__(
        self, app: App, queues: Sequence[str] | None, **options: Unpack[WorkerOptions]
    ) -> None:
        if not options.keys() & {"concurrency", "slots"}:
            options["concurrency"] = 1
        self._worker = _Giver(app, queues, self._give, **options)
        self._thread = threading.Thread(target=self._run, name="pgdefer-stream", daemon=True)
        self._is_started = threading.Event()
        self._is_closed = False
        self._error: BaseException | None = None
        #: What waits to be handed out; None, and again for each that asks: there will be no more.
        self._waiting: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()
        self._wake: Callable[[], object] = _nobody

    # In the caller's thread, or threads

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._call_soon(self._close)
        self._thread.join()

    def __iter__(self) -> Iterator[ClaimedJob]:
        while True:
            self._check()
            given = self._waiting.get()
            if given is None:
                self._end()
                return
            yield self._worker.hand_out(*given)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._wake = functools.partial(loop.call_soon_threadsafe, self._news.set)
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self._call_soon(self._close)
        await asyncio.to_thread(self._thread.join)

    async def __aiter__(self) -> AsyncIterator[ClaimedJob]:
        while True:
            self._check()
            try:
                given = self._waiting.get_nowait()
            except queue.Empty:
                self._news.clear()
                await self._news.wait()
                continue
            if given is None:
                self._end()
                return
            yield self._worker.hand_out(*given)

    def _check(self) -> None:
        """Raise where waiting would be for ever."""
        if self._worker.concurrency == 1 and self._worker.handed_out:
            raise PgDeferError(
                "the last job has not ended",
                hint="End each before you ask for the next, as `with job:` does.",
            )

    def _end(self) -> None:
        """Let the others that ask end, too, and raise what the worker ended with."""
        self._waiting.put(None)
        self._wake()
        if self._error is not None:
            raise self._error

    def _call_soon(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the worker has ended
            self._loop.call_soon_threadsafe(function)

    # In the worker's

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

    def _give(self, claim: JobContext, args: dict[str, Any]) -> None:
        if self._is_closed:
            self._worker.give_back(claim)
        else:
            self._offer((claim, args))

    def _offer(self, given: _Given | None) -> None:
        self._waiting.put(given)
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._wake()

    def _close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while (given := self._waiting.get_nowait()) is not None:
                self._worker.give_back(given[0])
        for claim in list(self._worker.handed_out):
            self._worker.fail(claim, "it was left without an outcome")
        self._worker.stop()


_Given = tuple[JobContext, dict[str, Any]]


class _Giver(Worker):
    """A worker that gives its jobs to somebody else to run."""

    def __init__(
        self,
        app: App,
        queues: Sequence[str] | None,
        give: Callable[[JobContext, dict[str, Any]], None],
        **options: Unpack[WorkerOptions],
    ) -> None:
        super().__init__(app, queues, **options)
        self._give = give
        #: What somebody has, and has not ended.
        self.handed_out: set[JobContext] = set()

    # From any thread

    def hand_out(self, claim: JobContext, args: dict[str, Any]) -> ClaimedJob:
        """Return a job for somebody to run and end."""
        self.handed_out.add(claim)
        return ClaimedJob(claim, args, self)

    def finish(self, claim: JobContext, outcome: str) -> None:
        """Take in how a job has ended. Raises PgDeferError where it had ended before."""
        try:
            self.handed_out.remove(claim)
        except KeyError:
            raise PgDeferError(f"job {claim.id} was ended before") from None
        with contextlib.suppress(RuntimeError):  # the worker has ended, and given back what it had
            self._loop.call_soon_threadsafe(self._ended, claim, outcome)

    def drop(self, claim: JobContext) -> None:
        """Take note that nobody has the job any more. Called wherever Python collects garbage."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.fail, claim, "it was dropped without an outcome")

    # In the worker's

    def fail(self, claim: JobContext, why: str) -> None:
        """End a job that was handed out, if it has not ended."""
        if claim in self.handed_out:
            self.finish(claim, failed(claim, _HANDLING, PgDeferError(why)))

    def give_back(self, claim: JobContext) -> None:
        """End a job that was not handed out."""
        self._ended(claim, _outcome.released(claim.id, claim.claim))

    def _start(self, job: JobContext) -> None:
        self._begin(job)
        self._spawn(self._prepare(job))

    async def _prepare(self, job: JobContext) -> None:
        try:
            args = await decoded_async(job)
        except Exception as error:
            self._ended(job, failed(job, None, error))
            return
        if not job._is_released:
            self._give(job, args)


def _nobody() -> None:
    """Wake nobody: who asks is blocked in its thread."""

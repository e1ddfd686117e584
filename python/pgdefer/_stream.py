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
from ._context import JobAborted, JobContext, RetryLater, _current
from ._errors import PgDeferError
from ._handling import Decision, Handling
from ._text import logger
from ._worker import Worker, WorkerOptions

if TYPE_CHECKING:
    from ._app import App

__all__ = ["ClaimedJob", "JobStream"]

log = logger("pgdefer.worker")

# No task of ours says anything of errors: the retry policy decides.
_HANDLING = Handling()


class ClaimedJob(JobContext):
    """A job in your hands: what a `JobContext` says, the arguments as `args`, and how to end it.

    As a context it is `current_job()`, within the app's middleware, and ends when left: succeeded,
    unless it was ended before; an exception fails it, and goes no further. RetryLater, raised,
    yields. Where the program itself is to end (KeyboardInterrupt, a cancelled coroutine) it is
    given back, and the exception goes on, as does any once the job has ended. What a middleware
    raises when it is entered ends the job likewise, and goes on.

    An end is reported by the stream, at once but without waiting: what comes too late, or is
    refused as the claim was lost, is logged. A job that nobody holds any more, and that has not
    ended, fails.
    """

    __slots__ = ("__weakref__", "_claim", "_dropped", "_giver", "_inside", "args")

    def __init__(self, claim: JobContext, args: dict[str, Any], giver: _Giver) -> None:
        super().__init__(claim.app, claim._row)
        self.args = args
        # What the worker knows it as, and where it hears that it is to abort.
        self._claim = claim
        self._giver = giver
        # Alive until it has ended.
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
        if isinstance(result, RetryLater):
            raise TypeError("a RetryLater is for retry_later")
        self._end(success(self._claim, _HANDLING, result))

    def fail(self, error: str | BaseException, decision: Decision | None = None) -> None:
        """End it as failed: what becomes of it, its retry policy says, or the decision."""
        if isinstance(error, str):
            error = PgDeferError(error)
        elif not isinstance(error, BaseException):
            raise TypeError(f"error must be a text or an exception, not {error!r}")
        options = None if decision is None else decision.to_json()
        self._end(_outcome.failed(self.id, self.claim, error, options))

    def retry_later(self, asked: RetryLater) -> None:
        """Have it called again later, which is no failure."""
        if not isinstance(asked, RetryLater):
            raise TypeError(f"asked must be a RetryLater, not {asked!r}")
        self._end(success(self._claim, _HANDLING, asked))

    def release(self) -> None:
        """Give it back, as if never claimed."""
        self._end(_outcome.released(self.id, self.claim))

    def __enter__(self) -> Self:
        if not self._dropped.alive:
            raise PgDeferError(f"job {self.id} was ended before")
        token = _current.set(self)
        self._inside.callback(_current.reset, token)
        try:
            self._inside.enter_context(middleware(self))
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
        if not self._dropped.detach():
            raise PgDeferError(f"job {self.id} was ended before")
        self._giver.finish(self._claim, outcome)


class JobStream:
    """Jobs one after another: `with app.stream_jobs(...) as jobs:`, then `for job in jobs:`.

    Or both with `async`. It ends where a worker would, as with `drain`; else never. What ends the
    worker for good, such as missing rights, is raised by the loop. PgDeferError is raised outside
    of the block, in another event loop than that of `async with`, by a second block, and where the
    reader that asks for the next job of a stream of one at a time has yet to end the last.

    Leaving the block gives back what was claimed and not handed out. What was handed out and has
    not ended fails; but where the program itself is to end (KeyboardInterrupt, a cancelled
    coroutine) it is given back, too, and nothing is waited for longer than a moment.
    """

    def __init__(
        self, app: App, queues: Sequence[str] | None, **options: Unpack[WorkerOptions]
    ) -> None:
        if not options.keys() & {"concurrency", "slots"}:
            options["concurrency"] = 1
        self._worker = _Giver(app, queues, self._give, **options)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_started = threading.Event()
        self._is_closed = False
        self._error: BaseException | None = None
        #: What waits to be handed out; None, and again for each that asks: there will be no more.
        self._waiting: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()
        self._news: asyncio.Event | None = None
        self._wake: Callable[[], object] = _nobody
        self._caller: asyncio.AbstractEventLoop | None = None

    # In the caller's thread, or threads

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise PgDeferError("a stream can be used once", hint="Make another.")
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
            yield from jobs

    async def __aenter__(self) -> Self:
        self._caller = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._wake = functools.partial(self._caller.call_soon_threadsafe, self._news.set)
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def __aiter__(self) -> AsyncIterator[ClaimedJob]:
        while True:
            self._check(asyncio.get_running_loop())
            try:
                given = self._waiting.get_nowait()
            except queue.Empty:
                assert self._news is not None
                self._news.clear()
                await self._news.wait()
                continue
            jobs = self._taken(given)
            if jobs is None:
                return
            for job in jobs:
                yield job

    def _check(self, caller: asyncio.AbstractEventLoop | None) -> None:
        """Raise where waiting would be for ever."""
        if self._thread is None or caller is not self._caller:
            raise PgDeferError(
                "the stream is not open here",
                hint="Read it with `for` in a `with` block, `async for` in `async with`.",
            )
        if self._worker.concurrency == 1 and _reader() in self._worker.handed_out.values():
            raise PgDeferError(
                "the last job has not ended",
                hint="End each before you ask for the next, as `with job:` does.",
            )

    def _taken(self, given: _Given | None) -> list[ClaimedJob] | None:
        """Return the job to hand out, none where it is no more to be run; None: there are no more.

        Raises what the worker ended with.
        """
        if given is None:
            self._waiting.put(None)  # for the others that ask
            self._wake()
            if self._error is not None:
                raise self._error
            return None
        return self._worker.hand_out(*given)

    def _leave(self, kind: type[BaseException] | None) -> None:
        is_over = kind is not None and not issubclass(kind, Exception)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the worker has ended
                self._loop.call_soon_threadsafe(self._close, is_over)

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
            self._worker._give_back(claim)
        else:
            self._offer((claim, args))

    def _offer(self, given: _Given | None) -> None:
        self._waiting.put(given)
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed
            self._wake()

    def _close(self, is_over: bool) -> None:
        self._is_closed = True
        # What other threads have ended before comes first.
        asyncio.get_running_loop().call_soon(self._worker.end_all, is_over)


_Given = tuple[JobContext, dict[str, Any]]


class _Giver(Worker):
    """A worker that gives its jobs to somebody else to run.

    What runs, and has yet to end, is what the worker says in its own thread; `handed_out` only
    tells which of it somebody has.
    """

    def __init__(
        self,
        app: App,
        queues: Sequence[str] | None,
        give: Callable[[JobContext, dict[str, Any]], None],
        **options: Unpack[WorkerOptions],
    ) -> None:
        super().__init__(app, queues, **options)
        self._give = give
        #: What somebody has, and which thread or coroutine that is; None: its end is on its way.
        self.handed_out: dict[JobContext, object] = {}

    # From any thread

    def hand_out(self, claim: JobContext, args: dict[str, Any]) -> list[ClaimedJob]:
        """Return a job for somebody to run and end; none where it was given back, or aborted."""
        if claim._is_released:
            return []
        if claim.should_abort():
            self.finish(claim, outcome_of(claim, _HANDLING, JobAborted(str(claim._abort))))
            return []
        self.handed_out[claim] = _reader()
        return [ClaimedJob(claim, args, self)]

    def finish(self, claim: JobContext, outcome: str) -> None:
        """Take in how a job has ended."""
        self.handed_out[claim] = None
        try:
            self._loop.call_soon_threadsafe(self._take_end, claim, outcome)
        except RuntimeError:
            log.warning("%r: its end comes too late, the worker has ended", claim)

    def drop(self, claim: JobContext) -> None:
        """Take note that nobody has the job any more. Called wherever Python collects garbage."""
        self.handed_out[claim] = None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fail, claim, "it was dropped without an outcome")

    # In the worker's

    def end_all(self, is_over: bool) -> None:
        """End what nobody will end any more, and stop."""
        for claim in list(self._running):
            reader = self.handed_out.get(claim, self)
            if reader is self or (is_over and reader is not None):
                self._give_back(claim)
            elif reader is not None:
                self._fail(claim, "it was left without an outcome")
        if is_over:
            self.stop_at_once()
        else:
            self.stop()

    def _fail(self, claim: JobContext, why: str) -> None:
        self.handed_out.pop(claim, None)
        if claim in self._running:
            self._ended(claim, failed(claim, _HANDLING, PgDeferError(why)))

    def _take_end(self, claim: JobContext, outcome: str) -> None:
        self.handed_out.pop(claim, None)
        if claim in self._running:
            self._ended(claim, outcome)
        else:
            log.warning("%r: its end comes too late, it was given back or has failed", claim)

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


def _reader() -> object:
    """Return who asks for a job: a coroutine's task, or a thread."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return threading.get_ident()


def _nobody() -> None:
    """Wake nobody: who asks is blocked in its thread."""

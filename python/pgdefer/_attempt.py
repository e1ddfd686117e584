"""Running a handler, and what its end means: the same in the event loop, a thread and a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import types
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import psycopg
from psycopg.rows import tuple_row

from . import _memory, _outcome, _sql
from ._connect import AsyncPool, SyncPool
from ._context import JobAborted, JobContext, JobTimeout, RetryLater, _current
from ._errors import TransactionLost, describe, is_transient
from ._execute import AnyAsyncConnection, AnyConnection, execute, execute_async
from ._link import Backoff, watch
from ._text import logger

if TYPE_CHECKING:
    from ._context import Middleware
    from ._handling import Handling
    from ._task import Task

__all__ = [
    "STOPPED",
    "TIMED_OUT",
    "decoded_async",
    "failed",
    "middleware",
    "outcome_of",
    "run",
    "run_async",
    "success",
]

log = logger("pgdefer.worker")

STOPPED = "the worker stops"
TIMED_OUT = "timed out"
# What a call of a function returns whose code has not been run.
UNRUN = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)

Call = tuple[list[Any], dict[str, Any]]


def run(job: JobContext, task: Task[..., Any], pool: SyncPool, call: Call | None) -> str | None:
    """Run a function; return the outcome, or None where it has been written already.

    `call` is how, where the arguments have been decoded already.
    """
    _current.set(job)
    try:
        given, named = call or task.parameters.unbind(_decoded(job, task))
        result: object = None
        with _memory.limited(task.handling.max_memory), middleware(job):
            if task.handling.transactional:
                return _in_transaction(job, task, pool, given, named)
            result = _called(task, given, named)
    except BaseException as error:
        return outcome_of(job, task.handling, error)
    return success(job, task.handling, result)


async def run_async(job: JobContext, task: Task[..., Any], pool: AsyncPool) -> str | Call | None:
    """As `run`, for coroutines; of a function that is none return how to call it."""
    _current.set(job)
    try:
        args = await decoded_async(job)
        given, named = task.parameters.unbind(args)
        if not task.is_async:
            return given, named
        result: object = None
        with middleware(job):
            if task.handling.transactional:
                return await _in_transaction_async(job, task, pool, given, named)
            result = await _called_async(task, given, named)
    except BaseException as error:
        return outcome_of(job, task.handling, error)
    return success(job, task.handling, result)


def _decoded(job: JobContext, task: Task[..., Any]) -> dict[str, Any]:
    codec = task.app.codec
    args: dict[str, Any]
    if codec.how(job._stored) == "async":  # in a process, which has no event loop
        args = asyncio.run(codec.decode_stored_async(job._stored))
    else:
        args = codec.decode_stored(job._stored)
    return args


async def decoded_async(job: JobContext) -> dict[str, Any]:
    """Return a job's arguments: decoded in a thread, or awaited, where they are of own types."""
    codec = job.app.codec
    how = codec.how(job._stored)
    args: dict[str, Any]
    if how == "plain":
        args = codec.decode_stored(job._stored)
    elif how == "thread":
        args = await asyncio.to_thread(codec.decode_stored, job._stored)
    else:
        args = await codec.decode_stored_async(job._stored)
    return args


def _called(task: Task[..., Any], given: list[Any], named: dict[str, Any]) -> object:
    """Return what a handler returned, or the RetryLater that it raised."""
    try:
        return _ran(task.function(*given, **named))
    except RetryLater as asked:
        return asked


async def _called_async(task: Task[..., Any], given: list[Any], named: dict[str, Any]) -> object:
    """As `_called`, for coroutines."""
    try:
        return _ran(await task.function(*given, **named))
    except RetryLater as asked:
        return asked


def middleware(job: JobContext) -> contextlib.AbstractContextManager[object]:
    """Return what the app has around its handlers, entered in the order given."""
    return _entered(job, job.app.middleware) if job.app.middleware else _NOTHING


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _entered(job: JobContext, middleware: Iterable[Middleware]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for surround in middleware:
            stack.enter_context(surround(job))
        yield


# Outcomes


def success(job: JobContext, handling: Handling, result: object) -> str:
    """Return the outcome of a handler that returned."""
    if job._abort == TIMED_OUT:
        return _timed_out(job, handling, None)
    if isinstance(result, RetryLater):
        return _yielded(job, handling, result)
    return _outcome.succeeded(job.id, job.claim, _text(job, result))


def _text(job: JobContext, result: object) -> str | None:
    """Return a result's JSON, or that of a note that it can't be stored."""
    if result is None:
        return None
    try:
        return job.app.codec.dumps(result)
    except Exception as error:
        # What the job did stands; only whoever asks for its result must learn that there is none.
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        why = type(error).__qualname__
        log.warning("%r succeeded, but its result, a %s, can't be stored (%s)", job, kind, why)
        return _outcome.unencodable(kind)


def _ran(result: object) -> object:
    """Return what a handler returned. Raises TypeError where that has yet to be run."""
    if isinstance(result, UNRUN):
        if isinstance(result, types.CoroutineType):
            result.close()  # or Python complains that nobody awaits it
        raise TypeError(
            f"the task returned a {type(result).__name__}, whose code nobody runs: make the "
            "function, and each decorator below @app.task, an `async def` without `yield`"
        )
    return result


def _yielded(job: JobContext, handling: Handling, asked: RetryLater) -> str:
    try:
        return _outcome.retry_later(job.id, job.claim, asked)
    except Exception as error:
        return failed(job, handling, error)


def outcome_of(job: JobContext, handling: Handling | None, error: BaseException) -> str:
    """Return the outcome of a handler that raised; None: there was none."""
    if isinstance(error, TransactionLost):
        log.warning("%r: %s", job, error)
        return _outcome.crashed(job.id, job.claim, error)
    if job._abort == TIMED_OUT:
        return _timed_out(job, handling, error)
    if isinstance(error, RetryLater) and handling is not None:
        return _yielded(job, handling, error)
    if isinstance(error, asyncio.CancelledError | JobAborted | JobTimeout):
        if job._abort == STOPPED:
            return _outcome.released(job.id, job.claim)
        if job._abort is not None:
            log.info("%r was aborted: %s", job, job._abort)
            cause = JobAborted(job._abort).with_traceback(error.__traceback__)
            return _outcome.aborted(job.id, job.claim, cause)
        if isinstance(error, JobAborted):
            log.info("%r gave up: %s", job, error)
            return _outcome.aborted(job.id, job.claim, error)
    return failed(job, handling, error)


def _timed_out(job: JobContext, handling: Handling | None, error: BaseException | None) -> str:
    """Return the outcome of a handler that ended after its timeout, however it did."""
    late = TimeoutError(f"not done within {job.timeout}")
    if isinstance(error, asyncio.CancelledError | JobAborted | JobTimeout):
        late = late.with_traceback(error.__traceback__)
    else:
        late.__cause__ = error
    return failed(job, handling, late, "timed_out")


def failed(
    job: JobContext,
    handling: Handling | None,
    error: BaseException,
    outcome: str | None = None,
) -> str:
    """Return the outcome of a failure: an error, and what the task says of such errors."""
    said = _outcome.headline(error)
    log.warning("%r failed: %s", job, said, exc_info=error if error.__traceback__ else None)
    options: dict[str, Any] = {"retryable": False}
    if handling is not None:
        try:
            options = handling.decision(error, job)
            json.dumps(options)
        except Exception:
            log.exception("%r: what to do about its failure could not be decided", job)
            options = {}
    if outcome is not None:
        options["outcome"] = outcome
    return _outcome.failed(job.id, job.claim, error, options)


# Transactions, in which the outcome is written too


def _in_transaction(
    job: JobContext, task: Task[..., Any], pool: SyncPool, given: list[Any], named: dict[str, Any]
) -> str | None:
    with _transaction(job, task.handling.transactional, pool) as (connection, ours):
        result = _called(task, [connection, *given], named)
        if isinstance(connection, _Flushes):
            connection.flush()
        ending = _ending(job, result)
        ours.begin(_driver(connection))
        execute(connection, *ending)
    return None


async def _in_transaction_async(
    job: JobContext, task: Task[..., Any], pool: AsyncPool, given: list[Any], named: dict[str, Any]
) -> str | None:
    async with _transaction_async(job, task.handling.transactional, pool) as (connection, ours):
        result = await _called_async(task, [connection, *given], named)
        if isinstance(connection, _Flushes):
            await connection.flush()
        ending = _ending(job, result)
        ours.begin(await _driver_async(connection))
        await execute_async(connection, *ending)
    return None


def _driver(connection: Any) -> Any:
    """Return the driver's connection, of psycopg's or SQLAlchemy's."""
    if isinstance(connection, psycopg.Connection):
        return connection
    return connection.connection().connection.driver_connection


async def _driver_async(connection: Any) -> Any:
    """As `_driver`, for asyncio."""
    if isinstance(connection, psycopg.AsyncConnection):
        return connection
    return (await connection.connection()).sync_connection.connection.driver_connection


def _ending(job: JobContext, result: object) -> tuple[_sql.Statement, dict[str, Any]]:
    """Return the last statement of the handler's transaction, and its parameters.

    Raises JobTimeout where it comes too late: the transaction is rolled back.
    """
    if job._abort == TIMED_OUT:
        raise JobTimeout
    if isinstance(result, RetryLater):
        return _sql.RETRY_LATER, _outcome.yield_parameters(job.id, job.claim, result)
    text = _text(job, result)
    return _sql.SUCCEED, {"id": job.id, "claim": job.claim, "result": text}


@runtime_checkable
class _Flushes(Protocol):
    """A session, which must have sent all it knows before the last statement."""

    def flush(self) -> Any:
        """Send what is pending."""


@contextlib.contextmanager
def _transaction(
    job: JobContext, maker: Callable[[], Any] | bool, pool: SyncPool
) -> Iterator[tuple[AnyConnection, _Ours]]:
    if callable(maker):
        with _lost_told_apart() as ours, maker() as session, session.begin():
            yield session, ours
        return
    with contextlib.ExitStack() as stack:
        connection = _opened(job, stack, pool)
        with _lost_told_apart(connection) as ours:
            # another handler may have changed them
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            connection.row_factory, connection.cursor_factory = tuple_row, psycopg.Cursor
            ours.begin(connection)
            with connection.transaction():
                ours.end()
                yield connection, ours


def _opened(
    job: JobContext, stack: contextlib.ExitStack, pool: SyncPool
) -> psycopg.Connection[Any]:
    """Return a connection. Where none can be had it waits, which is no fault of the job's."""
    waits = Backoff(last=1.0)
    while True:
        try:
            return stack.enter_context(pool.connection())
        except psycopg.OperationalError as error:
            log.warning("%r waits for a connection: %s", job, error)
        time.sleep(waits.delay())
        job.check_abort()


@contextlib.asynccontextmanager
async def _transaction_async(
    job: JobContext, maker: Callable[[], Any] | bool, pool: AsyncPool
) -> AsyncIterator[tuple[AnyAsyncConnection, _Ours]]:
    if callable(maker):
        with _lost_told_apart() as ours:
            async with maker() as session, session.begin():
                yield session, ours
        return
    async with contextlib.AsyncExitStack() as stack:
        connection = await _opened_async(job, stack, pool)
        with _lost_told_apart(connection) as ours:
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            connection.row_factory, connection.cursor_factory = tuple_row, psycopg.AsyncCursor
            ours.begin(connection)
            async with connection.transaction():
                ours.end()
                yield connection, ours


async def _opened_async(
    job: JobContext, stack: contextlib.AsyncExitStack, pool: AsyncPool
) -> psycopg.AsyncConnection[Any]:
    """As `_opened`, for asyncio."""
    waits = Backoff(last=1.0)
    while True:
        try:
            return await stack.enter_async_context(pool.connection())
        except psycopg.OperationalError as error:
            log.warning("%r waits for a connection: %s", job, error)
        await asyncio.sleep(waits.delay())


class _Ours:
    """What is not the handler's of its transaction: BEGIN, the last statement and COMMIT.

    Each has a time limit, as all calls of the worker have; what fails is no fault of the job's.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._stop: Callable[[], None] = _nothing

    def begin(self, connection: Any) -> None:
        """Take note that what follows is ours, on this driver's connection."""
        self.is_on = True
        self._stop = watch.begin(connection)

    def end(self) -> None:
        """Take note that what follows is the handler's, or nothing."""
        self.is_on = False
        self._stop()


def _nothing() -> None: ...


@contextlib.contextmanager
def _lost_told_apart(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None = None,
) -> Iterator[_Ours]:
    """Raise TransactionLost where the transaction ended with its connection.

    Also where the server could not do what is ours, as on a full disk.
    """
    ours = _Ours()
    try:
        yield ours
    except Exception as error:
        if connection is None:
            is_lost = getattr(error, "connection_invalidated", False)
        else:
            is_lost = isinstance(error, psycopg.Error) and connection.closed
        if is_lost:
            raise TransactionLost("the connection was lost in the handler's transaction") from error
        if ours.is_on and is_transient(error):
            said = f"the handler's transaction could not be ended: {describe(error)}"
            raise TransactionLost(said) from error
        raise
    finally:
        ours.end()

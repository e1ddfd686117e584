"""Code around a handler: fresh connections, and a transaction that also ends the job.

Tests: contrib/test_django_handlers.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeVar

import psycopg
from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import Error, OperationalError, connections, reset_queries, transaction
from psycopg.pq import TransactionStatus

from pgdefer._text import logger
from pgdefer.contrib.django.connections import (
    close_connections,
    discard,
    end_implicit,
    is_of_test,
    leftover_connections,
    leftover_state,
    loses_writes,
    renew_connections,
)
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.database.own_threads import has_running_loop
from pgdefer.errors import PgDeferError
from pgdefer.tasks.context import JobContext, running_job
from pgdefer.worker.stream import ClaimedJob
from pgdefer.worker.transaction import LONGEST_WAIT, check_may_begin, gives_back_if_late

__all__ = ["around_job", "atomic_handler", "atomic_job", "without_connection"]

log = logger("pgdefer.worker")

T = TypeVar("T")


def around_job(job: JobContext) -> AbstractContextManager[None] | AbstractAsyncContextManager[None]:
    """Give a handler working connections, and close those that should not be kept.

    Each coroutine has its own thread for the code that Django runs in threads, as a request has;
    in a test of the queue all code uses the test's connection.
    """
    if job.client.stand_in is not None:
        return contextlib.nullcontext()
    return _OwnThread() if has_running_loop() else _fresh_connections(job)


# Whether this is within the block of another job of a batch: these have one call of the handler.
_is_inner = contextvars.ContextVar("_is_inner", default=False)


@contextlib.contextmanager
def _fresh_connections(job: JobContext) -> Iterator[None]:
    # A stream runs in a thread of the application, whose own transaction may be open.
    is_inner = _is_inner.get()
    if not (is_inner or isinstance(job, ClaimedJob)):
        _discard_left(job)
        reset_queries()  # with DEBUG, Django keeps those since a request began
    # In a batch, too: the middleware of another job may have begun one.
    others = _left()
    renew_connections()
    token = _is_inner.set(True)
    try:
        yield
        _check_none_is_lost(_lost(others))
    finally:
        _is_inner.reset(token)
        if not is_inner:
            _discard_left(job, others)
        close_connections()


def _discard_left(job: JobContext, others: Collection[str] = ()) -> None:
    """Close what a handler has left in a transaction, which would swallow all later writes."""
    for connection in leftover_connections():
        if connection.alias in others:
            continue
        end_implicit(connection)
        what = leftover_state(connection)
        if what is None:
            continue
        said = "%r: the connection to the database %r is closed, as it was left %s"
        log.warning(said, job, connection.alias, what, extra=job._log_fields())
        try:
            discard(connection)
        except Error:
            log.debug("a connection could not be closed", exc_info=True)


def _left() -> frozenset[str]:
    """Return the databases on which this thread has a transaction."""
    return frozenset(connection.alias for connection in leftover_connections())


def _lost(others: Collection[str] = ()) -> list[str]:
    """Return the databases on which this thread has a transaction that may have written."""
    lost = [
        one.alias for one in leftover_connections() if one.alias not in others and loses_writes(one)
    ]
    return sorted(lost)


def _check_none_is_lost(lost: list[str]) -> None:
    if lost:
        raise PgDeferError(
            "the handler left a transaction open on the database "
            f"{', '.join(map(repr, lost))}: it is rolled back, and may have written"
        )


# How long a coroutine's end waits for its code that still runs in its thread, in seconds.
_PATIENCE = 1.0


class _OwnThread:
    """Does the same as asgiref's ThreadSensitiveContext, and closes the thread's connections.

    All jobs of a batch have the thread of the first one, and one check of it, if no middleware of
    an earlier job has begun a transaction. A job of an asynchronous stream enters it by `with`,
    which can't wait for that check.
    """

    _is_busy = False  # whether the thread did not answer before a handler

    def __init__(self) -> None:
        # The transactions that were lost, by those that were open before the handler.
        self._found: dict[frozenset[str], list[str]] = {}

    def __enter__(self) -> None:
        self._context = ThreadSensitiveContext()
        self._token = SyncToAsync.thread_sensitive_context.set(self._context)

    def __exit__(self, *_: object) -> None:
        SyncToAsync.thread_sensitive_context.reset(self._token)
        executor = SyncToAsync.context_to_thread_executor.pop(self._context, None)
        if executor is not None:
            executor.submit(connections.close_all)
            executor.shutdown(wait=False)

    async def __aenter__(self) -> None:
        self._checked: Any = self._own_if_first()
        await self._checked.__aenter__()

    async def __aexit__(self, *error: object) -> bool | None:
        is_swallowed: bool | None = await self._checked.__aexit__(*error)
        return is_swallowed

    @contextlib.asynccontextmanager
    async def _own_if_first(self) -> AsyncIterator[None]:
        first = _first.get() or self
        with self if first is self else contextlib.nullcontext():
            token = _first.set(first)
            try:
                others: frozenset[str] | None = None  # not known
                if not first._is_busy:
                    others = await first._ask_thread(_left, frozenset[str]())
                    first._is_busy = others is None
                yield
                if others is not None:
                    if others not in first._found:
                        lost = functools.partial(_lost, others)
                        first._found[others] = await first._ask_thread(lost, []) or []
                    _check_none_is_lost(first._found[others])
            finally:
                _first.reset(token)

    async def _ask_thread(self, question: Callable[[], T], without_thread: T) -> T | None:
        """Return the thread's answer; None if it gives none in time, as it may still run code."""
        executor = SyncToAsync.context_to_thread_executor.get(self._context)
        if executor is None:
            return without_thread
        asked = asyncio.wrap_future(executor.submit(question))
        done, _ = await asyncio.wait([asked], timeout=_PATIENCE)
        if done:
            return asked.result()
        asked.cancel()
        return None


# The _OwnThread of the first job of a batch.
_first: contextvars.ContextVar[_OwnThread | None] = contextvars.ContextVar("_first", default=None)


@contextlib.contextmanager
def atomic_handler(alias: str) -> Iterator[Any]:
    """Begin the one transaction of a handler and its outcome, on Django's connection.

    In a TestCase of Django it is a savepoint of the test's transaction, or of a block within. In
    any other block it is refused, because the outcome would depend on that block's end.
    """
    connection = connections[alias]
    if connection.in_atomic_block:
        with transaction.atomic(using=alias, durable=not is_of_test(connection)):
            yield connection
        return
    _open(connection)
    if by_hand := not connection.get_autocommit():
        connection.set_autocommit(True)  # so that the block's end commits; refused in a transaction
    driver = connection.connection
    isolation, driver.isolation_level = (
        driver.isolation_level,
        psycopg.IsolationLevel.READ_COMMITTED,
    )
    try:
        with transaction.atomic(using=alias, durable=True):
            yield connection
            if connection.savepoint_ids:  # this block's end would be that of the other one
                raise PgDeferError("the handler has left a block of atomic() open")
    except Exception as error:
        if driver.closed:
            error.connection_invalidated = True  # type: ignore[attr-defined]
        raise
    finally:
        # In one that a handler has left open it can't be set; the worker closes that.
        if driver.info.transaction_status == TransactionStatus.IDLE:
            driver.isolation_level = isolation
            if by_hand:
                connection.set_autocommit(False)


@contextlib.contextmanager
def atomic_job(alias: str) -> Iterator[Any]:
    """Do as atomic_handler. What a function of `on_commit` raises can't undo the outcome."""
    is_within = connections[alias].in_atomic_block
    has_committed = threading.Event()
    if not is_within and (job := running_job()) is not None:
        with gives_back_if_late(job):
            _open(connections[alias], check_may_begin)
    try:
        with atomic_handler(alias) as connection:
            if not is_within:
                transaction.on_commit(has_committed.set, using=alias)
            yield connection
    except Exception:
        if not has_committed.is_set():
            raise
        said = "%r has ended, but then a function of on_commit() failed; any others are left out"
        job = running_job()
        log.exception(said, job, extra=None if job is None else job._log_fields())


def _open(connection: Any, check: Callable[[JobContext], None] = JobContext.check_abort) -> None:
    """Connect. If that fails it waits, because this is not the job's fault."""
    job = running_job()  # None in a thread of the handler's own
    waits = GrowingDelay(last=LONGEST_WAIT)
    while True:
        try:
            connection.ensure_connection()
        except OperationalError as error:
            log.warning("%r waits for a connection: %s", job or "a step", error)
        else:
            return
        time.sleep(waits.next())
        if job is not None:
            check(job)


def without_connection(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a form that accepts a connection; Django finds it by itself."""

    @functools.wraps(function)
    def handler(_connection: object, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    first = inspect.Parameter("_connection", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [first, *signature.parameters.values()]
    handler.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return handler

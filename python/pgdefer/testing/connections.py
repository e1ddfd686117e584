"""The test's own connection: its savepoints, and the form in which handlers get it.

Tests: integration/test_testing.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Self, TypeVar, cast

import psycopg
from psycopg.pq import TransactionStatus

from pgdefer.database import callers, sql
from pgdefer.database.callers import CallersConnection, is_sqlalchemy
from pgdefer.database.execute import execute
from pgdefer.database.execute_async import execute_async

__all__ = [
    "AsyncOverSync",
    "at_once",
    "awaited_driver_of",
    "check_in_transaction",
    "driver_of",
    "is_asynchronous",
    "savepoint",
    "unwrapped",
]

T = TypeVar("T")


def is_asynchronous(connection: CallersConnection) -> bool:
    """Whether its calls are awaited."""
    if isinstance(connection, psycopg.Connection):
        return False
    return isinstance(connection, psycopg.AsyncConnection) or is_sqlalchemy(
        connection, "AsyncConnection", "AsyncSession", "async_scoped_session"
    )


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, and return its value."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast("T", done.value)
    coroutine.close()
    raise RuntimeError("this coroutine waits for something")


def driver_of(connection: CallersConnection) -> Any:
    """Return psycopg's connection, or None if the driver is another one or must be awaited."""
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        return connection
    found: Any = connection
    if is_sqlalchemy(connection, "Session", "scoped_session"):
        found = found.connection()
    return callers.driver_of(found)


async def awaited_driver_of(connection: CallersConnection) -> Any:
    """Return psycopg's connection, as `driver_of`, also if it must be awaited."""
    found: Any = connection
    if is_sqlalchemy(connection, "AsyncSession", "async_scoped_session"):
        found = await found.connection()
    return driver_of(found)


def check_in_transaction(connection: CallersConnection) -> None:
    """Raise ValueError if the effects of a statement would not be rolled back."""
    if (
        isinstance(connection, psycopg.Connection | psycopg.AsyncConnection)
        and connection.info.transaction_status == TransactionStatus.IDLE
    ):
        raise ValueError(
            "the test's connection is in no transaction, so that nothing could be rolled back: "
            "open it without autocommit, or within `with connection.transaction(...)`"
        )


@contextlib.asynccontextmanager
async def savepoint(connection: CallersConnection, *, keep: bool = False) -> AsyncIterator[None]:
    """Roll back a block if it raises; with `keep`, only if the database requires that."""
    caught: BaseException | None = None
    async with contextlib.AsyncExitStack() as stack:
        if is_asynchronous(connection):
            other: Any = connection
            within = (
                other.transaction()
                if isinstance(connection, psycopg.AsyncConnection)
                else other.begin_nested()
            )
            await stack.enter_async_context(within)
        else:
            stack.enter_context(_nested(connection))
        try:
            yield
        except BaseException as error:
            if not keep or await _is_broken(connection):
                raise
            caught = error
    if caught is not None:
        raise caught


def _nested(connection: Any) -> contextlib.AbstractContextManager[Any]:
    if isinstance(connection, psycopg.Connection):
        return connection.transaction()
    nested: contextlib.AbstractContextManager[Any] = connection.begin_nested()
    return nested


async def _is_broken(connection: CallersConnection) -> bool:
    """Whether the transaction has failed, so that it refuses further statements."""
    driver = driver_of(connection)
    if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return driver.info.transaction_status == TransactionStatus.INERROR
    try:  # another driver's does not tell
        if is_asynchronous(connection):
            await execute_async(connection, sql.CLOCK, {})  # type: ignore[arg-type]
        else:
            execute(connection, sql.CLOCK, {})  # type: ignore[arg-type]
    except Exception:
        return True
    return False


class AsyncOverSync:
    """A synchronous psycopg connection, in the form that asynchronous `transactional` tasks need.

    Each await is complete at once. Cursors are wrapped in the same way.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if name in ("transaction", "pipeline"):
            return lambda *args, **kwargs: _AsyncBlock(found(*args, **kwargs))
        if name == "cursor":
            return lambda *args, **kwargs: AsyncOverSync(found(*args, **kwargs))
        if name in ("info", "adapters", "pgconn", "row_factory", "rowcount", "description"):
            return found
        if not callable(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            done = found(*args, **kwargs)
            return AsyncOverSync(done) if isinstance(done, psycopg.Cursor) else done

        return call

    async def __aenter__(self) -> Self:
        self._wrapped.__enter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        return self._wrapped.__exit__(*error)

    async def __aiter__(self) -> AsyncIterator[Any]:
        rows: Iterator[Any] = iter(self._wrapped)
        for row in rows:
            yield row


def unwrapped(connection: Any) -> CallersConnection:
    """Return the connection behind the asynchronous form that a handler got."""
    found: CallersConnection = getattr(connection, "_wrapped", connection)
    return found


class _AsyncBlock:
    def __init__(self, block: Any) -> None:
        self._block = block

    async def __aenter__(self) -> Any:
        return self._block.__enter__()

    async def __aexit__(self, *error: object) -> Any:
        return self._block.__exit__(*error)

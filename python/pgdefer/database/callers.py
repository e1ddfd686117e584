"""The caller's own connection or pool, from any supported library.

Tests: integration/test_defer.py, unit/test_none_as_connection.py.
"""

from __future__ import annotations

import contextlib
import enum
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from psycopg.abc import Buffer
from psycopg.adapt import Loader

from pgdefer.database.source import adapt
from pgdefer.database.sql import Statement

if TYPE_CHECKING:
    import psycopg
    import psycopg_pool
    import sqlalchemy as sa
    import sqlalchemy.ext.asyncio as sa_async
    import sqlalchemy.orm as sa_orm
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.utils.connection import ConnectionProxy

__all__ = [
    "OWN",
    "AnyAsyncConnection",
    "AnyConnection",
    "AnyPool",
    "CallersConnection",
    "Rows",
    "check_given",
    "driver_of",
    "is_django",
    "is_pool",
    "is_sqlalchemy",
    "rows_on_django",
    "rows_on_django_async",
    "unfit",
    "untaken",
]

AnyConnection: TypeAlias = Union[
    "psycopg.Connection[Any]",
    "psycopg_pool.ConnectionPool[Any]",
    "sa.Connection",
    "sa_orm.Session",
    "sa_orm.scoped_session[Any]",
    "BaseDatabaseWrapper",
    "ConnectionProxy[Any]",
]
AnyAsyncConnection: TypeAlias = Union[
    "psycopg.AsyncConnection[Any]",
    "psycopg_pool.AsyncConnectionPool[Any]",
    "sa_async.AsyncConnection",
    "sa_async.AsyncSession",
    "sa_async.async_scoped_session[Any]",
    "BaseDatabaseWrapper",
    "ConnectionProxy[Any]",
]
CallersConnection: TypeAlias = AnyConnection | AnyAsyncConnection
AnyPool: TypeAlias = Union[
    "psycopg_pool.ConnectionPool[Any]", "psycopg_pool.AsyncConnectionPool[Any]"
]

Rows = Sequence[Sequence[Any]]


class _Own(enum.Enum):
    OWN = "own"

    def __repr__(self) -> str:
        return self.name


#: The default of each parameter `connection`: one of the app's own, in a transaction of its own.
OWN: Any = _Own.OWN


def check_given(connection: CallersConnection) -> None:
    """Raise TypeError if a connection is None, as it may be before a library has connected.

    Otherwise the call would silently get a transaction of its own.
    """
    if connection is None:
        raise TypeError(
            "connection is None: pass one, or omit it for a transaction of the job's own"
        )


def _is_of(connection: object, modules: Sequence[str], names: Sequence[str]) -> bool:
    # Only if the caller has imported it: it need not be installed.
    kinds = [
        kind
        for module in modules
        if (found := sys.modules.get(module)) is not None
        for name in names
        if (kind := getattr(found, name, None)) is not None
    ]
    return isinstance(connection, tuple(kinds))


def is_sqlalchemy(connection: object, *names: str) -> bool:
    """Whether it is an instance of one of these SQLAlchemy classes."""
    return _is_of(connection, ("sqlalchemy", "sqlalchemy.orm", "sqlalchemy.ext.asyncio"), names)


def driver_of(connection: Any) -> Any:
    """Return the driver's connection behind a SQLAlchemy connection, None if it has none."""
    connection = getattr(connection, "sync_connection", connection)
    return getattr(getattr(connection, "connection", None), "driver_connection", None)


def is_django(connection: object) -> bool:
    """Whether it is Django's: `django.db.connection`, or one of `django.db.connections`."""
    modules = ("django.db.backends.base.base", "django.utils.connection")
    return _is_of(connection, modules, ("BaseDatabaseWrapper", "ConnectionProxy"))


def is_pool(connection: object, *names: str) -> bool:
    """Whether it is a pool of psycopg_pool, of one of these classes; by default of any."""
    return _is_of(connection, ("psycopg_pool",), names or ("ConnectionPool", "AsyncConnectionPool"))


@contextlib.contextmanager
def untaken(pool: Any) -> Iterator[None]:
    """Make the errors of a pool that lends no connection say what to do."""
    import psycopg_pool  # noqa: PLC0415 (optional; it is loaded, because there is a pool)

    try:
        yield
    except psycopg_pool.PoolClosed as error:
        raise psycopg_pool.PoolClosed(
            f"{error}: open it before the call, as by `with pool:`, and close it after the last"
        ) from error
    except psycopg_pool.PoolTimeout as error:
        raise psycopg_pool.PoolTimeout(
            f"{error}: no server answers, or other code holds all {pool.max_size} connections. "
            "Code that holds one should give it to the call: connection=connection"
        ) from error


class _TextJson(Loader):
    """Loads the value of a jsonb, as pgdefer's own connections do."""

    def load(self, data: Buffer) -> Any:
        return json.loads(bytes(data))


def rows_on_django(connection: Any, statement: Statement, parameters: Mapping[str, Any]) -> Rows:
    """Run a statement as Django does: Django connects if needed, and logs and counts it."""
    if getattr(connection, "vendor", None) != "postgresql":
        raise TypeError(f"the queue is in PostgreSQL, and this connection is not: {connection!r}")
    with connection.cursor() as cursor:
        # Django makes its connections load JSON as text, and refuse some times.
        adapt(cursor.adapters)
        cursor.adapters.register_loader("jsonb", _TextJson)
        cursor.execute(statement.psycopg.decode(), dict(parameters))
        rows: Rows = cursor.fetchall()
        return rows


async def rows_on_django_async(
    connection: Any, statement: Statement, parameters: Mapping[str, Any]
) -> Rows:
    """Run a statement in the thread that has Django's connection, as Django's async calls do."""
    from asgiref.sync import sync_to_async  # noqa: PLC0415 (Django's)

    run = sync_to_async(rows_on_django, thread_sensitive=True)
    return await run(connection, statement, parameters)


def unfit(connection: object) -> str:
    """Return the error message that says why a connection can't be used."""
    if is_pool(connection, "AsyncConnectionPool"):
        return (
            "this call is synchronous, and its pool is an AsyncConnectionPool: await the function "
            "whose name ends in _async, or use a ConnectionPool; an App takes one of each kind, "
            "App(connection=(pool, async_pool))"
        )
    if is_pool(connection):
        return (
            "this call is asynchronous, and its pool is a ConnectionPool, which would block the "
            "event loop: use an AsyncConnectionPool; an App takes one of each kind, "
            "App(connection=(pool, async_pool))"
        )
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    return (
        f"this call can't use a {kind}: give a connection of psycopg or Django, a pool of psycopg, "
        "or a session or connection of SQLAlchemy; asynchronous ones to functions whose names end "
        "in _async, others to others"
    )

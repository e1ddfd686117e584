"""The caller's own connection, from any supported library."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from pgdefer.database.sql import Statement

if TYPE_CHECKING:
    import psycopg
    import sqlalchemy as sa
    import sqlalchemy.ext.asyncio as sa_async
    import sqlalchemy.orm as sa_orm
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.utils.connection import ConnectionProxy

__all__ = [
    "OWN",
    "AnyAsyncConnection",
    "AnyConnection",
    "CallersConnection",
    "Rows",
    "check_given",
    "is_django",
    "is_sqlalchemy",
    "rows_on_django",
    "rows_on_django_async",
    "sqlalchemy_text",
    "unfit",
]

AnyConnection: TypeAlias = Union[
    "psycopg.Connection[Any]",
    "sa.Connection",
    "sa_orm.Session",
    "sa_orm.scoped_session[Any]",
    "BaseDatabaseWrapper",
    "ConnectionProxy[Any]",
]
AnyAsyncConnection: TypeAlias = Union[
    "psycopg.AsyncConnection[Any]",
    "sa_async.AsyncConnection",
    "sa_async.AsyncSession",
    "sa_async.async_scoped_session[Any]",
    "BaseDatabaseWrapper",
    "ConnectionProxy[Any]",
]
CallersConnection: TypeAlias = AnyConnection | AnyAsyncConnection

Rows = Sequence[Sequence[Any]]


class _Own(enum.Enum):
    OWN = "own"

    def __repr__(self) -> str:
        return self.name


#: The default of each parameter `connection`: one of the app's own, in a transaction of its own.
OWN: Any = _Own.OWN


def check_given(connection: CallersConnection) -> None:
    """Raise TypeError if a connection is None, as a library's that has not connected yet may be.

    Otherwise the call would silently have a transaction of its own.
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


def is_django(connection: object) -> bool:
    """Whether it is Django's: `django.db.connection`, or one of `django.db.connections`."""
    modules = ("django.db.backends.base.base", "django.utils.connection")
    return _is_of(connection, modules, ("BaseDatabaseWrapper", "ConnectionProxy"))


def rows_on_django(connection: Any, statement: Statement, parameters: Mapping[str, Any]) -> Rows:
    """Run a statement as Django does: Django connects if needed, and logs and counts it."""
    if getattr(connection, "vendor", None) != "postgresql":
        raise TypeError(f"the queue is in PostgreSQL, and this connection is not: {connection!r}")
    with connection.cursor() as cursor:
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


def sqlalchemy_text(statement: Statement) -> sa.TextClause:
    """Return a statement in SQLAlchemy's form."""
    import sqlalchemy  # noqa: PLC0415 (optional)

    return sqlalchemy.text(statement.text)


def unfit(connection: object) -> str:
    """Return the error that says why a connection can't be used."""
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    return (
        f"this call can't use a {kind}: give a connection of psycopg or Django, or a session or "
        "connection of SQLAlchemy; asynchronous ones to functions whose names end in _async, "
        "others to others"
    )

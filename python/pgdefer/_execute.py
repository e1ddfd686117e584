"""Running a statement on the caller's own connection, whatever library it is of."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import psycopg

from ._connect import async_cursor, cursor
from ._errors import translated
from ._sql import Statement

if TYPE_CHECKING:
    import sqlalchemy as sa
    import sqlalchemy.ext.asyncio as sa_async
    import sqlalchemy.orm as sa_orm

__all__ = ["AnyAsyncConnection", "AnyConnection", "Rows", "execute", "execute_async"]

AnyConnection: TypeAlias = Union[
    "psycopg.Connection[Any]",
    "sa.Connection",
    "sa_orm.Session",
    "sa_orm.scoped_session[Any]",
]
AnyAsyncConnection: TypeAlias = Union[
    "psycopg.AsyncConnection[Any]",
    "sa_async.AsyncConnection",
    "sa_async.AsyncSession",
    "sa_async.async_scoped_session[Any]",
]

Rows = Sequence[Sequence[Any]]


def execute(connection: AnyConnection, statement: Statement, parameters: Mapping[str, Any]) -> Rows:
    """Run a statement in the transaction that the connection is in."""
    with translated():
        if isinstance(connection, psycopg.Connection):
            return cursor(connection).execute(statement.psycopg, parameters, binary=True).fetchall()
        if _is_sqlalchemy(connection, "Connection", "Session", "scoped_session"):
            found: Rows = connection.execute(_text(statement), dict(parameters)).all()
            return found
    raise TypeError(_unfit(connection))


async def execute_async(
    connection: AnyAsyncConnection, statement: Statement, parameters: Mapping[str, Any]
) -> Rows:
    """As `execute`, for asyncio."""
    with translated():
        if isinstance(connection, psycopg.AsyncConnection):
            done = await async_cursor(connection).execute(
                statement.psycopg, parameters, binary=True
            )
            return await done.fetchall()
        if _is_sqlalchemy(connection, "AsyncConnection", "AsyncSession", "async_scoped_session"):
            found: Rows = (await connection.execute(_text(statement), dict(parameters))).all()
            return found
    raise TypeError(_unfit(connection))


def _is_sqlalchemy(connection: object, *names: str) -> bool:
    # Only where the caller has imported it: it need not be installed.
    modules = ("sqlalchemy", "sqlalchemy.orm", "sqlalchemy.ext.asyncio")
    kinds = [
        kind
        for module in modules
        if (found := sys.modules.get(module)) is not None
        for name in names
        if (kind := getattr(found, name, None)) is not None
    ]
    return isinstance(connection, tuple(kinds))


def _text(statement: Statement) -> sa.TextClause:
    import sqlalchemy  # noqa: PLC0415 (optional)

    return sqlalchemy.text(statement.text)


def _unfit(connection: object) -> str:
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    return (
        f"this call can't use a {kind}: give a connection of psycopg, or a session or connection "
        "of SQLAlchemy; asynchronous ones to functions whose names end in _async, others to others"
    )

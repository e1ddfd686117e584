"""Running a statement on the caller's own connection, from any supported library.

Tests: integration/test_defer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from pgdefer.database.callers import (
    AnyAsyncConnection,
    Rows,
    is_django,
    is_sqlalchemy,
    rows_on_django_async,
    unfit,
)
from pgdefer.database.pool import async_cursor
from pgdefer.database.sql import Statement
from pgdefer.errors import translated

__all__ = ["execute_async"]


async def execute_async(
    connection: AnyAsyncConnection, statement: Statement, parameters: Mapping[str, Any]
) -> Rows:
    """Run a statement in the connection's current transaction."""
    with translated():
        if isinstance(connection, psycopg.AsyncConnection):
            used = async_cursor(connection)
            await used.execute(statement.psycopg, parameters, binary=True)
            return await used.fetchall()
        if is_django(connection):
            return await rows_on_django_async(connection, statement, parameters)
        other: Any = connection
        if is_sqlalchemy(other, "AsyncConnection", "AsyncSession", "async_scoped_session"):
            result = await other.execute(statement.sqlalchemy, dict(parameters))
            rows: Rows = result.all()
            return rows
    raise TypeError(unfit(connection))

# Generated from execute_async.py: change that, and run `make generate`.
"""Running a statement on the caller's own connection, from any supported library.

Tests: integration/test_defer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from pgdefer.database.callers import (
    AnyConnection,
    Rows,
    is_django,
    is_sqlalchemy,
    rows_on_django,
    unfit,
)
from pgdefer.database.pool import cursor
from pgdefer.database.sql import Statement
from pgdefer.errors import translated

__all__ = ["execute"]


def execute(connection: AnyConnection, statement: Statement, parameters: Mapping[str, Any]) -> Rows:
    """Run a statement in the connection's current transaction."""
    with translated():
        if isinstance(connection, psycopg.Connection):
            used = cursor(connection)
            used.execute(statement.psycopg, parameters, binary=True)
            return used.fetchall()
        if is_django(connection):
            return rows_on_django(connection, statement, parameters)
        other: Any = connection
        if is_sqlalchemy(other, "Connection", "Session", "scoped_session"):
            result = other.execute(statement.sqlalchemy, dict(parameters))
            rows: Rows = result.all()
            return rows
    raise TypeError(unfit(connection))

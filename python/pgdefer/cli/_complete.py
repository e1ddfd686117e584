"""Completions for the shell: states, and names from the database.

Tests: integration/test_cli_all_commands.py.
"""

from __future__ import annotations

import contextlib

import typer

from pgdefer.database import sql
from pgdefer.database.source import Source
from pgdefer.database.sql import Statement
from pgdefer.options import STATES


def state(incomplete: str) -> list[str]:
    """Return the states that begin with the text."""
    return [name for name in STATES if name.startswith(incomplete)]


def queue(context: typer.Context, incomplete: str) -> list[str]:
    """Return the queues whose names begin with the text."""
    return _names(context, sql.QUEUES_LIKE, incomplete)


def task(context: typer.Context, incomplete: str) -> list[str]:
    """Return the registered tasks whose names begin with the text."""
    return _names(context, sql.TASKS_LIKE, incomplete)


def schedule(context: typer.Context, incomplete: str) -> list[str]:
    """Return the schedules whose names begin with the text."""
    return _names(context, sql.SCHEDULES_LIKE, incomplete)


def _names(context: typer.Context, statement: Statement, word: str) -> list[str]:
    """Ask the database that the line names so far. This starts no server."""
    source = Source(context.params.get("dsn"))
    with contextlib.suppress(Exception):
        if source.is_chosen:
            with source.connect() as connection:
                return [row[0] for row in connection.execute(statement.psycopg, {"word": word})]
    return []

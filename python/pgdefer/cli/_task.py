"""`pgdefer task`: the registered tasks.

Tests: integration/test_cli_lists.py.
"""

from __future__ import annotations

import typer

from pgdefer.database import sql

from . import _show
from ._base import DSN, AsJson, session

tasks = typer.Typer(help="Registered tasks.", no_args_is_help=True)

COLUMNS = {"name": "task", "defaults": "defaults", "paused_in": "paused in"}


@tasks.command("ls")
def ls(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the registered tasks, with their defaults, and the queues in which they are paused."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.TASKS)
    _show.table(rows, COLUMNS, empty="No task is registered.")

"""`pgdefer limit`.

Tests: integration/test_cli_lists.py.
"""

from __future__ import annotations

import typer

from pgdefer.database import sql

from . import _show
from ._base import DSN, AsJson, session

limits = typer.Typer(help="Limits: concurrency keys, mutex locks, queues.", no_args_is_help=True)

LIMITS = {
    "kind": "kind",
    "key": "key",
    "used": "used",
    "limit": "limit",
    "rate": "rate",
    "ready": "ready",
    "waiting": "waiting",
}


@limits.command("ls")
def ls_limits(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the limits, and how much of each is in use."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.LIMITS)
    _show.table(
        rows,
        LIMITS,
        empty="There are no limits in use. New jobs count once a worker has seen them.",
    )

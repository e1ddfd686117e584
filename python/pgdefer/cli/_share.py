"""`pgdefer share`.

Tests: integration/test_cli_lists.py.
"""

from __future__ import annotations

import typer

from pgdefer.database import sql

from . import _show
from ._base import DSN, AsJson, session

shares = typer.Typer(help="Shares: owners of jobs that take turns.", no_args_is_help=True)

SHARES = {
    "queue": "queue",
    "priority": "priority",
    "share": "share",
    "weight": "weight",
    "waiting": "waiting",
    "started": "started last minute",
}


@shares.command("ls")
def ls_shares(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the shares, and their starts within the last minute."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.SHARES)
    _show.table(
        rows, SHARES, empty="No job has a share. New jobs count once a worker has seen them."
    )

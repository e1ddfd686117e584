"""`pgdefer lock`.

Tests: integration/test_cli_lists.py.
"""

from __future__ import annotations

import typer

from pgdefer.database import sql

from . import _show
from ._base import DSN, AsJson, session

locks = typer.Typer(help="Locks.", no_args_is_help=True)

LOCKS = {"lock": "lock", "job_id": "first job", "running": "running", "waiting": "waiting"}


@locks.command("ls")
def ls_locks(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the locks of unfinished jobs, those with the most waiting jobs first."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.LOCKS)
    _show.table(
        rows,
        LOCKS,
        empty="No unfinished job has a lock. New jobs count once a worker has seen them.",
    )

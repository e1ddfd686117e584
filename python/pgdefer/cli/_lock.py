"""`pgdefer lock`, `pgdefer limit` and `pgdefer share`: what holds jobs up."""

from __future__ import annotations

import typer

from pgdefer.database import sql

from . import _show
from ._base import DSN, AsJson, session

locks = typer.Typer(help="Locks.", no_args_is_help=True)
limits = typer.Typer(help="Limits: concurrency keys, mutex locks, queues.", no_args_is_help=True)
shares = typer.Typer(help="Shares: owners of jobs that take turns.", no_args_is_help=True)

LOCKS = {"lock": "lock", "job_id": "first job", "running": "running", "waiting": "waiting"}
LIMITS = {
    "kind": "kind",
    "key": "key",
    "used": "used",
    "limit": "limit",
    "rate": "rate",
    "ready": "ready",
    "waiting": "waiting",
}
SHARES = {
    "queue": "queue",
    "priority": "priority",
    "share": "share",
    "weight": "weight",
    "waiting": "waiting",
    "started": "started last minute",
}


@locks.command("ls")
def ls_locks(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the locks of unfinished jobs, those with the most waiting jobs first."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.LOCKS)
    _show.table(rows, LOCKS, empty="No unfinished job has a lock.")


@limits.command("ls")
def ls_limits(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the limits, and how much of each is in use."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.LIMITS)
    _show.table(rows, LIMITS, empty="There are no limits in use.")


@shares.command("ls")
def ls_shares(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the shares, and their starts within the last minute."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.SHARES)
    _show.table(rows, SHARES, empty="No job has a share.")

"""`pgdefer group`: jobs that belong together, and what follows their end.

Tests: integration/test_groups.py.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from pgdefer.database import sql

from . import _show
from ._base import DSN, AsJson, DryRun, fail_for_missing, out, session, typed

groups = typer.Typer(help="Groups: jobs that belong together.", no_args_is_help=True)

GROUPS = {
    "name": "group",
    "state": "state",
    "jobs": "jobs",
    "unfinished": "unfinished",
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
    "ended_at": "ended",
}
GROUP = GROUPS | {
    "on_end_id": "on end",
    "on_success_id": "on success",
    "on_failure_id": "on failure",
    "error": "error",
}

Name = Annotated[str, typer.Argument(metavar="NAME", help="The group's name.")]


@groups.command("ls")
def ls_groups(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the groups, and their jobs by state."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.GROUPS, {"name": None})
    _show.table(rows, GROUPS, empty="There are no groups.")


@groups.command("show")
def show_group(name: Name, dsn: DSN = None, as_json: AsJson = False) -> None:
    """Show a group: its jobs by state, and the jobs that its callbacks have deferred."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.GROUPS, {"name": name})
    if not rows.values:
        fail_for_missing("group", name)
    _show.table(rows, GROUP)


@groups.command("close")
def close_group(
    name: Name, dsn: DSN = None, as_json: AsJson = False, dry_run: DryRun = False
) -> None:
    """Close a group: no more jobs join it, and its callbacks follow the end of its jobs."""
    names = {"Open it first by queue.open_group; queue.groups": "queue.groups"}
    with session(dsn, as_json=as_json, dry_run=dry_run) as on, typed(names):
        rows = on.call(sql.CLOSE_GROUP, {"name": name})
    if as_json:
        _show.answer(rows, str)
    elif not rows.values[0]["was_open"]:
        out.print(Text(f"{_show.escaped(name)} was closed before."))

"""`pgdefer schedule`: recurring runs.

Tests: integration/test_cli_database.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from pgdefer.database import sql

from . import _complete, _show
from ._base import DSN, AsJson, DryRun, Yes, confirm, fail_for_missing, session
from ._misspelt import doubted

schedules = typer.Typer(help="Recurring runs.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        help="The schedule's name.", show_default=False, autocompletion=_complete.schedule
    ),
]
Timezone = Annotated[str, typer.Option("--timezone", "-z", help="Such as Europe/Paris.")]
Cron = Annotated[str, typer.Argument(help="'0 9 * * MON-FRI', @hourly, 'every 90 seconds'.")]

COLUMNS = {
    "name": "name",
    "cron": "cron",
    "timezone": "time zone",
    "task": "task",
    "next_run_at": "next run",
    "last_run_at": "last run",
    "last_job_id": "its job",
    "reason": "reason",
}


@schedules.command("ls")
def ls(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the schedules."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.SCHEDULES)
    least = ("last_job_id", "last_run_at", "timezone")
    _show.table(rows, COLUMNS, least=least, empty="Nothing is scheduled.")


@schedules.command("add")
def add(
    name: Name,
    cron: Cron,
    task: Annotated[str, typer.Argument(help="The task's name.", show_default=False)],
    args: Annotated[str, typer.Argument(metavar="[JSON]", help="Its args.")] = "{}",
    timezone: Timezone = "UTC",
    options: Annotated[
        str | None, typer.Option(metavar="JSON", help="The options of queue.schedule.")
    ] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Schedule a task, or change a schedule, at once. Prints its next run."""
    _show.check_json(args=args, options=options)
    asked = {"name": name, "cron": cron, "task": task, "args": args, "timezone": timezone}
    with (
        session(dsn, as_json=as_json, dry_run=dry_run) as on,
        doubted(on, task=task, may_be_new=True),
    ):
        rows = on.call(sql.SCHEDULE_ONE, asked | {"options": options})
    _show.answer(rows, _next_run)


def _next_run(row: Mapping[str, Any]) -> str:
    return f"next run: {_show.cell(row['next_run_at']) or 'never'}"


@schedules.command("rm")
def rm(
    name: Name,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Remove a schedule."""
    confirm(f"Remove the schedule {_show.escaped(name)}?", yes=yes, dry_run=dry_run)
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(sql.UNSCHEDULE, {"name": name})
    if not rows.values[0]["was_there"]:
        fail_for_missing("schedule", name)
    _show.answer(rows, lambda _: "removed")


@schedules.command("run")
def run(name: Name, dsn: DSN = None, as_json: AsJson = False, dry_run: DryRun = False) -> None:
    """Defer a schedule's job now. Prints the job's id."""
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(sql.RUN_NOW, {"name": name})
    _show.answer(rows, lambda row: str(row["id"]))


@schedules.command("enable")
def enable(
    name: Name,
    off: Annotated[bool, typer.Option("--off", help="Disable it.")] = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Enable a schedule; with --off, disable it."""
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(sql.ENABLE_SCHEDULE, {"name": name, "enabled": not off})
    _show.answer(rows, _next_run)


@schedules.command("next")
def next_runs(
    cron: Cron,
    timezone: Timezone = "UTC",
    n: Annotated[int, typer.Option("-n", min=1, help="How many runs to show.")] = 5,
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Show the next runs of an expression."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.NEXT_RUNS, {"cron": cron, "timezone": timezone, "n": n})
    _show.table(rows, {"run_at": "next runs", "local": f"in {_show.escaped(timezone)}"})

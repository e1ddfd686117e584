"""`pgdefer db`: a database's figures, health and upkeep.

Tests: integration/test_cli_database.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from pgdefer.database import sql

from . import _show
from ._base import DSN, AsJson, DryRun, Exit, Rows, Yes, confirm, out, session, typed

db = typer.Typer(help="The database's figures, health and upkeep.", no_args_is_help=True)

PRUNED_AT_ONCE = 2_000  # for as many the workers wait meanwhile

STATES = {
    "queue": "queue",
    "task": "task",
    "scheduled": "scheduled",
    "waiting": "waiting",
    "upstream_failed": "upstream failed",
    "blocked": "blocked",
    "ready": "ready",
    "running": "running",
    "held": "held",
    "failed": "failed",
    "oldest_ready_for": "oldest ready",
}
PARTS = (
    "succeeded",
    "failed",
    "failures",
    "per_second",
    "wait_p50",
    "wait_p99",
    "run_p50",
    "run_p99",
)
HEADINGS = ("done", "failed", "failures", "/s", "wait p50", "wait p99", "run p50", "run p99")


@db.command("stats")
def stats(
    hour: Annotated[
        bool, typer.Option("--hour", help="Show the last hour instead of 5 minutes.")
    ] = False,
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Show the jobs of each queue and task, and their rates and times."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.STATS)
    for row in rows.values:
        # zeros are blank, and a column of zeros is left out
        row.update({key: row[key] or None for key in row})
    _show.table(rows, STATES, right=("oldest_ready_for",), empty="There are no jobs.")
    if rows.texts is None and rows.values:
        end = "1h" if hour else "5m"
        names = {f"{part}_{end}": name for part, name in zip(PARTS, HEADINGS, strict=True)}
        out.print(f"\nThe last {'hour' if hour else '5 minutes'}:", highlight=False)
        ended = Rows([row for row in rows.values if any(row[key] is not None for key in names)])
        durations = [key for key in names if key.startswith(("wait", "run"))]
        _show.table(
            ended,
            {"queue": "queue", "task": "task", **names},
            right=durations,
            least=[key for key in durations if "_p50" in key],
            empty="Nothing has ended.",
        )


@db.command("health")
def health(dsn: DSN = None, as_json: AsJson = False) -> None:
    """Check what makes queues stop or slow down. Exits with 15 if a check fails."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.HEALTH)
    columns = {"name": "check", "status": "status", "detail": "found", "fix": "what to do"}
    _show.table(rows, columns, folded=("detail", "fix"))
    if any(row["status"] == "fail" for row in rows.values):
        raise typer.Exit(Exit.UNHEALTHY)


@db.command("check")
def check(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the violated invariants of the tables. Exits with 15 if there are any."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.CHECK)
    columns = {"problem": "problem", "id": "job", "detail": "detail"}
    _show.table(rows, columns, folded=("problem", "detail"), empty="Every invariant holds.")
    if rows.values:
        raise typer.Exit(Exit.UNHEALTHY)


@db.command("reap")
def reap(dsn: DSN = None, as_json: AsJson = False) -> None:
    """End dead claims: those of silent workers, and those past their lease or timeout."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.REAP)
    _show.answer(rows, _reaped)


def _reaped(row: Mapping[str, Any]) -> str:
    said = f"{_show.count_of(row['reaped'], 'claim')} ended"
    if row["next_expiry"] is not None:
        said += f"\nthe next may be dead at {_show.moment(row['next_expiry'])}"
    return said


@db.command("tick")
def tick(dsn: DSN = None, as_json: AsJson = False) -> None:
    """Do everything that is due, as workers do."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.TICK_ONCE)
    _show.only_record(rows)


@db.command("prune")
def prune(
    state: Annotated[
        str | None, typer.Option("--state", "-s", help="Jobs that succeeded, failed or cancelled.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="INTERVAL", help="With --state: jobs that ended this long ago."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="The maximum; without it, all.")
    ] = None,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Remove finished jobs past their retention; with --state, jobs in that state."""
    names = {"older_than": "--older-than", "state": "--state"}
    if state is not None and not (yes or dry_run):
        # A wrong state or interval is refused before the question.
        with session(dsn) as on, on.rehearsal(), typed(names):
            on.call(sql.PRUNE, {"max_jobs": 1, "state": state, "older_than": older_than})
        confirm(f"Remove {_show.escaped(state)} jobs for good?", yes=yes, dry_run=dry_run)
    jobs = 0
    with session(dsn, as_json=as_json, dry_run=dry_run) as on, typed(names):
        while limit is None or jobs < limit:
            most = min(PRUNED_AT_ONCE, PRUNED_AT_ONCE if limit is None else limit - jobs)
            asked = {"max_jobs": most, "state": state, "older_than": older_than}
            removed = on.call(sql.PRUNE, asked).values[0]["jobs"]
            jobs += removed
            # It does not go on to zero, as jobs end meanwhile. A dry run is one transaction.
            if removed < most or dry_run:
                break
    row = {"jobs": jobs}
    rows = Rows([row], [json.dumps(row)] if as_json else None)
    _show.answer(rows, lambda row: f"{_show.count_of(row['jobs'], 'job')} removed")

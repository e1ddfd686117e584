"""`pgdefer job`: the commands that change and end jobs.

Tests: integration/test_cli_job_changes.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import psycopg
import typer

from pgdefer.database import sql

from . import _complete, _show
from ._base import (
    DSN,
    REFUSALS,
    AsJson,
    DryRun,
    Exit,
    Rows,
    Session,
    Yes,
    confirm,
    end_of,
    err,
    fail,
    reported,
    session,
    typed,
)
from ._job import Id, Queue, Task, job_id, jobs

Ids = Annotated[
    list[int],
    typer.Argument(metavar="ID...", help="The jobs' ids.", show_default=False, parser=job_id),
]
Force = Annotated[bool, typer.Option("--force", help="Also running jobs: they lose their claims.")]
Target = Annotated[
    str,
    typer.Option(
        "--to",
        "-t",
        metavar="QUEUE",
        help="The other queue.",
        show_default=False,
        autocompletion=_complete.queue,
    ),
]

# The maximum of jobs per call.
SLICE = 1_000


@jobs.command("move")
def move(
    ids: Ids,
    to: Target,
    force: Force = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Move jobs to another queue, with their ids, attempts and history."""
    _change(sql.MOVE, {"ids": ids, "queue": to, "force": force}, dsn, as_json, dry_run)


@jobs.command("copy")
def copy(
    id: Id,
    to: Annotated[
        str | None, typer.Option("--to", "-t", metavar="QUEUE", help="Into this queue.")
    ] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Defer a copy of a job, with the same args and options; print its id."""
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(sql.COPY, {"id": id, "queue": to})
    _show.answer(rows, lambda row: str(row["id"]))


@jobs.command("retry")
def retry(
    ids: Annotated[list[int] | None, typer.Argument(metavar="[ID]...", parser=job_id)] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="All failed jobs, or those of -q and -t.")
    ] = False,
    queue: Queue = None,
    task: Task = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="With --failed: the maximum.")
    ] = None,
    force: Force = False,
    from_step: Annotated[
        str | None,
        typer.Option("--from-step", help="Durable jobs: forget this step, and those after it."),
    ] = None,
    at: Annotated[str | None, typer.Option(help="Not before: 2030-01-31 09:00.")] = None,
    delay: Annotated[
        str | None,
        typer.Option("--delay", "--in", help="Start it after this much time: '5 minutes'."),
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", "-p", help="The new priority.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="QUEUE", help="The new queue.", autocompletion=_complete.queue
        ),
    ] = None,
    lock: Annotated[str | None, typer.Option(help="The new lock; '' for none.")] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Run finished jobs again; run jobs that wait for a retry at once."""
    if failed == bool(ids):
        fail(Exit.USAGE, "name jobs by their ids, or pass --failed")
    if ids and not (queue is None and task is None and limit is None):
        fail(Exit.USAGE, "-q, -t and -n go with --failed: ids name the jobs already")
    if at is not None and delay is not None:
        fail(Exit.USAGE, "--at and --delay exclude each other")
    given = {"retry_at": at, "retry_in": delay, "priority": priority, "queue": to, "lock": lock}
    changes = {name: each for name, each in given.items() if each is not None}
    if failed and (changes or from_step is not None):
        fail(Exit.USAGE, "--failed takes no step and no changes: name jobs by their ids")
    if failed:
        _retry_failed({"task": task, "queue": queue}, limit, dsn, as_json, dry_run)
    else:
        asked = {"ids": ids, "force": force, "from_step": from_step}
        asked["changes"] = json.dumps(changes) if changes else None
        names = {"retry_at": "--at", "retry_in": "--delay"}
        _change(sql.RETRY, asked, dsn, as_json, dry_run, names)


@jobs.command("delete")
def delete(
    ids: Ids,
    force: Annotated[
        bool, typer.Option("--force", help="Also jobs that run or that others need.")
    ] = False,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Remove jobs and every trace of them."""
    confirm(f"Remove {_count(ids)} for good?", yes=yes, dry_run=dry_run)
    _change(sql.DELETE, {"ids": ids, "force": force}, dsn, as_json, dry_run)


@jobs.command("fail")
def fail_command(
    ids: Ids,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="The reason, for the record.")
    ] = None,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """End unfinished jobs as failed; they are not retried."""
    confirm(f"Let {_count(ids)} fail?", yes=yes, dry_run=dry_run)
    _change(sql.FAIL_JOBS, {"ids": ids, "message": message}, dsn, as_json, dry_run)


@jobs.command("done")
def done(
    ids: Ids,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Mark jobs as succeeded without running them."""
    confirm(f"Mark {_count(ids)} as succeeded?", yes=yes, dry_run=dry_run)
    _change(sql.DONE, {"ids": ids}, dsn, as_json, dry_run)


# -4 is a number here, and no option.
@jobs.command("priority", context_settings={"ignore_unknown_options": True})
def priority(
    number: Annotated[int, typer.Argument(metavar="PRIORITY", help="Higher runs first.")],
    ids: Ids,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Change the priority of jobs."""
    _change(sql.SET_PRIORITY, {"ids": ids, "priority": number}, dsn, as_json, dry_run)


@jobs.command("deadline")
def deadline(
    at: Annotated[str, typer.Argument(metavar="TIME", help="As 2030-01-31 09:00, or none.")],
    ids: Ids,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Change the deadline of jobs."""
    asked = {"ids": ids, "at": None if at == "none" else at}
    _change(sql.SET_DEADLINE, asked, dsn, as_json, dry_run, {"--at:": "TIME:"})


@jobs.command("hold")
def hold(ids: Ids, dsn: DSN = None, as_json: AsJson = False, dry_run: DryRun = False) -> None:
    """Hold jobs that have not started."""
    _change_each(sql.HOLD, ids, {}, dsn, as_json, dry_run)


@jobs.command("unhold")
def unhold(ids: Ids, dsn: DSN = None, as_json: AsJson = False, dry_run: DryRun = False) -> None:
    """Release held jobs."""
    _change_each(sql.UNHOLD, ids, {}, dsn, as_json, dry_run)


@jobs.command("cancel")
def cancel(
    ids: Ids,
    abort: Annotated[
        bool, typer.Option("--abort", help="Also a running job: tells its worker to abort it.")
    ] = False,
    children: Annotated[
        bool, typer.Option("--children", help="Then also the jobs that it deferred and waits for.")
    ] = False,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Cancel jobs that have not started; with --abort, also running ones."""
    confirm(f"Cancel {_count(ids)}?", yes=yes, dry_run=dry_run)
    _change_each(sql.CANCEL, ids, {"abort": abort}, dsn, as_json, dry_run, children=children)


@jobs.command("reschedule")
def reschedule(
    id: Id,
    at: Annotated[
        str | None, typer.Option(help="The time, as 2030-01-31 09:00. Now by default.")
    ] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Reschedule a job that neither runs nor has ended."""
    _change_one(sql.RESCHEDULE, {"id": id, "at": at}, dsn, as_json, dry_run)


@jobs.command("args")
def args(
    id: Id,
    args: Annotated[
        str, typer.Argument(metavar="JSON", help="Its new args, a JSON object; - reads stdin.")
    ],
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Replace a job's args; those of a failed job count for its retry."""
    text = _show.given(args)
    _show.check_json(args=text)
    _change_one(sql.SET_ARGS, {"id": id, "args": text}, dsn, as_json, dry_run)


def _count(ids: Sequence[int]) -> str:
    return f"job {ids[0]}" if len(ids) == 1 else _show.count_of(len(ids), "job")


def _change(
    statement: sql.Statement,
    parameters: dict[str, Any],
    dsn: str | None,
    as_json: bool,
    dry_run: bool,
    names: Mapping[str, str] = {},
) -> None:
    """Call a function on many jobs, print each outcome, and exit accordingly.

    `names` says what the user has typed for an argument that a refusal names: see `typed`.
    """
    ids = list(dict.fromkeys(parameters["ids"]))
    rows = Rows([])
    with session(dsn, as_json=as_json, dry_run=dry_run) as on, typed(names):
        for at in range(0, len(ids), SLICE):
            rows += on.call(statement, parameters | {"ids": ids[at : at + SLICE]})
    _end(rows, can_force=parameters.get("force") is False)


def _retry_failed(
    asked: dict[str, Any], limit: int | None, dsn: str | None, as_json: bool, dry_run: bool
) -> None:
    """Restart failed jobs, as `_change` does."""
    rows = Rows([])
    after = None
    left: float = math.inf if limit is None else limit
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        while left:
            size = min(left, SLICE)
            more = on.call(sql.RETRY_FAILED, asked | {"max_jobs": size, "after": after})
            rows += more
            if len(more.values) < size:
                break
            left -= size
            after = more.values[-1]["id"]
    if not rows.values and rows.texts is None:
        err.print("There are no failed jobs to retry.", highlight=False)
    _end(rows)


def _change_each(
    statement: sql.Statement,
    ids: Sequence[int],
    more: Mapping[str, Any],
    dsn: str | None,
    as_json: bool,
    dry_run: bool,
    *,
    children: bool = False,
) -> None:
    """Call a function on each job, in a transaction of its own, and print the new states.

    With `children`, cancel those of each job too. Exits with the code of what was refused.
    """
    each = [{"id": id, **more} for id in dict.fromkeys(ids)]
    if as_json:
        with session(dsn, as_json=True, dry_run=dry_run) as on:
            done = [_outcome(on, statement, asked, children=children) for asked in each]
        _end(sum(done, Rows([], [])))
        return
    refused: list[int] = []
    with session(dsn, dry_run=dry_run) as on:
        for asked in each:
            try:
                with reported(), on.transaction():
                    rows = on.call(statement, asked)
                _show_state(asked["id"], rows)
                if children:
                    rows = _cancelled_children(on, asked)
                    if rows.values:
                        _end(rows)
            except typer.Exit as end:
                if end.exit_code == Exit.UNREACHABLE:
                    raise
                refused.append(end.exit_code)
    if refused:
        is_one_reason = len(refused) == len(each) and len(set(refused)) == 1
        raise typer.Exit(refused[0] if is_one_reason else Exit.PARTLY)


def _outcome(
    on: Session, statement: sql.Statement, asked: dict[str, Any], *, children: bool
) -> Rows:
    """Call a function on a job; return its outcome, and its children's, as for many jobs."""
    id = asked["id"]
    try:
        with on.transaction():
            row = {"id": id, "outcome": on.one(statement, asked), "error": None}
    except psycopg.Error as error:
        if error.sqlstate not in REFUSALS:
            raise
        state = None if error.sqlstate == "QJ001" else on.one(sql.STATE, {"id": id})
        row = {"id": id, "outcome": state, "error": error.sqlstate}
    rows = Rows([row], [json.dumps(row)])
    return rows + _cancelled_children(on, asked) if children and row["error"] is None else rows


def _cancelled_children(on: Session, parameters: dict[str, Any]) -> Rows:
    """Cancel all children of a job; return their outcomes."""
    rows = Rows([])
    while True:
        with reported(), on.transaction():
            more = on.call(sql.CANCEL_CHILDREN, parameters)
        rows += more
        if len(more.values) < SLICE:
            return rows


def _end(rows: Rows, *, can_force: bool = False) -> None:
    _show.outcomes(rows)
    if can_force and any(
        row["error"] == "QJ003" and row["outcome"] == "running" for row in rows.values
    ):
        err.print("Running jobs need --force.", highlight=False)
    if code := end_of(rows.values):
        raise typer.Exit(code)


def _change_one(
    statement: sql.Statement,
    parameters: dict[str, Any],
    dsn: str | None,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Call a function on one job, and print its new state."""
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(statement, parameters)
    _show_state(parameters["id"], rows)


def _show_state(id: int, rows: Rows) -> None:
    _show.answer(rows, lambda row: f"{id}: {row['state']}")

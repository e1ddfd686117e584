"""`pgdefer job`: see, change and end jobs."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from pgdefer import _sql
from pgdefer._codec import raw

from . import _complete, _show
from ._base import (
    DSN,
    AsJson,
    DryRun,
    Exit,
    Rows,
    Yes,
    confirm,
    end_of,
    err,
    fail,
    out,
    session,
)

jobs = typer.Typer(help="Jobs.", no_args_is_help=True)

Id = Annotated[int, typer.Argument(metavar="ID", help="The job's id.", show_default=False)]
Ids = Annotated[
    list[int], typer.Argument(metavar="ID...", help="The jobs' ids.", show_default=False)
]
Queue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        "-q",
        help="Of this queue only: a name, prefix* or *.",
        autocompletion=_complete.queue,
    ),
]
State = Annotated[
    str | None,
    typer.Option("--state", "-s", help="In this state only.", autocompletion=_complete.state),
]
Task = Annotated[
    str | None,
    typer.Option("--task", "-t", help="Of this task only.", autocompletion=_complete.task),
]
Before = Annotated[int | None, typer.Option(help="Only jobs with a smaller id: the next page.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")]
Force = Annotated[bool, typer.Option("--force", help="Running ones too: their claims are lost.")]
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

COLUMNS = {
    "id": "id",
    "queue_name": "queue",
    "task_name": "task",
    "job_state": "state",
    "reason": "reason",
    "priority": "priority",
    "attempts": "attempts",
    "created_at": "created",
    "description": "description",
}
PEEKED = {
    "id": "id",
    "queue": "queue",
    "task": "task",
    "priority": "priority",
    "lock": "lock",
    "attempts": "attempts",
    "deadline": "deadline",
    "args": "args",
}
ATTEMPTS = {
    "attempt": "attempt",
    "outcome": "outcome",
    "worker_id": "worker",
    "started_at": "started",
    "finished_at": "finished",
    "error": "error",
}


# How many jobs one call may change.
SLICE = 1_000
# How far a list looks, in queue.search's bytes: 100 a job.
GLANCE = 2_000_000


# Looking


@jobs.command("ls")
def ls(
    queue: Queue = None,
    state: State = None,
    task: Task = None,
    limit: Limit = 20,
    before: Before = None,
    no_limit: Annotated[
        bool, typer.Option("--no-limit", help="Look on where few of very many jobs are asked for.")
    ] = False,
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first. Ends with 13 where it stopped before it had found enough."""
    asked = {"queue": queue, "state": state, "task": task, "before": before, "max_jobs": limit}
    asked |= {"pattern": None, "by": "text", "max_bytes": None if no_limit else GLANCE}
    with session(dsn, as_json=as_json) as on:
        rows = on.call(_sql.SEARCH, asked)
    if not _show_found(rows, COLUMNS, limit):
        raise typer.Exit(Exit.PARTLY)


@jobs.command("search")
def search(
    pattern: Annotated[str, typer.Argument(help="What to look for.", show_default=False)],
    queue: Queue = None,
    state: State = None,
    task: Task = None,
    path: Annotated[
        bool, typer.Option("--path", help="PATTERN is a jsonpath: $.items[*] ? (@.price > 3)")
    ] = False,
    key: Annotated[
        bool, typer.Option("--key", help="PATTERN is a lock, queueing lock or concurrency key.")
    ] = False,
    limit: Limit = 20,
    before: Before = None,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", min=1, help="Stop after reading so many bytes of args.")
    ] = 50_000_000,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Read all of them.")] = False,
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Search jobs by their args, newest first. Ends with 13 where it did not read all of them."""
    if path and key:
        fail(Exit.USAGE, "--path and --key exclude each other")
    asked = {
        "pattern": pattern,
        "by": "path" if path else "key" if key else "text",
        "queue": queue,
        "state": state,
        "task": task,
        "before": before,
        "max_jobs": limit,
        "max_bytes": None if no_limit else max_bytes,
    }
    with session(dsn, as_json=as_json) as on:
        rows = on.call(_sql.SEARCH, asked)
    columns = {**COLUMNS, "bytes": "bytes", "excerpt": "found"}
    del columns["priority"], columns["attempts"]
    if not _show_found(rows, columns, limit):
        raise typer.Exit(Exit.PARTLY)


def _show_found(rows: Rows, columns: dict[str, str], limit: int) -> bool:
    """Print what a search returned, and its last row, that says that there is more, apart."""
    more = None
    if rows.values and rows.values[-1]["id"] is None:
        more = rows.values.pop()
        if rows.texts is not None:
            rows.texts.pop()
    for row in rows.values:
        row |= {key: row[key] or None for key in ("priority", "attempts")}
    least = ["bytes", "attempts", "priority", "created_at", "reason"]
    if "excerpt" in columns:
        least.insert(1, "description")
    is_all = more is None or len(rows.values) >= limit
    empty = "No such jobs." if is_all else "None of the newest jobs."
    _show.table(rows, columns, least=least, folded=("excerpt",), empty=empty)
    if more is not None:
        hint = "" if is_all else ", or --no-limit"
        err.print(Text(f"There may be more: --before {more['next_id']}{hint}"))
    return is_all


@jobs.command("show")
def show(
    id: Id,
    full: Annotated[bool, typer.Option("--full", help="Cut nothing.")] = False,
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Show a job: its state, args, result and attempts."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(_sql.JOB, {"id": id})
        attempts = on.call(_sql.ATTEMPTS, {"id": id})
    if not rows.values:
        fail(Exit.NOT_FOUND, f"job not found (id: {id})")
    if rows.texts is not None and attempts.texts is not None:
        tries = ", ".join(attempts.texts)
        _show.write(rows.texts[0].rstrip()[:-1] + f',"history":[{tries}]}}')
        return
    _show.record(rows.values[0], full=full)
    if attempts.values:
        out.print()
        _show.table(attempts, ATTEMPTS, least=("started_at", "worker_id"), folded=("error",))


@jobs.command("get")
def get(
    path: Annotated[str, typer.Argument(help="As items[0].price, or any jsonpath.")],
    id: Id,
    dsn: DSN = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one array of all that is found.")
    ] = False,
    as_raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Print texts without quotes; bytes, dates and so on as what they are."
        ),
    ] = False,
) -> None:
    """Print what a path finds in a job's args, as JSON. Ends with 14 where there is nothing."""
    if as_raw and as_json:
        fail(Exit.USAGE, "--raw and --json exclude each other")
    with session(dsn) as on:
        rows = on.call(_sql.GET, {"id": id, "path": path})
        values = [row["value"] for row in rows.values]
        raws = [raw(value) for value in values] if as_raw else []
    if raws:
        _show.write_raw(raws)
    elif as_json:
        _show.print_json(values)
    elif values:
        _show.write("\n".join(values))
    else:
        err.print(Text(f"There is nothing at {_show.plain(path)}."))
    if not values:
        raise typer.Exit(Exit.NOTHING)


@jobs.command("why")
def why(id: Id, dsn: DSN = None, as_json: AsJson = False) -> None:
    """Say why a job is not running."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(_sql.WHY, {"id": id})
    if rows.texts is not None:
        _show.write(rows.texts[0])
    else:
        out.print(Text(_show.plain(rows.values[0]["why"])), soft_wrap=True)


@jobs.command("tail")
def tail(
    queue: Queue = None,
    task: Task = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Begin with so many that have ended.")
    ] = 10,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Go on until interrupted.")
    ] = True,
    interval: Annotated[float, typer.Option(min=0.05, help="Look so often, in seconds.")] = 0.5,
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Print jobs as they end."""
    asked: dict[str, Any] = {"queue": queue, "task": task}
    with contextlib.suppress(KeyboardInterrupt), session(dsn, as_json=as_json) as on:
        # no look goes back further than the first, which finds what is not to be shown
        asked["start"] = on.one(_sql.NOW)
        since: Any = None
        seen = {_key(row) for row in on.call(_sql.ENDED_SINCE, asked | {"since": since}).values}
        if lines:
            rows = on.call(_sql.ENDED_LATELY, asked | {"n": lines})
            rows = rows.pick(range(len(rows.values))[::-1])
            seen |= {_key(row) for row in rows.values}
            _show_ended(rows)
        while follow:
            time.sleep(interval)
            # a job that ends in a long transaction is seen later than others that ended after it
            rows = on.call(_sql.ENDED_SINCE, asked | {"since": since})
            keys = [_key(row) for row in rows.values]
            _show_ended(rows.pick([at for at, key in enumerate(keys) if key not in seen]))
            if keys and keys[-1] not in seen:  # else the last one was retried, or deleted
                since = keys[-1][1]
            seen = {*keys}


def _key(row: dict[str, Any]) -> tuple[int, Any]:
    """Return what tells the ends of jobs apart: a retried one ends again."""
    return row["id"], row["finished_at"]


def _show_ended(rows: Rows) -> None:
    if rows.texts is not None:
        for text in rows.texts:
            _show.write(text)
        return
    for row in rows.values:
        line = Text(_show.moment(row["finished_at"]))
        line.append(f" {row['state']:<9}", _show.STYLES[row["state"]])
        took = "" if row["ran_for"] is None else f" in {_show.span(row['ran_for'])}"
        error = "" if row["error"] is None else f": {_show.short(_show.plain(row['error']), 120)}"
        names = f" {row['id']} {_show.plain(row['task'])} ({_show.plain(row['queue'])})"
        out.print(line.append(names + took + error), soft_wrap=True)


# Taking one by hand


@jobs.command("next")
def take_next(
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="[QUEUE]...", help="Names, prefix* or *.")
    ] = None,
    peek: Annotated[bool, typer.Option("--peek", help="Only look.")] = False,
    ack: Annotated[bool, typer.Option("--ack", help="Mark it as succeeded at once.")] = False,
    lease: Annotated[
        str, typer.Option(help="How long it is yours; without an outcome it then has crashed.")
    ] = "20 minutes",
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Claim the next job. Its outcome is given by the claim: queue.succeed(id, claim).

    Ends with 14 when there is none.
    """
    if peek and ack:
        fail(Exit.USAGE, "--peek and --ack exclude each other")
    asked: dict[str, Any] = {"queues": queues or None}
    with session(dsn, as_json=as_json) as on:
        if peek:
            rows = on.call(_sql.PEEK, asked | {"n": 1})
        else:
            rows = on.call(_sql.NEXT, asked | {"ack": ack, "lease": lease})
    if not rows.values:
        err.print("There is no job to take.", highlight=False)
        raise typer.Exit(Exit.NOTHING)
    if rows.texts is not None:
        _show.write(rows.texts[0])
    else:
        _show.record(rows.values[0])


# Changing


@jobs.command("move")
def move(
    ids: Ids,
    to: Target,
    force: Force = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Put jobs into another queue, with their ids, attempts and history."""
    _change(_sql.MOVE, {"ids": ids, "queue": to, "force": force}, dsn, as_json, dry_run)


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
    """Defer a job once more, with the same args and options; print its id."""
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(_sql.COPY, {"id": id, "queue": to})
    if rows.texts is not None:
        _show.write(rows.texts[0])
    else:
        out.print(str(rows.values[0]["id"]), highlight=False)


@jobs.command("restart")
def restart(
    ids: Annotated[list[int] | None, typer.Argument(metavar="[ID]...")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="All that have failed, or those of -q and -t.")
    ] = False,
    queue: Queue = None,
    task: Task = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Of --failed at most so many.")
    ] = None,
    force: Force = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Run finished jobs again, and those that wait for a retry at once."""
    if failed == bool(ids):
        fail(Exit.USAGE, "name jobs by their ids, or pass --failed")
    if failed:
        _restart_failed({"task": task, "queue": queue}, limit, dsn, as_json, dry_run)
    else:
        _change(_sql.RETRY, {"ids": ids, "force": force}, dsn, as_json, dry_run)


@jobs.command("delete")
def delete(
    ids: Ids,
    force: Annotated[
        bool, typer.Option("--force", help="Also those that run, or that others need.")
    ] = False,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Remove jobs and every trace of them."""
    confirm(f"Remove {_count(ids)} for good?", yes=yes, dry_run=dry_run)
    _change(_sql.DELETE, {"ids": ids, "force": force}, dsn, as_json, dry_run)


@jobs.command("fail")
def fail_command(
    ids: Ids,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Why, for the record.")
    ] = None,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """End unfinished jobs as failed; they are not retried."""
    confirm(f"Let {_count(ids)} fail?", yes=yes, dry_run=dry_run)
    _change(_sql.FAIL_JOBS, {"ids": ids, "message": message}, dsn, as_json, dry_run)


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
    _change(_sql.DONE, {"ids": ids}, dsn, as_json, dry_run)


@jobs.command("priority")
def priority(
    number: Annotated[int, typer.Argument(metavar="PRIORITY", help="Higher runs first.")],
    ids: Ids,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Change the priority of jobs."""
    _change(_sql.SET_PRIORITY, {"ids": ids, "priority": number}, dsn, as_json, dry_run)


@jobs.command("hold")
def hold(id: Id, dsn: DSN = None, as_json: AsJson = False, dry_run: DryRun = False) -> None:
    """Put a job aside that has not started."""
    _change_one(_sql.HOLD, {"id": id}, dsn, as_json, dry_run)


@jobs.command("unhold")
def unhold(id: Id, dsn: DSN = None, as_json: AsJson = False, dry_run: DryRun = False) -> None:
    """Let a held job go on."""
    _change_one(_sql.UNHOLD, {"id": id}, dsn, as_json, dry_run)


@jobs.command("cancel")
def cancel(
    id: Id,
    abort: Annotated[
        bool, typer.Option("--abort", help="Also if it runs: its worker is told.")
    ] = False,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Cancel a job that has not started; with --abort one that runs."""
    confirm(f"Cancel job {id}?", yes=yes, dry_run=dry_run)
    _change_one(_sql.CANCEL, {"id": id, "abort": abort}, dsn, as_json, dry_run)


@jobs.command("reschedule")
def reschedule(
    id: Id,
    at: Annotated[
        str | None, typer.Option(help="The time, as 2030-01-31 09:00. Now if not given.")
    ] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Give a job that neither runs nor has ended another time."""
    _change_one(_sql.RESCHEDULE, {"id": id, "at": at}, dsn, as_json, dry_run)


@jobs.command("args")
def args(
    id: Id,
    given: Annotated[
        str, typer.Argument(metavar="JSON", help="Its new args, a JSON object; - reads stdin.")
    ],
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Give a job other args, in place of all it had; a failed one for its retry."""
    text = sys.stdin.read() if given == "-" else given
    _show.check_json(args=text)
    _change_one(_sql.SET_ARGS, {"id": id, "args": text}, dsn, as_json, dry_run)


def _count(ids: Sequence[int]) -> str:
    return f"job {ids[0]}" if len(ids) == 1 else _show.count(len(ids), "job")


def _change(
    statement: _sql.Statement,
    parameters: dict[str, Any],
    dsn: str | None,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Call a function on many jobs, print what became of each, and end accordingly."""
    ids = list(dict.fromkeys(parameters["ids"]))
    rows = Rows([])
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        for at in range(0, len(ids), SLICE):
            rows += on.call(statement, parameters | {"ids": ids[at : at + SLICE]})
    _end(rows)


def _restart_failed(
    asked: dict[str, Any], limit: int | None, dsn: str | None, as_json: bool, dry_run: bool
) -> None:
    """Restart what has failed, as `_change` does."""
    rows = Rows([])
    after = None
    left: float = math.inf if limit is None else limit
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        while left:
            size = min(left, SLICE)
            more = on.call(_sql.RETRY_FAILED, asked | {"max_jobs": size, "after": after})
            rows += more
            if len(more.values) < size:
                break
            left -= size
            after = more.values[-1]["id"]
    _end(rows)


def _end(rows: Rows) -> None:
    _show.outcomes(rows)
    if code := end_of(rows.values):
        raise typer.Exit(code)


def _change_one(
    statement: _sql.Statement,
    parameters: dict[str, Any],
    dsn: str | None,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Call a function on one job, and print its new state."""
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(statement, parameters)
    if rows.texts is not None:
        _show.write(rows.texts[0])
    else:
        out.print(Text(f"{parameters['id']}: {rows.values[0]['state']}"))

"""`pgdefer job`: the commands that find, show and claim jobs.

Tests: integration/test_cli_jobs.py, integration/test_cli_next.py.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import operator
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from pgdefer._text import escaped, first_line
from pgdefer.codec import raw
from pgdefer.database import sql

from . import _complete, _show
from ._base import (
    DSN,
    AsJson,
    Exit,
    Interval,
    Rows,
    Session,
    err,
    fail,
    fail_for_missing,
    out,
    session,
)
from ._many import DSNS, PATIENCE, databases, named

jobs = typer.Typer(help="Jobs.", no_args_is_help=True)


def job_id(text: str) -> int:
    """Read a job's id."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: an id is a whole number") from None


Id = Annotated[
    int, typer.Argument(metavar="ID", help="The job's id.", show_default=False, parser=job_id)
]
Queue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        "-q",
        help="Only this queue: a name, prefix* or *.",
        autocompletion=_complete.queue,
    ),
]
State = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        "-s",
        help="Only jobs in these states, separated by commas; may be repeated.",
        autocompletion=_complete.state,
    ),
]
Task = Annotated[
    str | None,
    typer.Option("--task", "-t", help="Only jobs of this task.", autocompletion=_complete.task),
]
Before = Annotated[int | None, typer.Option(help="Only jobs with a smaller id, for the next page.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="The maximum.")]

COLUMNS = {
    "id": "id",
    "queue": "queue",
    "task": "task",
    "state": "state",
    "reason": "reason",
    "priority": "priority",
    "attempts": "attempts",
    "created_at": "created",
    "finished_at": "ended",
    "error": "error",
    "description": "description",
}
# What a search adds.
FOUND = {"bytes": "bytes", "excerpt": "found"}
ATTEMPTS = {
    "attempt": "attempt",
    "outcome": "outcome",
    "worker_id": "worker",
    "started_at": "started",
    "finished_at": "finished",
    "error": "error",
}

STEPS = {
    "name": "step",
    "finished_at": "finished",
    "claim": "claim",
    "failures": "failures",
    "value": "value",
}

# How far a list reads, in queue.search's bytes: 100 per job.
GLANCE = 2_000_000


@jobs.command("ls")
def ls(
    queue: Queue = None,
    state: State = None,
    task: Task = None,
    limit: Limit = 20,
    before: Before = None,
    no_limit: Annotated[
        bool, typer.Option("--no-limit", help="Continue, however many jobs there are to read.")
    ] = False,
    dsn: DSN = None,
    dsns: DSNS = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first. Exits with 13 if it stopped before it found enough.

    With --dsns it also does so if a database could not be asked.
    """
    if dsns is not None and before is not None:
        fail(Exit.USAGE, "--before is for one database, as each has its own ids: give --limit.")
    asked = {"queue": queue, "task": task, "before": before, "max_jobs": limit}
    asked |= {"pattern": None, "by": "text", "max_bytes": None if no_limit else GLANCE}

    patience = None if no_limit else PATIENCE
    with databases(dsn, dsns, as_json=as_json, patience=patience) as on:
        rows = _newest(on.ask(lambda on: _find(on, asked, state, limit)), limit)
        columns = COLUMNS if dsns is None else {"database": "database", **COLUMNS}
        if not _show_found(rows, columns, limit):
            raise typer.Exit(Exit.PARTLY)


@jobs.command("search")
def search(
    pattern: Annotated[str, typer.Argument(help="The text to search for.", show_default=False)],
    queue: Queue = None,
    state: State = None,
    task: Task = None,
    path: Annotated[
        bool, typer.Option("--path", help="PATTERN is a jsonpath: $.items[*] ? (@.price > 3)")
    ] = False,
    key: Annotated[
        bool,
        typer.Option(
            "--key",
            help="PATTERN is a whole lock, queueing lock, idempotency key or concurrency key.",
        ),
    ] = False,
    limit: Limit = 20,
    before: Before = None,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", min=1, help="Stop after reading this many bytes of args.")
    ] = 50_000_000,
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Read all jobs.")] = False,
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Search jobs by their args, newest first. Exits with 13 if it did not read all of them."""
    if path and key:
        fail(Exit.USAGE, "--path and --key exclude each other")
    asked = {
        "pattern": pattern,
        "by": "path" if path else "key" if key else "text",
        "queue": queue,
        "task": task,
        "before": before,
        "max_jobs": limit,
        "max_bytes": None if no_limit else max_bytes,
    }
    with session(dsn, as_json=as_json) as on:
        rows = _find(on, asked, state, limit)
    left_out = ("priority", "attempts", "finished_at", "error")
    columns = {key: name for key, name in COLUMNS.items() if key not in left_out} | FOUND
    if not _show_found(rows, columns, limit):
        raise typer.Exit(Exit.PARTLY)


def _find(on: Session, asked: dict[str, Any], states: list[str] | None, limit: int) -> Rows:
    """Search in each state; return the newest jobs, and a last row if there are more."""
    names = [name for text in states or () for name in text.split(",")]
    wanted: list[str] | list[None] = list(dict.fromkeys(names)) or [None]
    parts = [on.call(sql.SEARCH, asked | {"state": state}) for state in wanted]
    rows = functools.reduce(operator.add, parts)
    if len(parts) == 1:
        return rows
    ids = [row["id"] for row in rows.values]
    found = sorted({at for at, id in enumerate(ids) if id is not None}, key=lambda at: -ids[at])
    more = [row["next_id"] for row in rows.values if row["id"] is None]
    shown = rows.pick(found[:limit])
    if len(found) > limit:
        more.append(ids[found[limit - 1]])
    if more:
        shown.values.append({"id": None, "next_id": max(more)})
        if shown.texts is not None:
            shown.texts.append("")
    return shown


def _newest(found: Mapping[str | None, Rows], limit: int) -> Rows:
    """Return the newest jobs of all databases, and a last row if there are more.

    That row has `is_cut` if a search stopped before it found enough: it may have missed newer ones.
    """
    if None in found:
        return found[None]
    rows = named(found)
    is_cut = any(
        len(each.values) <= limit and each.values[-1]["id"] is None
        for each in found.values()
        if each.values
    )
    jobs = [at for at, row in enumerate(rows.values) if row["id"] is not None]
    newest = sorted(jobs, key=lambda at: _created(rows.values[at]), reverse=True)
    shown = rows.pick(newest[:limit])
    if len(newest) > limit or len(jobs) < len(rows.values):
        shown.values.append({"id": None, "next_id": None, "is_cut": is_cut})
    return shown


def _created(row: Mapping[str, Any]) -> dt.datetime:
    """Return when a job was deferred: JSON has it as text."""
    value: dt.datetime | str = row["created_at"]
    return dt.datetime.fromisoformat(value) if isinstance(value, str) else value


def _show_found(rows: Rows, columns: dict[str, str], limit: int) -> bool:
    """Print the jobs that a search found, and below them that there may be more."""
    more = None
    if rows.values and rows.values[-1]["id"] is None:
        more = rows.values.pop()
    if rows.texts is not None:
        left_out = {"next_id", *FOUND} - columns.keys()
        rows.texts = [
            json.dumps(
                {key: value for key, value in row.items() if key not in left_out},
                ensure_ascii=False,
                separators=(",", ":"),
            )
            for row in rows.values
        ]
    for row in rows.values:
        row |= {key: row[key] or None for key in ("priority", "attempts")}
        if row["error"]:
            row["error"] = first_line(row["error"])
    least = ["bytes", "attempts", "priority", "created_at", "reason"]
    if "excerpt" in columns:
        least.insert(1, "description")
    is_all = more is None or (len(rows.values) >= limit and not more.get("is_cut"))
    empty = "No such jobs." if is_all else "None of the newest jobs."
    _show.table(rows, columns, least=least, folded=("excerpt",), empty=empty)
    if more is not None:
        how = "--limit" if more["next_id"] is None else f"--before {more['next_id']}"
        hint = "" if is_all else ", or --no-limit"
        err.print(Text(f"There may be more: {how}{hint}"))
    return is_all


@jobs.command("show")
def show(
    id: Id,
    full: Annotated[bool, typer.Option("--full", help="Show values in full.")] = False,
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Show a job: its state, args, result, steps and attempts."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.JOB, {"id": id})
        attempts = on.call(sql.ATTEMPTS, {"id": id})
        steps = on.call(sql.FINISHED_STEPS, {"id": id})
    if not rows.values:
        fail_for_missing("job", id)
    if rows.texts is not None:
        lists = {"history": attempts.texts or (), "steps": steps.texts or ()}
        more = "".join(f',"{name}":[{", ".join(texts)}]' for name, texts in lists.items())
        _show.write(f"{rows.texts[0].rstrip()[:-1]}{more}}}")
        return
    _show.record(rows.values[0], full=full)
    if steps.values:
        out.print()
        _show.table(steps, STEPS, least=("claim", "finished_at"), folded=("value",))
    if attempts.values:
        out.print()
        _show.table(attempts, ATTEMPTS, least=("started_at", "worker_id"), folded=("error",))
    for attempt in attempts.values if full else attempts.values[-1:]:
        match attempt["details"]:  # any JSON: they are the client's
            case {"traceback": str(told)}:
                out.print()
                out.print(
                    Text(f"attempt {attempt['attempt']}: ")
                    + Text("\n".join(map(escaped, told.splitlines())))
                )


@jobs.command("get")
def get(
    path: Annotated[str, typer.Argument(help="As items[0].price, or any jsonpath.")],
    id: Id,
    dsn: DSN = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all matches as one array.")
    ] = False,
    as_raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Print texts without quotes, and bytes, dates and so on as such."
        ),
    ] = False,
) -> None:
    """Print what a path finds in a job's args, as JSON. Exits with 14 if it finds nothing."""
    if as_raw and as_json:
        fail(Exit.USAGE, "--raw and --json exclude each other")
    with session(dsn) as on:
        rows = on.call(sql.GET, {"id": id, "path": path})
        values = [row["value"] for row in rows.values]
        raws = [raw(value) for value in values] if as_raw else []
    if raws:
        _show.write_raw(raws)
    elif as_json:
        _show.print_json(values)
    elif values:
        _show.write("\n".join(values))
    else:
        err.print(Text(f"There is nothing at {_show.escaped(path)}."))
    if not values:
        raise typer.Exit(Exit.NOTHING)


@jobs.command("why")
def why(id: Id, dsn: DSN = None, as_json: AsJson = False) -> None:
    """Say why a job is not running."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.WHY, {"id": id})
    _show.answer(rows, lambda row: _show.escaped(row["why"]))


@jobs.command("tail")
def tail(
    queue: Queue = None,
    task: Task = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Begin with this many finished jobs.")
    ] = 10,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Continue until interrupted.")
    ] = True,
    interval: Interval = 0.5,
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Print jobs as they end."""
    asked: dict[str, Any] = {"queue": queue, "task": task}
    with contextlib.suppress(KeyboardInterrupt), session(dsn, as_json=as_json) as on:
        # no query goes back further than the first, which finds the jobs not to be shown
        asked["start"] = on.one(sql.NOW)
        since: Any = None
        seen = {_key(row) for row in on.call(sql.ENDED_SINCE, asked | {"since": since}).values}
        if lines:
            rows = on.call(sql.ENDED_LATELY, asked | {"n": lines})
            rows = rows.pick(range(len(rows.values))[::-1])
            seen |= {_key(row) for row in rows.values}
            _show_ended(rows)
        while follow:
            time.sleep(interval)
            # a job that ends in a long transaction becomes visible after jobs that ended later
            rows = on.call(sql.ENDED_SINCE, asked | {"since": since})
            keys = [_key(row) for row in rows.values]
            _show_ended(rows.pick([at for at, key in enumerate(keys) if key not in seen]))
            if keys and keys[-1] not in seen:  # otherwise the last one was retried or deleted
                since = keys[-1][1]
            seen = {*keys}


def _key(row: dict[str, Any]) -> tuple[int, Any]:
    """Return a key of a job's end, because a retried job ends again."""
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
        error = "" if row["error"] is None else f": {_show.short(_show.escaped(row['error']), 120)}"
        names = f" {row['id']} {_show.escaped(row['task'])} ({_show.escaped(row['queue'])})"
        out.print(line.append(names + took + error), soft_wrap=True)


# Claiming by hand


@jobs.command("next")
def take_next(
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="[QUEUE]...", help="Names, prefix* or *.")
    ] = None,
    peek: Annotated[bool, typer.Option("--peek", help="Only look.")] = False,
    ack: Annotated[bool, typer.Option("--ack", help="Mark it as succeeded at once.")] = False,
    lease: Annotated[
        str, typer.Option(help="How long the claim is valid. After that the job has crashed.")
    ] = "20 minutes",
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Claim the next job. Report its outcome with the claim: queue.succeed(id, claim).

    Exits with 14 if there is none.
    """
    if peek and ack:
        fail(Exit.USAGE, "--peek and --ack exclude each other")
    asked: dict[str, Any] = {"queues": queues or None}
    with session(dsn, as_json=as_json) as on:
        if peek:
            rows = on.call(sql.PEEK, asked | {"n": 1})
        else:
            rows = on.call(sql.NEXT, asked | {"ack": ack, "lease": lease})
    if not rows.values:
        err.print("There is no job to take.", highlight=False)
        raise typer.Exit(Exit.NOTHING)
    _show.only_record(rows)

"""`pgdefer queue`: see, make, pause, configure and remove queues."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from pgdefer import _sql

from . import _complete, _show
from ._base import DSN, AsJson, DryRun, Exit, Rows, Yes, confirm, fail, out, session

queues = typer.Typer(help="Queues.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(metavar="QUEUE", help="The queue's name.", autocompletion=_complete.queue),
]
Pattern = Annotated[
    str | None,
    typer.Argument(
        metavar="[QUEUE]", help="A queue's name, prefix* or *.", autocompletion=_complete.queue
    ),
]
Task = Annotated[
    str | None,
    typer.Option("--task", "-t", help="Of this task only.", autocompletion=_complete.task),
]

COLUMNS = {
    "name": "queue",
    "ready": "ready",
    "running": "running",
    "max_running": "max running",
    "rate": "rate",
    "retain": "retain",
    "paused_until": "paused",
}


@queues.command("ls")
def ls(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the queues."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(_sql.QUEUES)
    _show_queues(rows)


def _show_queues(rows: Rows) -> None:
    for row in rows.values:
        if row["paused_until"] == "infinity":
            row["paused_until"] = "until resumed"
    _show.table(rows, COLUMNS, least=("retain", "rate"), empty="There are no queues.")


@queues.command("create")
def create(
    name: Name,
    paused: Annotated[bool, typer.Option("--paused", help="Nothing starts until resumed.")] = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Make a queue known. Not needed before deferring."""
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(_sql.CREATE_QUEUE, {"name": name, "paused": paused})
    if rows.texts is not None:
        _show.print_json(rows.texts)
    else:
        is_new = rows.values[0]["is_new"]
        out.print(
            f"{_show.plain(name)}: {'made' if is_new else 'is there already'}",
            markup=False,
            highlight=False,
        )


@queues.command("delete")
def delete(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Even with unfinished jobs, which go too.")
    ] = False,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Remove a queue with its settings and all its jobs."""
    confirm(f"Remove the queue {_show.plain(name)} and all its jobs?", yes=yes, dry_run=dry_run)
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(_sql.DELETE_QUEUE, {"name": name, "force": force})
    if rows.texts is not None:
        _show.print_json(rows.texts)
    else:
        out.print(f"{_show.count(rows.values[0]['jobs'], 'job')} removed", highlight=False)


@queues.command("pause")
def pause(
    queue: Pattern = None,
    every: Annotated[bool, typer.Option("--all", help="All queues.")] = False,
    until: Annotated[
        str | None, typer.Option(help="Until then, as 2030-01-31 09:00; without: until resumed.")
    ] = None,
    task: Task = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Let no job of a queue, or of a task, start. Running ones go on."""
    _check_which(queue, task, every=every)
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(_sql.PAUSE, {"queue": queue, "until": until, "task": task})
    _show_concerned(rows)


@queues.command("resume")
def resume(
    queue: Pattern = None,
    every: Annotated[bool, typer.Option("--all", help="All queues.")] = False,
    task: Task = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """End a pause."""
    _check_which(queue, task, every=every)
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(_sql.RESUME, {"queue": queue, "task": task})
    _show_concerned(rows)


def _check_which(queue: str | None, task: str | None, *, every: bool) -> None:
    if every and queue is not None:
        fail(Exit.USAGE, "name a queue, or pass --all, not both")
    if not every and queue is None and task is None:
        fail(Exit.USAGE, "name a queue or pass --task or --all")


def _show_concerned(rows: Rows) -> None:
    if rows.texts is not None:
        _show.print_json(rows.texts)
    else:
        number = rows.values[0]["jobs"]
        verb = "is" if number == 1 else "are"
        out.print(f"{_show.count(number, 'job')} {verb} concerned", highlight=False)


@queues.command("configure")
def configure(
    name: Name,
    max_running: Annotated[
        str | None, typer.Option(metavar="N|none", help="Run at most so many at once.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="N/INTERVAL|none", help="Start at most N in any INTERVAL: 10/1min."),
    ] = None,
    retain: Annotated[
        str | None, typer.Option(metavar="INTERVAL|none", help="Keep finished jobs so long.")
    ] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Set a queue's limits; what is not given stays as it is, none removes a limit."""
    given = {"max_running": max_running, "rate": rate, "retain": retain}
    given = {key: value for key, value in given.items() if value is not None}
    if not given:
        fail(Exit.USAGE, "pass --max-running, --rate or --retain")
    options: dict[str, Any] = {
        key: None if value == "none" else value for key, value in given.items()
    }
    if options.get("max_running"):
        options["max_running"] = _number(options["max_running"])
    if options.get("rate"):
        limit, _, per = options["rate"].partition("/")
        options["rate"] = {"limit": _number(limit), "per": per}
    parameters = {"name": name, "options": json.dumps(options)}
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        on.call(_sql.CONFIGURE_QUEUE, parameters)
        rows = on.call(_sql.QUEUE, {"name": name})
    _show_queues(rows)


def _number(text: str) -> int | str:
    """Return a number as one; what is none the function refuses."""
    return int(text) if text.isascii() and text.isdigit() else text

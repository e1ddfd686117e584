"""`pgdefer queue`: lists, creates, pauses, configures and removes queues.

Tests: integration/test_cli_queues.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from pgdefer.database import sql

from . import _complete, _show
from ._base import (
    DSN,
    AsJson,
    DryRun,
    Exit,
    Rows,
    Yes,
    confirm,
    fail,
    is_whole,
    out,
    session,
    typed,
)
from ._job import Task
from ._misspelt import doubted

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

# The options of `configure` by the names that they have in messages.
OPTIONS = {"rate": "--rate", "max_running": "--max-running", "retain": "--retain"}

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
        rows = on.call(sql.QUEUES)
    _show_queues(rows)


def _show_queues(rows: Rows) -> None:
    for row in rows.values:
        if row["paused_until"] == "infinity":
            row["paused_until"] = "until resumed"
    _show.table(rows, COLUMNS, least=("retain", "rate"), empty="There are no queues.")


@queues.command("create")
def create(
    name: Name,
    paused: Annotated[bool, typer.Option("--paused", help="Start nothing until resumed.")] = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Create a queue. Deferring a job also creates its queue."""
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(sql.CREATE_QUEUE, {"name": name, "paused": paused})
    if rows.texts is not None:
        _show.print_json(rows.texts)
    else:
        what = "made" if rows.values[0]["is_new"] else "exists already"
        if paused and not rows.values[0]["is_new"]:
            what += ", so --paused has no effect: use pgdefer queue pause"
        out.print(f"{_show.escaped(name)}: {what}", markup=False, highlight=False)


@queues.command("delete")
def delete(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Also if it has unfinished jobs; they are removed too.")
    ] = False,
    yes: Yes = False,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Remove a queue with its settings and all its jobs."""
    confirm(f"Remove the queue {_show.escaped(name)} and all its jobs?", yes=yes, dry_run=dry_run)
    names = {"pass force => true": "pass --force"}
    with session(dsn, as_json=as_json, dry_run=dry_run) as on, typed(names):
        rows = on.call(sql.DELETE_QUEUE, {"name": name, "force": force})
    _show_jobs(rows, "removed")


@queues.command("pause")
def pause(
    queue: Pattern = None,
    every: Annotated[bool, typer.Option("--all", help="All queues.")] = False,
    until: Annotated[
        str | None, typer.Option(help="Until this time, not until resumed: 2030-01-31 09:00.")
    ] = None,
    task: Task = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Stop jobs of a queue, or of a task, from starting. Running jobs continue."""
    _check_which(queue, task, every=every)
    with (
        session(dsn, as_json=as_json, dry_run=dry_run) as on,
        doubted(on, queue=queue, task=task),
    ):
        rows = on.call(sql.PAUSE, {"queue": queue, "until": until, "task": task})
    _show_jobs(rows, "affected", f"{_named(queue, task)}: paused, ")


@queues.command("resume")
def resume(
    queue: Pattern = None,
    every: Annotated[bool, typer.Option("--all", help="All queues.")] = False,
    task: Task = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """End a pause: of a task, or of a queue and all tasks in it."""
    _check_which(queue, task, every=every)
    with (
        session(dsn, as_json=as_json, dry_run=dry_run) as on,
        doubted(on, queue=queue, task=task),
    ):
        rows = on.call(sql.RESUME, {"queue": queue, "task": task})
    _show_jobs(rows, "affected", f"{_named(queue, task)}: resumed, ")


def _check_which(queue: str | None, task: str | None, *, every: bool) -> None:
    if every and queue is not None:
        fail(Exit.USAGE, "name a queue, or pass --all, not both")
    if not every and queue is None and task is None:
        fail(Exit.USAGE, "name a queue or pass --task or --all")


def _named(queue: str | None, task: str | None) -> str:
    """Return what pause and resume were called for."""
    queues = "all queues" if queue is None else queue
    return _show.escaped(queues if task is None else f"{task} in {queues}")


def _show_jobs(rows: Rows, what: str, done: str = "") -> None:
    """Print what was done, and how many jobs were affected, or removed."""
    if rows.texts is not None:
        _show.print_json(rows.texts)
    else:
        count = _show.count_of(rows.values[0]["jobs"], "job")
        out.print(f"{done}{count} {what}", markup=False, highlight=False)


@queues.command("configure")
def configure(
    name: Name,
    max_running: Annotated[
        str | None, typer.Option(metavar="N|none", help="How many jobs may run at once.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="N/INTERVAL|none", help="Start at most N in any INTERVAL: 10/1min."),
    ] = None,
    retain: Annotated[
        str | None, typer.Option(metavar="INTERVAL|none", help="How long to keep finished jobs.")
    ] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Set a queue's limits; other settings stay, none removes a limit."""
    changes = {"max_running": max_running, "rate": rate, "retain": retain}
    changes = {key: value for key, value in changes.items() if value is not None}
    if not changes:
        fail(Exit.USAGE, "pass --max-running, --rate or --retain")
    options: dict[str, Any] = {
        key: None if value == "none" else value for key, value in changes.items()
    }
    if options.get("max_running"):
        options["max_running"] = _number(options["max_running"])
    if options.get("rate"):
        limit, _, per = options["rate"].partition("/")
        if not per:
            fail(Exit.USAGE, f"--rate is N/INTERVAL, such as 10/1min, not {options['rate']}")
        options["rate"] = {"limit": _number(limit), "per": per}
    parameters = {"name": name, "options": json.dumps(options)}
    names = {"per": "--rate, INTERVAL"} | OPTIONS
    names['Pass {"limit": 10, "per": "1 minute"}.'] = "Give N/INTERVAL, such as 10/1min."
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        with typed(names), doubted(on, queue=name, may_be_new=True):
            on.call(sql.CONFIGURE_QUEUE, parameters)
        rows = on.call(sql.QUEUE, {"name": name})
    _show_queues(rows)


def _number(text: str) -> int | str:
    """Return a number as an int. The database refuses other texts."""
    return int(text) if is_whole(text) else text

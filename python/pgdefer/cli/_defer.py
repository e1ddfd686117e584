"""`pgdefer defer`: defers a job from the shell."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from pgdefer import _sql

from . import _complete, _show
from ._base import DSN, AsJson, DryRun, out, session


def defer(
    task: Annotated[
        str,
        typer.Argument(help="The task's name.", show_default=False, autocompletion=_complete.task),
    ],
    args: Annotated[
        str, typer.Argument(metavar="[JSON]", help="Its args, a JSON object; - reads stdin.")
    ] = "{}",
    queue: Annotated[
        str | None, typer.Option("--queue", "-q", autocompletion=_complete.queue)
    ] = None,
    priority: Annotated[int | None, typer.Option("--priority", "-p")] = None,
    lock: Annotated[str | None, typer.Option()] = None,
    queueing_lock: Annotated[str | None, typer.Option()] = None,
    at: Annotated[str | None, typer.Option(help="Not before: 2030-01-31 09:00.")] = None,
    deadline: Annotated[str | None, typer.Option()] = None,
    needs: Annotated[
        list[int] | None, typer.Option("--needs", metavar="ID", help="After this job.")
    ] = None,
    concurrency_key: Annotated[str | None, typer.Option()] = None,
    concurrency_limit: Annotated[int | None, typer.Option()] = None,
    options: Annotated[
        str | None, typer.Option(metavar="JSON", help="The options of queue.defer.")
    ] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Defer a job and print its id. What is not given takes the task's defaults."""
    text = sys.stdin.read() if args == "-" else args
    _show.check_json(args=text, options=options)
    asked: dict[str, Any] = {
        "task": task,
        "args": text,
        "queue": queue,
        "priority": priority,
        "lock": lock,
        "queueing_lock": queueing_lock,
        "scheduled_at": at,
        "deadline": deadline,
        "needs": needs or None,
        "concurrency_key": concurrency_key,
        "concurrency_limit": concurrency_limit,
        "options": options,
    }
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(_sql.DEFER_ONE, asked)
    if rows.texts is not None:
        _show.write(rows.texts[0])
    else:
        out.print(str(rows.values[0]["id"]), highlight=False)

"""`pgdefer defer`: defers a job from the shell.

Tests: integration/test_cli_queues.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from pgdefer.database import sql

from . import _complete, _show
from ._base import DSN, AsJson, DryRun, session, typed
from ._misspelt import doubted

# The options by the names that they have in messages.
NAMES = {
    "scheduled_at": "--at",
    "delay": "--delay",
    "timeout": "--timeout",
    "queueing_lock": "--queueing-lock",
    "concurrency_key": "--concurrency-key",
    "concurrency_limit": "--concurrency-limit",
    "idempotency_key": "--idempotency-key",
    "unique_for": "--unique-for",
}


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
    delay: Annotated[
        str | None,
        typer.Option("--delay", "--in", help="Start it after this much time: '5 minutes'."),
    ] = None,
    retry: Annotated[
        int | None,
        typer.Option(min=1, help="The failure at which to give up; overrides the task's."),
    ] = None,
    timeout: Annotated[str | None, typer.Option(help="The limit of each attempt: '30 s'.")] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="Print the first job's id if this key of the task is in use."),
    ] = None,
    unique_for: Annotated[
        str | None, typer.Option(help="How long the key is in use: '1 hour'; a day by default.")
    ] = None,
    options: Annotated[
        str | None, typer.Option(metavar="JSON", help="The options of queue.defer.")
    ] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Defer a job and print its id. Options that are left out take the task's defaults."""
    text = _show.given(args)
    _show.check_json(args=text, options=options)
    named = {
        "delay": delay,
        "timeout": timeout,
        "idempotency_key": idempotency_key,
        "unique_for": unique_for,
    }
    given_options = {name: value for name, value in named.items() if value is not None}
    more = given_options | ({"retry": {"max_attempts": retry}} if retry is not None else {})
    if more:
        options = json.dumps((json.loads(options) if options else {}) | more)
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
    with (
        session(dsn, as_json=as_json, dry_run=dry_run) as on,
        typed(NAMES),
        doubted(on, task=task, may_be_new=True),
    ):
        rows = on.call(sql.DEFER_ONE, asked)
    _show.answer(rows, lambda row: str(row["id"]))

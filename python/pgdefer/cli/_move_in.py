"""`pgdefer move-in`: takes over the waiting jobs of another queue in the same database.

Tests: integration/test_move_in.py.
"""

from __future__ import annotations

import enum
import importlib
import json
import sys
from typing import Annotated, Any, NoReturn

import psycopg
import typer

from pgdefer.database import move_in_sql
from pgdefer.errors import PgDeferError, translate

from . import _move_in_solid_queue, _show
from ._base import DSN, AsJson, DryRun, Exit, Session, fail, one_line, out, reported, session


class Origin(enum.StrEnum):
    """The queues whose jobs can be moved in."""

    procrastinate = "procrastinate"
    tasks = "tasks"
    django_tasks_db = "django-tasks-db"
    solid_queue = "solid-queue"
    steady_queue = "steady-queue"


# How many jobs are moved at once.
SOME = 1000
# Their arguments need the project's code.
_DJANGO = (Origin.django_tasks_db, Origin.steady_queue)


# Of each: how to keep others from its table, to find the next job, to move some, and to count what
# is left.
STATEMENTS = {
    Origin.procrastinate: (
        move_in_sql.PROCRASTINATE_LOCK,
        move_in_sql.PROCRASTINATE_NEXT,
        move_in_sql.PROCRASTINATE,
        move_in_sql.PROCRASTINATE_LEFT,
    ),
    Origin.tasks: (
        move_in_sql.TASKS_LOCK,
        move_in_sql.TASKS_NEXT,
        move_in_sql.TASKS,
        move_in_sql.TASKS_LEFT,
    ),
}


def move_in(
    origin: Annotated[Origin, typer.Argument(help="The other queue.", show_default=False)],
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Take over the waiting jobs of another queue, all or none.

    They keep args, queue, priority, locks and times, and are ended there. If the queueing lock of a
    job is taken here, it becomes the job that has the lock. The other queue's workers may continue:
    their running jobs, and jobs behind those for the same lock, stay there. `tasks` is a table with
    that name, with the columns id (a number), task_type, payload, status, priority, retries,
    max_retries, finished_at and error. For `django-tasks-db` and `steady-queue` use manage.py:
    their arguments need the project's code.
    """
    if origin in _DJANGO:
        counts = _from_django(origin, dry_run=dry_run)
    elif origin is Origin.solid_queue:
        with session(dsn, dry_run=dry_run) as on:
            counts = _move_in_solid_queue.move_in(on)
    else:
        with session(dsn, dry_run=dry_run) as on:
            counts = _by_sql(on, origin)
    if as_json:
        _show.write(json.dumps(counts))
        return
    lines = {
        "moved": "waiting jobs moved",
        "locked": "of these have a lock",
        "limited": "of these have a concurrency key",
        "scheduled": "of these are scheduled for later",
        "behind": "stay behind a running job of the same lock or key: run this again later",
        "running": "still run there",
        "failed": "have failed there, and stay",
        "recurring": "recurring tasks stay: declare them here",
        "paused": "queues are paused there: pause them here",
    }
    for name, text in lines.items():
        if name in counts:
            out.print(f"{counts[name]} {text}", highlight=False)


def _by_sql(on: Session, origin: Origin) -> dict[str, int]:
    lock, _, move, count = STATEMENTS[origin]
    counts = {"moved": 0, "locked": 0, "scheduled": 0}
    with on.transaction():
        with move_in_sql.tables_of(origin.value):
            on.execute(lock)
        if origin is Origin.tasks:
            _check_columns(on)
        after = move_in_sql.BELOW_ALL
        while True:
            try:
                with on.transaction():
                    (row,) = on.call(move, _some(after, SOME)).values
            except psycopg.Error as error:
                _name_row(on, origin, after, error)
            if not row["found"]:
                break
            after = row["last"]
            counts["moved"] += row["found"]
            counts["locked"] += row["locked"]
            counts["scheduled"] += row["scheduled"]
        return counts | on.call(count).values[0]


def _check_columns(on: Session) -> None:
    """Raise PgDeferError if the table `tasks` is of another kind."""
    lacks = on.one(move_in_sql.TASKS_LACKS)
    if lacks is not None:
        raise PgDeferError(
            f"the table tasks lacks columns: {lacks}",
            hint="Rows of other tables can be moved by queue.defer_many.",
        )


def _some(after: int, most: int) -> dict[str, Any]:
    return {"after": after, "most": most, "options": json.dumps(move_in_sql.UNCHANGED)}


def _name_row(on: Session, origin: Origin, after: int, error: psycopg.Error) -> NoReturn:
    """Raise the error with the id of the refused row: move the rows one by one up to it."""
    _, find, move, _ = STATEMENTS[origin]
    for _ in range(SOME if translate(error) is not None else 0):
        if (id := on.one(find, {"after": after})) is None:
            break
        try:
            with on.transaction():
                on.call(move, _some(after, 1))
        except psycopg.Error as one:
            refused = translate(one) or PgDeferError(one_line(one))
            refused.message = f"the row with id {id} can't be moved: {refused.message}"
            raise refused from one
        after = id
    raise error


def _from_django(origin: Origin, *, dry_run: bool) -> dict[str, int]:
    """Return the counts of a project, whose command has set it up."""
    django = sys.modules.get("django.apps")
    if django is None or not django.apps.ready:
        fail(
            Exit.USAGE, f"the project's tasks are needed: manage.py pgdefer move-in {origin.value}"
        )
    with reported():
        try:
            moving = importlib.import_module("pgdefer.contrib.django.move_in")
        except ModuleNotFoundError as error:
            if error.name != "django.tasks":
                raise
            fail(Exit.USAGE, f"move-in {origin.value} needs Django 6, with django.tasks")
        found: dict[str, int] = moving.move_in(origin.value, dry_run=dry_run)
        return found

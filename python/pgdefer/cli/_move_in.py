"""`pgdefer move-in`: takes over the waiting jobs of another queue in the same database."""

from __future__ import annotations

import enum
import importlib
import json
import sys
from typing import Annotated

import typer

from pgdefer.database import sql
from pgdefer.database.sql import Statement

from . import _show
from ._base import DSN, AsJson, DryRun, Exit, Session, fail, out, reported, session


class Origin(enum.StrEnum):
    """The queues whose jobs can be moved in."""

    procrastinate = "procrastinate"
    tasks = "tasks"
    django_tasks_db = "django-tasks-db"


# Of each: how to keep others from its table, to move a thousand jobs, and to count what is left.
STATEMENTS = {
    Origin.procrastinate: (
        sql.MOVE_IN_PROCRASTINATE_LOCK,
        sql.MOVE_IN_PROCRASTINATE,
        sql.MOVE_IN_PROCRASTINATE_LEFT,
    ),
    Origin.tasks: (sql.MOVE_IN_TASKS_LOCK, sql.MOVE_IN_TASKS, sql.MOVE_IN_TASKS_LEFT),
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
    that name, with the columns task_type, payload, status, priority, retries and max_retries.
    For `django-tasks-db` use manage.py: its arguments need the project's code.
    """
    if origin is Origin.django_tasks_db:
        counts = _from_django(dry_run=dry_run)
    else:
        with session(dsn, dry_run=dry_run) as on:
            counts = _by_sql(on, *STATEMENTS[origin])
    if as_json:
        _show.write(json.dumps(counts))
        return
    lines = {
        "moved": "waiting jobs moved",
        "locked": "of these have a lock",
        "scheduled": "of these are scheduled for later",
        "behind": "stay behind a running job of the same lock: run this again later",
        "running": "still run there",
    }
    for name, text in lines.items():
        out.print(f"{counts[name]} {text}", highlight=False)


def _by_sql(on: Session, lock: Statement, move: Statement, count: Statement) -> dict[str, int]:
    counts = {"moved": 0, "locked": 0, "scheduled": 0}
    with on.transaction():
        on.execute(lock)
        after = 0
        while True:
            (row,) = on.call(move, {"after": after}).values
            if not row["found"]:
                break
            after = row["last"]
            counts["moved"] += row["found"]
            counts["locked"] += row["locked"]
            counts["scheduled"] += row["scheduled"]
        return counts | on.call(count).values[0]


def _from_django(*, dry_run: bool) -> dict[str, int]:
    """Return the counts of a project, whose command has set it up."""
    django = sys.modules.get("django.apps")
    if django is None or not django.apps.ready:
        fail(
            Exit.USAGE, "the project's tasks are needed: manage.py pgdefer move-in django-tasks-db"
        )
    with reported():
        moving = importlib.import_module("pgdefer.contrib.django.move_in")
        found: dict[str, int] = moving.move_in(dry_run=dry_run)
        return found

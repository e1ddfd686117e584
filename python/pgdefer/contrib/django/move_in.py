"""Moving in the waiting tasks of django-tasks-db: `manage.py pgdefer move-in django-tasks-db`."""

# mypy: disable-error-code="type-arg"
# Tasks are generic for type checkers only.

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from django.db import connections, transaction
from django.tasks import Task
from django.utils.module_loading import import_string

from pgdefer.contrib.django import app, conf
from pgdefer.contrib.django.backend import PgDeferBackend, PgDeferTask
from pgdefer.database import sql
from pgdefer.errors import PgDeferError
from pgdefer.tasks.prepared import PreparedJob

__all__ = ["move_in"]


def move_in(*, dry_run: bool) -> dict[str, int]:
    """Take over the waiting tasks, all or none, and return how many; a dry run changes nothing.

    They become jobs of the TASKS backend, which must be this queue's by now.
    """
    alias = conf.read().DATABASE
    connection = connections[alias]
    counts = {"moved": 0, "locked": 0, "scheduled": 0, "behind": 0}
    with transaction.atomic(using=alias):
        with connection.cursor() as cursor:
            cursor.execute(sql.MOVE_IN_DJANGO_LOCK.text)
        while rows := app.client.call(sql.MOVE_IN_DJANGO, {}, connection):
            calls = [_call(row) for row in rows]
            jobs = app.defer_many(calls)
            moved = {"ids": [row[0] for row in rows], "jobs": [job.id for job in jobs]}
            app.client.call(sql.MOVE_IN_DJANGO_END, moved, connection)
            counts["moved"] += len(rows)
            counts["scheduled"] += sum(row[-1] for row in rows)
        ((counts["running"],),) = app.client.call(sql.MOVE_IN_DJANGO_LEFT, {}, connection)
        if dry_run:
            transaction.set_rollback(True, using=alias)
    return counts


def _call(row: Sequence[Any]) -> PreparedJob[Any]:
    """Return the call of a task, with its arguments by name."""
    id, path, given, priority, queue, run_after, _ = row
    try:
        task = import_string(path)
    except ImportError as error:
        raise PgDeferError(f"the task {path!r} of {id} can't be imported: {error}") from error
    backend = task.get_backend() if isinstance(task, Task) else None
    if not isinstance(task, PgDeferTask) or not isinstance(backend, PgDeferBackend):
        raise PgDeferError(
            f"{path!r} of {id} is no task of this queue",
            hint="Put PgDeferBackend into TASKS first, under the name that the task has there.",
        )
    headers = {**task.options.get("headers", {}), "django_tasks_db": {"id": id}}
    changed = {"priority": priority, "queue_name": queue, "run_after": run_after}
    values = json.loads(given)
    return backend.prepared(
        task.using(headers=headers, idempotency_key="", **changed), values["args"], values["kwargs"]
    )

"""Moving in the waiting tasks of another backend: `manage.py pgdefer move-in steady-queue`.

Tests: contrib/test_django_steady.py.
"""

# mypy: disable-error-code="type-arg"
# Tasks are generic for type checkers only.

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from django.apps import apps
from django.db import connections, models, transaction
from django.tasks import Task
from django.utils.module_loading import import_string

from pgdefer.contrib.django import app, conf
from pgdefer.contrib.django.backend import PgDeferBackend, PgDeferTask
from pgdefer.database import move_in_sql
from pgdefer.errors import PgDeferError
from pgdefer.options import limit_of_semaphore
from pgdefer.tasks.prepared_job import PreparedJob

__all__ = ["move_in"]


def move_in(origin: str, *, dry_run: bool) -> dict[str, int]:
    """Take over the waiting tasks, all or none, and return how many; a dry run changes nothing.

    They become jobs of the TASKS backend, which must be this queue's by now.
    """
    alias = conf.read().DATABASE
    move = {"django-tasks-db": _from_tasks_db, "steady-queue": _from_steady}[origin]
    with transaction.atomic(using=alias):
        counts = move(connections[alias])
        if dry_run:
            transaction.set_rollback(True, using=alias)
    return counts


def _from_tasks_db(connection: Any) -> dict[str, int]:
    counts = {"moved": 0, "locked": 0, "scheduled": 0, "behind": 0}
    with move_in_sql.tables_of("django-tasks-db"), connection.cursor() as cursor:
        cursor.execute(move_in_sql.DJANGO_LOCK.text)
    while rows := app.client.call(move_in_sql.DJANGO, {}, connection):
        jobs = app.defer_many([_tasks_db_call(row) for row in rows])
        moved = {"ids": [row[0] for row in rows], "jobs": [job.id for job in jobs]}
        app.client.call(move_in_sql.DJANGO_END, moved, connection)
        counts["moved"] += len(rows)
        counts["scheduled"] += sum(row[-1] for row in rows)
    ((counts["running"],),) = app.client.call(move_in_sql.DJANGO_LEFT, {}, connection)
    return counts


def _tasks_db_call(row: Sequence[Any]) -> PreparedJob[Any]:
    id, path, given, priority, queue, run_after, _ = row
    task = _task(path, id)
    changes = {"priority": priority, "queue_name": queue, "run_after": run_after}
    with _named(path, id):
        values = json.loads(given)
        return _call(task, values["args"], values["kwargs"], changes, django_tasks_db={"id": id})


def _call(
    task: PgDeferTask,
    args: list[Any],
    kwargs: dict[str, Any],
    changes: Mapping[str, Any],
    **header: Any,
) -> PreparedJob[Any]:
    """Return the call of a task, with its arguments by name."""
    headers = {**task.options.get("headers", {}), **header}
    backend = task.get_backend()
    assert isinstance(backend, PgDeferBackend)
    if changes.get("run_after") is None:
        changes = {**changes, "delay": dt.timedelta(0)}
    changed = task.using(headers=headers, queueing_lock="", **move_in_sql.UNCHANGED, **changes)
    return backend.prepared(changed, args, kwargs)


@contextlib.contextmanager
def _named(path: str, id: object) -> Iterator[None]:
    """Name the task whose arguments or options are refused: its code may have changed."""
    try:
        yield
    except Exception as error:
        raise PgDeferError(f"{path!r} of {id} can't be moved: {error}") from error


def _task(path: str, id: object) -> PgDeferTask:
    try:
        task = import_string(path)
    except (ImportError, ValueError) as error:
        raise PgDeferError(f"the task {path!r} of {id} can't be imported: {error}") from error
    backend = task.get_backend() if isinstance(task, Task) else None
    if not isinstance(task, PgDeferTask) or not isinstance(backend, PgDeferBackend):
        raise PgDeferError(
            f"{path!r} of {id} is no task of this queue",
            hint="Put PgDeferBackend into TASKS first, under the name that the task has there.",
        )
    return task


# Steady Queue


def _from_steady(connection: Any) -> dict[str, int]:
    counts = {"moved": 0, "limited": 0, "scheduled": 0}
    with move_in_sql.tables_of("steady-queue"), connection.cursor() as cursor:
        for statement in (
            move_in_sql.STEADY_LOCK,
            move_in_sql.STEADY_LOCK_MORE,
            move_in_sql.STEADY_LOCK_CLAIMED,
        ):
            cursor.execute(statement.text)
    slots: dict[str, int | None] = {}
    held: list[str] = []
    for key, is_held, found in app.client.call(move_in_sql.STEADY_KEYS, {}, connection):
        if is_held:
            held.append(key)
        else:
            slots[key] = found
    asked: dict[str, Any] = {"after": move_in_sql.BELOW_ALL, "held": held}
    while rows := app.client.call(move_in_sql.STEADY, asked, connection):
        app.defer_many([_steady_call(row, slots) for row in rows])
        app.client.call(move_in_sql.STEADY_END, {"ids": [row[0] for row in rows]}, connection)
        asked["after"] = rows[-1][0]
        counts["moved"] += len(rows)
        counts["limited"] += sum(row[6] is not None for row in rows)
        counts["scheduled"] += sum(row[7] for row in rows)
    app.client.call(move_in_sql.STEADY_SLOTS, {"keys": list(slots)}, connection)
    names = ("behind", "running", "failed", "recurring", "paused")
    (left,) = app.client.call(move_in_sql.STEADY_LEFT, {}, connection)
    return counts | dict(zip(names, left, strict=True))


def _steady_call(row: Sequence[Any], slots: Mapping[str, int | None]) -> PreparedJob[Any]:
    id, path, stored, queue, priority, scheduled_at, key, is_scheduled = row
    task = _task(path, id)
    changes: dict[str, Any] = {"priority": priority, "queue_name": queue}
    if is_scheduled:
        changes["run_after"] = scheduled_at
    if key is not None and "concurrency_key" not in task.options:
        changes |= limit_of_semaphore(key, slots[key])
    try:
        given = json.loads(stored)["arguments"]
        args = [_value(one) for one in given["args"] or []]
        kwargs = _value(given["kwargs"][0]) if given["kwargs"] else {}
    except (KeyError, TypeError, ValueError, LookupError) as error:
        raise PgDeferError(
            f"the arguments of {path!r}, job {id}, can't be read: {error}"
        ) from error
    with _named(path, id):
        return _call(task, args, kwargs, changes, steady_queue={"id": id})


def _row(stored: Mapping[str, Any]) -> models.Model:
    """Return an instance that only has its key: the row is looked for when the job runs."""
    row: models.Model = apps.get_model(stored["app_label"], stored["model"])(pk=stored["pk"])
    row._state.adding = False
    return row


_VALUES: dict[str, Callable[[Any], Any]] = {
    "__sq_hash__": lambda stored: {name: _value(one) for name, one in stored.items()},
    "__sq_model__": _row,
    "__sq_datetime__": dt.datetime.fromisoformat,
    "__sq_date__": dt.date.fromisoformat,
    "__sq_time__": dt.time.fromisoformat,
    "__sq_timedelta__": lambda stored: dt.timedelta(seconds=stored),
}


def _value(stored: Any) -> Any:
    """Return a value as its handler gets it."""
    if isinstance(stored, list):
        return [_value(one) for one in stored]
    if isinstance(stored, dict):
        ((tag, value),) = stored.items()
        return _VALUES[tag](value)
    return stored

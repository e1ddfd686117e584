"""Sentry: errors with the context of their job, and check-ins of recurring tasks.

Call `instrument(app)` after `App(...)` and `sentry_sdk.init(...)`; the extra is `pgdefer[sentry]`.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator
from typing import Any

import sentry_sdk
from psycopg.conninfo import conninfo_to_dict
from sentry_sdk.crons import capture_checkin
from sentry_sdk.integrations.logging import ignore_logger

from pgdefer.app import App
from pgdefer.contrib._attach import attach
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.hooks import JobEvent
from pgdefer.tasks.raised import RetryLater

__all__ = ["instrument"]


def instrument(app: App, *, retries: bool = False, crons: bool = False) -> None:
    """Report jobs that have failed for good; with `retries`, also failures that will be retried.

    Reports that handlers make themselves have the job's context, too. With `crons`, each job of a
    recurring task is a check-in of the monitor with the task's name: `ok` when it has succeeded,
    `error` when it has failed for good; it is open while the job sleeps or is to run again.

    Events of tasks with the option `sensitive` have no local variables, which hold the arguments.
    What the loggers `pgdefer.job` and `pgdefer.worker` record is not reported.
    """
    # Their records would be events too, with the local variables of frames that hold args.
    ignore_logger("pgdefer.job")
    ignore_logger("pgdefer.worker")

    @contextlib.contextmanager
    def scoped(job: JobContext) -> Iterator[None]:
        with sentry_sdk.isolation_scope() as scope:
            _describe(app, scope, job)
            is_recurring = crons and job.scheduled_for is not None
            if is_recurring:
                _check_in(job, "in_progress")
            yield
            if is_recurring and not isinstance(job.result, RetryLater):
                _check_in(job, "ok")

    def check_in_failed(event: JobEvent) -> None:
        if event.job.scheduled_for is not None:
            _check_in(event.job, "error")

    def report(event: JobEvent) -> None:
        with sentry_sdk.new_scope() as scope:
            _describe(app, scope, event.job)
            scope.set_tag("pgdefer.state", event.state)
            if event.exception is not None:
                scope.capture_exception(event.exception)
            else:
                scope.capture_message(f"{event.job.task}: {event.error}", "error")

    attach(app, middleware=scoped)
    app.on("exhausted")(report)
    if retries:
        app.on("retry")(report)
    if crons:
        app.on("exhausted")(check_in_failed)


def _check_in(job: JobContext, status: str) -> None:
    """Tell the monitor of a job's task about the job: it is one check-in, in whatever process."""
    database = conninfo_to_dict(job.dsn).get("dbname")
    name = f"{database} {job.id} {job.scheduled_for}"
    monitor = re.sub(r"[^\w-]+", "-", job.task)[:50]
    capture_checkin(monitor, uuid.uuid5(uuid.NAMESPACE_OID, name).hex, status)


def _describe(app: App, scope: sentry_sdk.Scope, job: JobContext) -> None:
    scope.set_transaction_name(job.task, source="task")
    scope.set_tag("pgdefer.task", job.task)
    scope.set_tag("pgdefer.queue", job.queue)
    scope.set_context(
        "pgdefer", {"id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempt}
    )
    defaults = app.client.defaults.get(job.task)
    if defaults is not None and defaults.options.get("sensitive"):
        scope.add_event_processor(_without_variables)


def _without_variables(event: Any, _hint: Any) -> Any:
    for kind in ("exception", "threads"):
        for value in (event.get(kind) or {}).get("values") or ():
            for frame in (value.get("stacktrace") or {}).get("frames") or ():
                frame.pop("vars", None)
    return event

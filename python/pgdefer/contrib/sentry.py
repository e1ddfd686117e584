"""Sentry: errors with the context of their job, traces, and check-ins of recurring tasks.

Call `instrument(app)` after `App(...)` and `sentry_sdk.init(...)`; the extra is `pgdefer[sentry]`.

Tests: integration/test_telemetry.py, integration/test_sentry_traces.py.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import sentry_sdk
from psycopg.conninfo import conninfo_to_dict
from sentry_sdk.crons import capture_checkin
from sentry_sdk.integrations.logging import ignore_logger

from pgdefer._text import logger
from pgdefer.app import App
from pgdefer.contrib._attach import attach, claim
from pgdefer.database.source import PLACE
from pgdefer.errors import DecodeError, describe
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.hooks import JobEvent
from pgdefer.tasks.raised import RetryLater, suspension

__all__ = ["instrument"]

log = logger("pgdefer.worker")

# The header of the time at which a job was deferred, in seconds: Celery's integration has it too.
DEFERRED_AT = "sentry-task-enqueued-time"
# Another program may have written a number that is no time, and too large for a float.
LAST_TIME = 1e12


def instrument(app: App, *, retries: bool = False, crons: bool = False) -> None:
    """Report jobs that have failed for good; with `retries`, also failures that will be retried.

    Reports that handlers make themselves have the job's context, too. With `crons`, each job of a
    recurring task is a check-in of the monitor with the task's name: `ok` when it has succeeded,
    `error` when it has failed for good; it is open while the job sleeps or is to run again.

    If the SDK traces, each run is a transaction, in the trace of the call that deferred the job.

    Events of tasks with the option `sensitive` have no local variables, which hold the arguments.
    What the loggers `pgdefer.job` and `pgdefer.worker` record is not reported, nor what
    `django.tasks` records of a run.

    Raises RuntimeError in a second call for an App.
    """
    claim(app, "sentry")
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
            with _transaction(job) if _is_tracing() else contextlib.nullcontext():
                yield
            if is_recurring and not isinstance(job.result, RetryLater):
                _check_in(job, "ok")

    def check_in_failed(event: JobEvent) -> None:
        if event.job.scheduled_for is not None:
            _check_in(event.job, "error")

    report = functools.partial(_report, app)
    attach(app, middleware=scoped, headers=_headers)
    app.on("exhausted")(report)
    if retries:
        app.on("retry")(report)
    if crons:
        app.on("exhausted")(check_in_failed)


def _report(app: App, event: JobEvent) -> None:
    with sentry_sdk.isolation_scope() as scope:
        if _is_tracing():
            _continue_trace(_headers_of(event.job))
        _describe(app, scope, event.job)
        scope.set_tag("pgdefer.state", event.state)
        if event.exception is not None:
            scope.capture_exception(event.exception)
        else:
            scope.capture_message(f"{event.job.task}: {event.error}", "error")


def _is_tracing() -> bool:
    """Whether the SDK traces at all."""
    options = sentry_sdk.get_client().options
    return (
        options.get("traces_sample_rate") is not None or options.get("traces_sampler") is not None
    )


def _headers(_task: str) -> Mapping[str, Any]:
    """Return the headers of a job that link its runs to the present trace."""
    if not _is_tracing():
        return {}
    trace = {"sentry-trace": sentry_sdk.get_traceparent(), "baggage": sentry_sdk.get_baggage()}
    return {name: value for name, value in trace.items() if value} | {DEFERRED_AT: time.time()}


@contextlib.contextmanager
def _transaction(job: JobContext) -> Iterator[None]:
    """Surround a run with a transaction, in the trace of the job."""
    headers = _headers_of(job)
    transaction = _continue_trace(
        headers,
        op="queue.process",
        name=job.task,
        source="task",
        origin="auto.queue.pgdefer",
    )
    about = {"id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempt}
    span = sentry_sdk.start_transaction(transaction, custom_sampling_context={"pgdefer": about})
    for name, value in _messaging(job, headers).items():
        span.set_data(name, value)
    span.set_status("ok")
    failure: BaseException | None = None
    span.__enter__()
    try:
        yield
    except BaseException as error:
        failure = _failure(job, error)
        raise
    finally:
        span.__exit__(type(failure) if failure else None, failure, None)


def _continue_trace(headers: Mapping[str, Any], **options: Any) -> Any:
    """Continue the trace of these headers; if the SDK can't read them, begin another trace."""
    try:
        return sentry_sdk.continue_trace(_links(headers), **options)
    except Exception as error:
        # Any producer may have written them: no reason for a run to fail.
        log.warning("the headers of a job continue no trace: %s", describe(error))
        return sentry_sdk.continue_trace({}, **options)


def _failure(job: JobContext, error: BaseException) -> BaseException | None:
    """Return why a run fails, or None. A run that sleeps or waits raises, but does not fail."""
    suspended = suspension(error, job.steps)
    if suspended is None:
        return error
    return suspended.__cause__ if job.steps.ended_as is not None else None


def _headers_of(job: JobContext) -> Mapping[str, Any]:
    try:
        return job.headers
    except DecodeError:  # of another program: no reason for a run to fail
        return {}


def _links(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that may link to a trace."""
    return {key: value for key, value in headers.items() if isinstance(value, str)}


def _messaging(job: JobContext, headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Sentry knows of a message by its conventions."""
    found: dict[str, Any] = {
        "messaging.system": "pgdefer",
        "messaging.message.id": str(job.id),
        "messaging.destination.name": job.queue,
        "messaging.message.retry.count": job.attempt - 1,
    }
    deferred_at = headers.get(DEFERRED_AT)
    if isinstance(deferred_at, int | float) and abs(deferred_at) < LAST_TIME and job.attempt == 1:
        if job.scheduled_at is not None:
            deferred_at = max(deferred_at, job.scheduled_at.timestamp())
        latency = max(time.time() - deferred_at, 0) * 1000
        found["messaging.message.receive.latency"] = latency
    return found


def _check_in(job: JobContext, status: str) -> None:
    """Tell the monitor of a job's task about the job.

    It is one check-in in all processes that name the database alike.
    """
    # Databases of one name, as tenants' or shards' on servers of their own, begin at the same id.
    named = conninfo_to_dict(job.dsn)
    database = " ".join(str(named[part]) for part in PLACE if named.get(part))
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
    scope.add_event_processor(_without_djangos)
    defaults = app.client.defaults.get(job.task)
    if defaults is not None and defaults.options.get("sensitive"):
        scope.add_event_processor(_without_variables)


def _without_djangos(event: Any, _hint: Any) -> Any:
    """Drop what Django logs of a task's failure: this module reports final failures itself."""
    return None if event.get("logger") == "django.tasks" else event


def _without_variables(event: Any, _hint: Any) -> Any:
    for kind in ("exception", "threads"):
        for value in (event.get(kind) or {}).get("values") or ():
            for frame in (value.get("stacktrace") or {}).get("frames") or ():
                frame.pop("vars", None)
    return event

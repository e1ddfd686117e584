"""Jobs as results of Django tasks.

Tests: contrib/test_django_tasks.py.
"""

# mypy: disable-error-code="type-arg"
# Tasks are generic for type checkers only.

from __future__ import annotations

import dataclasses
from traceback import format_exception
from typing import Any

from django.tasks import Task, TaskResult, TaskResultStatus
from django.tasks.base import TaskError
from django.utils.json import normalize_json

from pgdefer.codec import Codec
from pgdefer.contrib.django.models import Job
from pgdefer.errors import DecodeError

__all__ = ["JobResult", "error_of", "plain", "result_of", "status_of"]

_STATUSES = {
    "running": TaskResultStatus.RUNNING,
    "succeeded": TaskResultStatus.SUCCESSFUL,
    "failed": TaskResultStatus.FAILED,
    "cancelled": TaskResultStatus.FAILED,
}


def plain(value: Any) -> Any:
    """Return the JSON form of a value, or the value itself if JSON has no form for it.

    The queue stores more types than JSON does: times, decimals, model instances. It refuses what
    is nested too deep.
    """
    try:
        return _plain(value)
    except RecursionError:
        return value


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {
                key if isinstance(key, tuple) else _plain(key): _plain(item)
                for key, item in value.items()
            }
        case list() | tuple():
            return [_plain(item) for item in value]
        case bytes() | bytearray():
            return value  # Django makes text of those that happen to be UTF-8
    try:
        return normalize_json(value)
    except (TypeError, ValueError):
        return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(TaskResult):  # type: ignore[misc]
    """A result whose arguments may have types that JSON lacks."""

    def __post_init__(self) -> None:
        """Keep the arguments as they are."""

    def end(self, status: TaskResultStatus, value: Any = None) -> None:
        """Record how the task ended."""
        object.__setattr__(self, "status", status)
        object.__setattr__(self, "_return_value", value)


def status_of(state: str) -> TaskResultStatus:
    """Return the status for a job's state: jobs that have not run yet are ready."""
    return _STATUSES.get(state, TaskResultStatus.READY)


def error_of(error: BaseException) -> TaskError:
    """Return an exception in Django's form."""
    kind = type(error)
    return TaskError(
        exception_class_path=f"{kind.__module__}.{kind.__qualname__}",
        traceback="".join(format_exception(error)),
    )


def result_of(
    task: Task, job: Job, given: tuple[list[Any], dict[str, Any]], backend: str, codec: Codec
) -> JobResult:
    """Return a job as the result of a task; `given` are its arguments."""
    attempts = [one for one in job.history.order_by("claim") if one.outcome != "released"]
    workers = [one.worker_id for one in attempts]
    if job.state in ("running", "succeeded") and job.worker_id is not None:
        workers.append(job.worker_id)
    started = min([one.started_at for one in attempts] or [job.started_at])
    result = JobResult(
        task=task,
        id=str(job.id),
        status=status_of(job.state),
        enqueued_at=job.created_at,
        started_at=started,
        finished_at=job.finished_at,
        last_attempted_at=job.started_at,
        args=given[0],
        kwargs=given[1],
        backend=backend,
        errors=[
            TaskError(
                exception_class_path=str(one.detail("type") or "builtins.Exception"),
                traceback=str(one.detail("traceback") or one.error),
            )
            for one in attempts
            if one.outcome not in ("yielded", "succeeded")
        ],
        worker_ids=[str(worker) for worker in workers],
    )
    if result.status == TaskResultStatus.SUCCESSFUL and job.result is not None:
        try:
            value = codec.decode(job.result)
        except DecodeError:
            value = None
        object.__setattr__(result, "_return_value", value)
    return result

"""The rows that calls such as `App.list_queues` return. docs/reference.md explains their columns.

Tests: integration/test_managing_lists.py.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pgdefer.codec import parsed

__all__ = [
    "GroupInfo",
    "HealthCheck",
    "JobDetails",
    "JobInfo",
    "LimitInfo",
    "LockInfo",
    "QueueInfo",
    "ScheduleInfo",
    "ShareInfo",
    "TaskInfo",
    "TaskStats",
    "WorkerInfo",
    "with_json",
]

Info = TypeVar("Info")
# The types of fields that are JSON.
_JSON = re.compile(r"Mapping\b|Any\b")


@dataclasses.dataclass(frozen=True)
class JobInfo:
    """A job in the answer of `list_jobs`. `app.job(info)` is the Job."""

    id: int
    queue: str
    task: str
    state: str
    reason: str | None
    priority: int
    attempts: int
    created_at: dt.datetime
    scheduled_at: dt.datetime | None
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    error: str | None
    description: str | None
    excerpt: str | None


@dataclasses.dataclass(frozen=True)
class JobDetails:
    """A job, as in queue.jobs; args and result are decoded."""

    id: int
    task: str
    queue: str
    state: str
    reason: str | None
    args: Mapping[str, Any]
    priority: int
    lock: str | None
    queueing_lock: str | None
    concurrency_key: str | None
    needs: list[int] | None
    deadline: dt.datetime | None
    scheduled_at: dt.datetime | None
    expires_at: dt.datetime | None
    created_at: dt.datetime
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    attempts: int
    failures: int
    crashes: int
    claims: int
    claim: int | None
    worker_id: int | None
    error: str | None
    result: Any
    description: str | None
    headers: Mapping[str, Any] | None
    parent: int | None
    idempotency_key: str | None
    progress: int
    percent: decimal.Decimal | None
    message: str | None
    options: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True)
class QueueInfo:
    """A queue, as in queue.queues."""

    name: str
    ready: int
    running: int
    max_running: int | None
    rate: str | None
    retain: dt.timedelta | None
    paused_until: dt.datetime | None
    created_at: dt.datetime | None


@dataclasses.dataclass(frozen=True)
class TaskInfo:
    """A registered or paused task, as in queue.tasks."""

    name: str
    defaults: Mapping[str, Any]
    paused_in: list[str]


@dataclasses.dataclass(frozen=True)
class LockInfo:
    """A lock with unfinished jobs, as in queue.locks."""

    lock: str
    job_id: int
    running: int
    waiting: int
    has_mutex: bool


@dataclasses.dataclass(frozen=True)
class LimitInfo:
    """A limit and its usage, as in queue.semaphores."""

    kind: str
    key: str
    limit: int | None
    used: int
    ready: int
    waiting: int
    rate_limit: int | None
    rate_per: dt.timedelta | None


@dataclasses.dataclass(frozen=True)
class ShareInfo:
    """A share of a queue and priority, as in queue.shares."""

    queue: str
    priority: int
    share: str
    weight: float
    waiting: int
    started: int


@dataclasses.dataclass(frozen=True)
class GroupInfo:
    """A group and its jobs by state, as in queue.groups."""

    name: str
    state: str
    jobs: int
    unfinished: int
    succeeded: int
    failed: int
    cancelled: int
    on_end_id: int | None
    on_success_id: int | None
    on_failure_id: int | None
    error: str | None
    opened_at: dt.datetime
    closed_at: dt.datetime | None
    ended_at: dt.datetime | None


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """A worker, as in queue.workers; `memory` is in bytes."""

    id: int
    name: str
    queues: Sequence[str] | None
    info: Mapping[str, Any]
    is_alive: bool
    running: int
    registered_at: dt.datetime
    last_seen_at: dt.datetime
    dead_after: dt.timedelta
    memory: int | None


@dataclasses.dataclass(frozen=True)
class ScheduleInfo:
    """A schedule, as in queue.schedules."""

    name: str
    cron: str
    timezone: str
    task: str
    args: Mapping[str, Any]
    enabled: bool
    next_run_at: dt.datetime | None
    last_run_at: dt.datetime | None
    last_job_id: int | None
    reason: str | None
    options: Mapping[str, Any]
    catch_up: str
    max_delay: dt.timedelta | None
    overlap: str
    source: str | None
    created_at: dt.datetime
    changed_at: dt.datetime


@dataclasses.dataclass(frozen=True)
class TaskStats:
    """The jobs of a task in a queue, as queue.stats counts them."""

    queue: str
    task: str
    scheduled: int
    waiting: int
    upstream_failed: int
    blocked: int
    ready: int
    running: int
    held: int
    failed: int
    oldest_ready_for: dt.timedelta | None
    succeeded_5m: int
    failed_5m: int
    cancelled_5m: int


@dataclasses.dataclass(frozen=True)
class HealthCheck:
    """A check of queue.health: `status` is ok, warn or fail."""

    name: str
    status: str
    detail: str | None
    fix: str | None


def with_json(kind: type[Info], row: Sequence[Any]) -> Info:
    """Return a row as this kind; columns of Mapping and Any fields come as JSON text."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(
        *(
            parsed(value) if value is not None and _JSON.match(str(field.type)) else value
            for field, value in zip(fields, row, strict=True)
        )
    )

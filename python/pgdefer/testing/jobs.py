"""Jobs as a test sees them: deferred ones, and runs.

Tests: integration/test_testing.py.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pgdefer.client.client import Client
from pgdefer.codec import Codec
from pgdefer.errors import DecodeError
from pgdefer.tasks.task import Task, task_name

__all__ = [
    "Deferred",
    "DeferredJob",
    "J",
    "RanJob",
    "RecordedJob",
    "arguments",
    "deferred_job",
    "found",
]


class Deferred(Protocol):
    """What all kinds of deferred jobs have."""

    @property
    def id(self) -> int:
        """The job's id."""

    @property
    def task(self) -> str:
        """The name of its task."""

    @property
    def args(self) -> Mapping[str, Any]:
        """Its arguments by name."""


J = TypeVar("J", bound=Deferred)


@dataclasses.dataclass(frozen=True)
class DeferredJob:
    """A job at the time of the test's call: as in queue.jobs, with its arguments decoded.

    Arguments that can't be decoded, such as a row that no longer exists, are left as stored.
    `app.job(deferred)` returns its Job.
    """

    id: int
    task: str
    args: Mapping[str, Any]
    queue: str
    priority: int
    lock: str | None
    queueing_lock: str | None
    concurrency_key: str | None
    state: str
    reason: str | None
    scheduled_at: dt.datetime | None
    deadline: dt.datetime | None
    attempts: int
    error: str | None
    description: str | None
    headers: Mapping[str, Any]
    parent: int | None


@dataclasses.dataclass(frozen=True)
class RecordedJob:
    """A job that a MemoryQueue has recorded: what the database would have received.

    `options` has the other options of the call and of its task, the call's first, in the form in
    which a database takes them. Templates such as `"customer:{id}"` are not filled in.
    """

    id: int
    task: str
    args: Mapping[str, Any]
    queue: str
    priority: int
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RanJob:
    """One run of a job: how its handler ended, and the job's state afterwards."""

    id: int
    task: str
    attempt: int
    state: str
    result: Any = None
    error: BaseException | None = None


def deferred_job(client: Client, row: Sequence[Any]) -> DeferredJob:
    """Return the job of a row of sql.DEFERRED."""
    values = dict(zip((field.name for field in dataclasses.fields(DeferredJob)), row, strict=True))
    values["args"] = _loaded(client.codec, values["args"])
    values["headers"] = (
        {} if values["headers"] is None else _loaded(client.codec, values["headers"])
    )
    return DeferredJob(**values)


def _loaded(codec: Codec, text: str) -> Any:
    """Return values; as they are stored if they can't be decoded: a row may have gone."""
    try:
        return codec.loads(text)
    except DecodeError:
        return json.loads(text)


def arguments(
    task: Task[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return expected arguments by name; a call may leave some out."""
    if isinstance(task, str):
        if args:
            raise TypeError(f"name the arguments of {task!r}: its function is not known here")
        return kwargs
    parameters = task.parameters
    bound = dict(parameters.signature.bind_partial(*args, **kwargs).arguments)
    if parameters.rest in bound:
        bound[str(parameters.rest)] = list(bound[str(parameters.rest)])
    if parameters.keywords in bound:
        bound |= bound.pop(str(parameters.keywords))
    return bound


def _is_of(job: Deferred, expected: Mapping[str, Any]) -> bool:
    """Whether a job has these arguments, and perhaps others."""
    args = job.args
    return all(name in args and args[name] == value for name, value in expected.items())


def found(jobs: Iterable[J], task: Task[..., Any] | str, expected: Mapping[str, Any]) -> list[J]:
    """Return the jobs of a task with these arguments."""
    return [job for job in jobs if job.task == task_name(task) and _is_of(job, expected)]

"""Tasks whose handlers take many jobs at once: `@app.task(batch=100)`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from pgdefer.client.client import Client
from pgdefer.tasks.context import JobContext, RetryLater
from pgdefer.tasks.parameters import Parameters
from pgdefer.tasks.steps import Steps

__all__ = ["BatchJob", "batch_parameters", "check_batch", "outcomes_of"]

# More do not fit into what a worker fetches at once.
MOST = 1000

A = TypeVar("A")


class _NoSteps(Steps):
    """Refuses steps, sleeps and waits: they end or repeat the run of one job, not of a batch."""

    __slots__ = ()

    def take(self, name: str, fingerprint: str | None = None) -> NoReturn:  # noqa: ARG002
        """Refuse."""
        raise TypeError(f"the step {name!r} is refused: a job in a batch has no steps")


class BatchJob(JobContext, Generic[A]):
    """A job of a batch: a `JobContext` with the arguments in `args`.

    The arguments are a dict by name, or the object that the task's `batch_of` makes of them. If
    `should_abort` is true, this job was cancelled or lost; the others of its batch go on.
    """

    __slots__ = ("args",)

    args: A

    def __init__(self, client: Client, row: Sequence[Any]) -> None:
        super().__init__(client, row)
        self.steps = _NoSteps(None)


def check_batch(
    size: Any, make: Any, function: Callable[..., Any], *, transactional: bool, run_in: str
) -> None:
    """Raise TypeError or ValueError for a task that can't take batches."""
    if size is None:
        if make is not None:
            raise ValueError("batch_of needs batch, the number of jobs that a handler takes")
        return
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"batch must be a number of jobs, not {size!r}")
    if not 1 <= size <= MOST:
        raise ValueError(f"batch must be from 1 to {MOST}, not {size}")
    if transactional:
        raise ValueError(
            "batch is not for transactional tasks: each job of a batch ends by itself. Begin a "
            "transaction in the handler, and let a repeated job change nothing (on conflict)"
        )
    if run_in == "process":
        raise ValueError(
            "batch is not for tasks with run_in='process': a process runs one job at a time"
        )
    if make is not None and not callable(make):
        raise TypeError(f"batch_of must make an object of a job's arguments, not {make!r}")
    try:
        inspect.signature(function).bind([])
    except TypeError as error:
        raise TypeError(f"a handler of batches is called with the list of jobs: {error}") from None


def batch_parameters(make: Callable[..., Any] | None, version: int) -> Parameters:
    """Return the parameters of a job in a batch: those of `batch_of`, or any names."""
    return Parameters.of(_any if make is None else make, version=version)


def _any(**args: Any) -> None: ...


def outcomes_of(name: str, jobs: Sequence[BatchJob[Any]], said: object) -> list[object]:
    """Return the outcome of each job: a value, or an exception for that job alone.

    `said` is what the handler returned. Raises TypeError if that has no outcome for each job.
    """
    if said is None or isinstance(said, RetryLater):
        return [said] * len(jobs)
    if isinstance(said, Mapping):
        return _by_job(name, jobs, said)
    if not isinstance(said, list | tuple):
        raise TypeError(
            f"the task {name!r} takes batches, but returned a {type(said).__name__}: return None, "
            "a list with an outcome for each job, or a dict of outcomes by job"
        )
    if len(said) != len(jobs):
        raise TypeError(f"the task {name!r} returned {len(said)} outcomes for {len(jobs)} jobs")
    return [_checked(job, value) for job, value in zip(jobs, said, strict=True)]


def _by_job(name: str, jobs: Sequence[BatchJob[Any]], said: Mapping[Any, object]) -> list[object]:
    """Return the outcomes in a dict by job or id; None for jobs that it does not contain."""
    found: dict[Any, object] = {}
    known = {job.id for job in jobs}
    for key, value in said.items():
        id = key.id if isinstance(key, JobContext) else key
        if type(id) is not int or id not in known:
            raise TypeError(f"the task {name!r} returned an outcome for {key!r}, not in its batch")
        if id in found:
            raise TypeError(f"the task {name!r} returned two outcomes for job {id}")
        found[id] = value
    return [_checked(job, found.get(job.id)) for job in jobs]


def _checked(job: JobContext, value: object) -> object:
    """Return an outcome, or a TypeError in place of a value that can't be meant as one."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return TypeError(f"the outcome of job {job.id} is the class {value.__name__}, not an error")
    if inspect.isawaitable(value) or isinstance(value, types.GeneratorType):
        if isinstance(value, types.CoroutineType):
            value.close()  # or Python would warn that it was never awaited
        return TypeError(
            f"the outcome of job {job.id} is a {type(value).__name__}, whose code nobody runs: "
            "return its value, as by asyncio.gather(..., return_exceptions=True)"
        )
    return value

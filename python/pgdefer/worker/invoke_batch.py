# Generated from invoke_batch_async.py: change that, and run `make generate`.
"""Calling a handler of batches: middleware and outcome of each job, one call for all.

Tests: integration/test_batch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pgdefer._text import traceback_of
from pgdefer.tasks.batch import BatchJob, outcomes_of
from pgdefer.tasks.context import JobContext, RetryLater, enter_job, leave_job
from pgdefer.tasks.task import Task
from pgdefer.worker.ending import outcome_of, stops_with, success
from pgdefer.worker.forked import EndedIfForked
from pgdefer.worker.handler import middleware
from pgdefer.worker.transaction import check_has_run

__all__ = ["run_batch"]


def run_batch(
    task: Task[..., Any],
    jobs: Sequence[BatchJob[Any]],
    decode: Callable[[JobContext], Any],
    worker: Any = None,
) -> list[str]:
    """Run a handler; return the outcomes of the jobs, in their order. `decode` returns arguments.

    A job whose arguments do not fit, or whose middleware raises, ends with that error, and the
    handler does not get it. Each job's middleware is entered before the handler, and left after it
    in reverse order, with the error of its own job. If the coroutine is cancelled together with
    `worker`, the worker's task, the jobs are given back.
    """
    enter_job(None)
    policy = task.failure_policy
    ended: dict[int, str] = {}
    entered: list[tuple[BatchJob[Any], Any]] = []
    said: list[object] = []
    try:
        for job in jobs:
            try:
                entered.append((job, _begin(task, job, decode)))
            except Exception as error:
                ended[job.id] = outcome_of(job, policy, error)
        if entered:
            said = _call(task, [job for job, _ in entered])
    except BaseException as error:
        # All are told to end, before the handler was called.
        said = [error] * len(entered)
        for job in jobs[len(entered) + len(ended) :]:
            stops_with(worker, job)
            ended[job.id] = outcome_of(job, policy, error)
    for (job, surrounding), outcome in zip(reversed(entered), reversed(said), strict=True):
        ended[job.id] = _end(task, job, surrounding, outcome, worker)
    return [ended[job.id] for job in jobs]


def _begin(task: Task[..., Any], job: BatchJob[Any], decode: Callable[[JobContext], Any]) -> Any:
    """Give a job its arguments, and enter its middleware, which is returned."""
    positional, named = task.unbind(decode(job))
    make = task.execution.batch_of
    job.args = named if make is None else make(*positional, **named)
    surrounding: Any = middleware(job, task.middleware)
    token = enter_job(job)
    try:
        surrounding.__enter__()
    finally:
        leave_job(token)
    return surrounding


def _call(task: Task[..., Any], jobs: list[BatchJob[Any]]) -> list[object]:
    """Call the handler; return the outcome of each job. What it raises is the outcome of all."""
    try:
        with EndedIfForked():
            # A copy, because the handler may change its list.
            said = check_has_run(task.function(list(jobs)))
        return outcomes_of(task.name, jobs, said)
    except BaseException as error:
        return [error] * len(jobs)


def _end(
    task: Task[..., Any], job: BatchJob[Any], surrounding: Any, outcome: object, worker: Any
) -> str:
    """Leave a job's middleware, and return the outcome."""
    error = outcome if isinstance(outcome, BaseException) else None
    token = enter_job(job)
    try:
        if error is None or isinstance(error, RetryLater):
            job.result = outcome
            surrounding.__exit__(None, None, None)
        elif surrounding.__exit__(type(error), error, traceback_of(error)):
            outcome = error = None
    except BaseException as other:
        error = other
    finally:
        leave_job(token)
    if error is not None:
        stops_with(worker, job)
        return outcome_of(job, task.failure_policy, error)
    return success(job, task.failure_policy, outcome)

"""Handlers of Django tasks: their arguments, context and signals.

Tests: contrib/test_django_tasks.py.
"""

# mypy: disable-error-code="type-arg"
# Tasks are generic for type checkers only.

from __future__ import annotations

import functools
import inspect
import os
import socket
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.tasks import Task, TaskContext, TaskResultStatus
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.signals import task_finished, task_started
from django.utils import timezone

from pgdefer.codec import Codec
from pgdefer.contrib.django.models import Job
from pgdefer.contrib.django.results import JobResult, error_of, plain
from pgdefer.tasks.context import JobContext, RetryLater, current_job
from pgdefer.tasks.parameters import Parameters

__all__ = ["arguments_of", "handler_of", "parameters_of"]


def parameters_of(task: Task) -> Parameters:
    """Return the parameters for which a task's jobs have arguments."""
    return Parameters.of(task.func, has_connection=task.takes_context)


def arguments_of(task: Task, job: Job, codec: Codec) -> tuple[list[Any], dict[str, Any]]:
    """Return a job's arguments as they were passed: positional ones and keyword ones."""
    parameters = parameters_of(task)
    args = codec.decode(job.args)
    rest = args.pop(parameters.rest, []) if parameters.rest is not None else []
    if parameters.keywords is not None:
        args.update(args.pop(parameters.keywords, {}))
    count = (job.headers or {}).get("positional", 0)
    names = [name for name in parameters.signature.parameters if name in args][:count]
    return [*(args.pop(name) for name in names), *rest], args


def handler_of(backend: BaseTaskBackend, task: Task) -> Any:
    """Return the function that the worker calls: it sends the signals and passes the context."""
    function = task.func
    handler: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def handler(*args: Any, **kwargs: Any) -> Any:
            began = sync_to_async(_began, thread_sensitive=True)
            result = await began(backend, task, current_job(), args, kwargs)
            await task_started.asend(type(backend), task_result=result)
            try:
                value = await function(*_context(task, result), *args, **kwargs)
            except RetryLater:
                raise
            except BaseException as error:
                _failed(result, error)
                await _finished_async(backend, result)
                raise
            if not isinstance(value, RetryLater):
                value = plain(value)
                result.end(TaskResultStatus.SUCCESSFUL, value)
                await _finished_async(backend, result)
            return value

    else:

        @functools.wraps(function)
        def handler(*args: Any, **kwargs: Any) -> Any:
            result = _began(backend, task, current_job(), args, kwargs)
            task_started.send(type(backend), task_result=result)
            try:
                value = function(*_context(task, result), *args, **kwargs)
            except RetryLater:
                raise
            except BaseException as error:
                _failed(result, error)
                _finished(backend, result)
                raise
            if not isinstance(value, RetryLater):
                value = plain(value)
                result.end(TaskResultStatus.SUCCESSFUL, value)
                _finished(backend, result)
            return value

    handler.__signature__ = parameters_of(task).signature
    handler.django_task = task
    handler.django_func = function
    return handler


def _context(task: Task, result: JobResult) -> list[TaskContext]:
    return [TaskContext(task_result=result)] if task.takes_context else []


def _began(
    backend: BaseTaskBackend,
    task: Task,
    job: JobContext,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> JobResult:
    """Return the result of a task that begins; read the stored one if earlier attempts matter."""
    if task.takes_context or job.attempt > 1:
        return cast("JobResult", backend.get_result(str(job.id)))
    now = timezone.now()
    return JobResult(
        task=task,
        id=str(job.id),
        status=TaskResultStatus.RUNNING,
        enqueued_at=None,
        started_at=now,
        finished_at=None,
        last_attempted_at=now,
        args=list(args),
        kwargs=kwargs,
        backend=backend.alias,
        errors=[],
        worker_ids=[f"{socket.gethostname()}:{os.getpid()}"],
    )


def _finished(backend: BaseTaskBackend, result: JobResult) -> None:
    """Send the signal. A receiver's error must not run the task again: Django logs it."""
    task_finished.send_robust(type(backend), task_result=result)


async def _finished_async(backend: BaseTaskBackend, result: JobResult) -> None:
    """Send the signal, as `_finished`."""
    await task_finished.asend_robust(type(backend), task_result=result)


def _failed(result: JobResult, error: BaseException) -> None:
    result.errors.append(error_of(error))
    result.end(TaskResultStatus.FAILED)

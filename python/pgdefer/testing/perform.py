"""Running the handler of a claimed job in the test.

Tests: integration/test_testing.py, integration/test_testing_durable.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psycopg

from pgdefer.client.client import Client
from pgdefer.database.callers import CallersConnection, is_django
from pgdefer.database.execute import execute
from pgdefer.database.execute_async import execute_async
from pgdefer.database.own_threads import has_running_loop
from pgdefer.errors import ClaimLost, JobNotFound
from pgdefer.tasks.batch import BatchJob
from pgdefer.tasks.context import (
    JobContext,
    JobTimeout,
    RetryLater,
    enter_job,
    leave_job,
)
from pgdefer.tasks.raised import JobSuspended, suspension
from pgdefer.tasks.task import Task
from pgdefer.testing.connections import (
    AsyncOverSync,
    at_once,
    awaited_driver_of,
    is_asynchronous,
    savepoint,
)
from pgdefer.testing.statements import CallsApart
from pgdefer.testing.threads import DjangoThreads, Misuse, Threads
from pgdefer.worker.ending import outcome_of, success
from pgdefer.worker.handler import decode_args_async, middleware, middleware_async
from pgdefer.worker.invoke import call_handler
from pgdefer.worker.invoke_async import call_handler_async
from pgdefer.worker.invoke_batch import run_batch
from pgdefer.worker.invoke_batch_async import run_batch_async
from pgdefer.worker.transaction import Session, check_session, last_statements

__all__ = ["Ended", "TestsOwn", "claimed", "normal", "perform", "perform_batch"]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a handler ended; `outcome` is None if its own transaction has written that."""

    outcome: str | None
    result: object = None
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class TestsOwn:
    """The connection of a test's queue, its threads, and the calls that it has made on it."""

    connection: CallersConnection
    threads: Threads
    apart: CallsApart


def claimed(client: Client, row: Sequence[Any]) -> JobContext:
    """Return the job in a row of queue.fetch, as any driver loads it."""
    return JobContext(client, normal(row))


def normal(row: Sequence[Any]) -> list[Any]:
    """Return a row of queue.fetch as a worker's connection loads it."""
    values = [f" {json.dumps(value)}" if isinstance(value, dict | list) else value for value in row]
    for index in (3, 11, 13):  # args, headers and steps, where they came as text
        if isinstance(values[index], str) and values[index][:1] == "{":
            values[index] = f" {values[index]}"
    return values


async def perform(
    job: JobContext,
    task: Task[..., Any],
    test: TestsOwn,
    *,
    waits: bool,
) -> Ended:
    """Run a handler in a savepoint of the test's connection.

    With `waits`, coroutines are awaited here, and functions run in a thread, as in a worker.
    Without it nothing is awaited: coroutines run in an event loop of their own, functions are just
    called.
    """
    token = enter_job(job)
    run, threads = _perform(job, task, test), test.threads
    try:
        with threads.restoring():
            async with savepoint(test.connection, keep=True):
                if waits and not task.is_async:
                    return await threads.call(at_once, run)
                if task.is_async and not waits:
                    return threads.run(run)
                return await run
    except Misuse:
        raise
    except BaseException as error:
        if suspension(error, job.steps) is not None:
            return Ended(None)
        if not _ends_job(error):
            raise
        error = _of_function(error, task)
        return Ended(outcome_of(job, task.failure_policy, error), error=error)
    finally:
        leave_job(token)
        if inspect.getcoroutinestate(run) == inspect.CORO_CREATED:
            run.close()  # if this test was cancelled, a function may still run in its thread


def _of_function(error: BaseException, task: Task[..., Any]) -> BaseException:
    """Return what a function has raised: the coroutine around it can't raise StopIteration."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        is_replaced = str(error) == "coroutine raised StopIteration"
        return error.__cause__ if is_replaced and not task.is_async else error
    return error


def _ends_job(error: BaseException) -> bool:
    """Whether what a handler raised ends its job; otherwise it ends the test's run."""
    if isinstance(error, asyncio.CancelledError):
        return not (has_running_loop() and _is_cancelled(asyncio.current_task()))
    return isinstance(error, Exception | JobTimeout | SystemExit)


def _is_cancelled(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.cancelling() > 0


class _HasFailures(Exception):  # noqa: N818
    """Some job of a batch has failed: a broken transaction must be rolled back."""


async def perform_batch(
    jobs: Sequence[BatchJob[Any]],
    task: Task[..., Any],
    connection: CallersConnection,
    threads: Threads,
    *,
    waits: bool,
) -> list[Ended]:
    """Run a handler of batches in a savepoint, as `perform` does with one job."""
    outcomes: list[str] = []
    decode = functools.partial(_decoded_async, threads)
    with contextlib.suppress(_HasFailures), threads.restoring():
        async with savepoint(connection, keep=True):
            if task.is_async and waits:
                outcomes = await run_batch_async(task, jobs, decode)
            elif task.is_async:
                outcomes = threads.run(run_batch_async(task, jobs, decode))
            else:
                context = contextvars.copy_context()
                call = functools.partial(run_batch, task, jobs, _decoded)
                outcomes = await threads.call(call) if waits else context.run(call)
            errors = [job._error for job in jobs if job._error is not None]
            for error in errors:
                if not _ends_job(error):
                    raise error
            if errors:
                raise _HasFailures
    return [
        Ended(outcome, None if isinstance(job.result, RetryLater) else job.result, job._error)
        for job, outcome in zip(jobs, outcomes, strict=True)
    ]


def _decoded(job: JobContext) -> dict[str, Any]:
    args: dict[str, Any] = job.client.codec.decode_stored(job._stored)
    return args


async def _decoded_async(threads: Threads, job: JobContext) -> dict[str, Any]:
    """Return a coroutine's arguments; rows of Django come from the test's connection."""
    if isinstance(threads, DjangoThreads) and job.client.codec.how(job._stored) == "thread":
        return await threads.call(_decoded, job)
    return await decode_args_async(job)


async def _perform(job: JobContext, task: Task[..., Any], test: TestsOwn) -> Ended:
    args = await _decoded_async(test.threads, job) if task.is_async else _decoded(job)
    positional, named = task.unbind(args)
    maker = task.execution.transactional
    async with contextlib.AsyncExitStack() as stack:
        if task.is_async:
            await stack.enter_async_context(middleware_async(job, task.middleware))
        else:
            stack.enter_context(middleware(job, task.middleware))
        if not maker:
            result = await _call(task, positional, named)
        else:
            async with _repeated(job, test):
                if callable(maker):
                    result = await _in_session(job, task, maker, positional, named)
                else:
                    result = await _in_transaction(job, task, test.connection, positional, named)
        job.result = result
    if maker:
        return Ended(None, result)
    outcome = success(job, task.failure_policy, result)
    return Ended(outcome, None if isinstance(result, RetryLater) else result)


async def _call(task: Task[..., Any], positional: list[Any], named: dict[str, Any]) -> object:
    if task.is_async:
        return await call_handler_async(task, positional, named)
    return call_handler(task, positional, named)


@contextlib.asynccontextmanager
async def _repeated(job: JobContext, test: TestsOwn) -> AsyncIterator[None]:
    """Make a job's calls again if the block, which rolls them back, raises: see CallsApart."""
    with test.apart.recorded():
        try:
            yield
        except BaseException as error:
            if not (_ends_job(error) or isinstance(error, BaseExceptionGroup | JobSuspended)):
                raise
            if suspension(error, job.steps) is not None and test.apart.has_transaction:
                raise Misuse(
                    "a transactional task has waited after a transaction of its steps or children, "
                    "which its ROLLBACK has undone: run it by a CommittedTestQueue"
                ) from error
            for statement, parameters in test.apart.made:
                if is_asynchronous(test.connection):
                    await execute_async(test.connection, statement, parameters)  # type: ignore[arg-type]
                else:
                    execute(test.connection, statement, parameters)  # type: ignore[arg-type]
            raise


async def _in_transaction(
    job: JobContext,
    task: Task[..., Any],
    connection: CallersConnection,
    positional: list[Any],
    named: dict[str, Any],
) -> object:
    """Call a handler with psycopg's connection, and write its outcome, in one savepoint."""
    driver = await awaited_driver_of(connection)
    given = driver
    if isinstance(driver, psycopg.Connection) and task.is_async:
        given = AsyncOverSync(driver)
    elif not isinstance(driver, psycopg.AsyncConnection if task.is_async else psycopg.Connection):
        raise TypeError(
            f"the transactional task {task.name!r} can't use the test's connection, "
            f"a {type(driver or connection).__qualname__}: run it by a CommittedTestQueue"
        )
    async with job.steps.storing_async() as take_steps, savepoint(driver):
        result = await _call(task, [given, *positional], named)
        for statement, parameters in last_statements(job, result, take_steps):
            if is_asynchronous(driver):
                await execute_async(driver, statement, parameters)
            else:
                execute(driver, statement, parameters)
    return result


async def _in_session(
    job: JobContext, task: Task[..., Any], maker: Any, positional: list[Any], named: dict[str, Any]
) -> object:
    """Call a handler with a session, or with Django's connection, which must be the test's."""
    async with (
        job.steps.storing_async() as take_steps,
        _session(maker, is_async=task.is_async) as session,
    ):
        result = await _call(task, [session, *positional], named)
        if isinstance(session, Session):
            check_session(session)
        last = last_statements(job, result, take_steps)
        try:
            if task.is_async:
                await session.flush()
            elif isinstance(session, Session):
                session.flush()
            for statement, parameters in last:
                if task.is_async:
                    await execute_async(session, statement, parameters)
                else:
                    execute(session, statement, parameters)
        except (ClaimLost, JobNotFound) as error:
            raise RuntimeError(
                f"the session of the task {task.name!r} is not on the test's connection: "
                + _how_to_share(session)
            ) from error
    return result


def _how_to_share(session: Any) -> str:
    if is_django(session):
        return "give the queue django.db.connection, in a method of Django's TestCase"
    return "bind its sessionmaker to that, with join_transaction_mode='create_savepoint'"


@contextlib.asynccontextmanager
async def _session(maker: Any, *, is_async: bool) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as stack:
        if is_async:
            session = await stack.enter_async_context(maker())
            await stack.enter_async_context(session.begin())
        else:
            session = stack.enter_context(maker())
            if not is_django(session):  # Django's has already begun
                stack.enter_context(session.begin())
        yield session

"""Running a handler: in the event loop, a thread or a process.

Tests: unit/test_middleware_nesting.py, integration/test_middleware.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import Sequence
from typing import Any

import psycopg

from pgdefer._text import logger
from pgdefer.database import sql
from pgdefer.database.execute import execute
from pgdefer.database.own_threads import enter_coroutine, in_own_thread
from pgdefer.database.pool import AsyncPool, SyncPool
from pgdefer.tasks.context import JobContext, Middleware, enter_job
from pgdefer.tasks.error_report import error_text
from pgdefer.tasks.handling import RETRY_POLICY_ONLY
from pgdefer.tasks.middleware import AsyncEntered, Entered
from pgdefer.tasks.raised import suspension
from pgdefer.tasks.task import Task
from pgdefer.worker import memory, outcomes
from pgdefer.worker.ending import outcome_of, stops_with, success, timed_out, was_told_to_end
from pgdefer.worker.invoke import call_handler, call_in_transaction, driver, transaction
from pgdefer.worker.invoke_async import call_handler_async, call_in_transaction_async

__all__ = [
    "Call",
    "decode_args",
    "decode_args_async",
    "middleware",
    "middleware_async",
    "run",
    "run_async",
    "run_function",
]

log = logger("pgdefer.worker")

Call = tuple[list[Any], dict[str, Any]]


def run(
    job: JobContext, task: Task[..., Any], pool: SyncPool, call: Call | None
) -> str | outcomes.Settled | None:
    """Run a function and return the outcome; None if it has not begun, and the job goes back.

    If the arguments have already been decoded, `call` calls the function with them.
    """
    enter_job(job)
    result: object = None
    try:
        positional, named = call or task.unbind(decode_args(job))
        with memory.capped(task.execution.max_memory), middleware(job, task.middleware):
            if task.execution.transactional:
                result = call_in_transaction(job, task, pool, positional, named)
            else:
                job.result = result = call_handler(task, positional, named)
    except BaseException as error:
        return _end(job, task, result, error)
    return _end(job, task, result)


async def run_async(
    job: JobContext, task: Task[..., Any], pool: AsyncPool, worker: asyncio.Task[Any] | None
) -> str | outcomes.Settled | Call | None:
    """Run a coroutine, as `run` does; for an ordinary function, return how to call it.

    The job is given back if the coroutine is cancelled together with `worker`, its worker's task.
    """
    enter_job(job)
    result: object = None
    try:
        args = await decode_args_async(job)
        positional, named = task.unbind(args)
        if not task.is_async:
            return positional, named
        enter_coroutine()
        async with middleware_async(job, task.middleware):
            if task.execution.transactional:
                result = await call_in_transaction_async(job, task, pool, positional, named)
            else:
                job.result = result = await call_handler_async(task, positional, named)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            stops_with(worker, job)
        return _end(job, task, result, error)
    return _end(job, task, result)


def _end(
    job: JobContext, task: Task[..., Any], result: object, error: BaseException | None = None
) -> str | outcomes.Settled | None:
    """Return the outcome of a handler that returned or raised; None if the job goes back."""
    if job._goes_back:  # middleware may have swallowed the error that says so
        return None
    if (settled := _settled(job, result, error)) is not None:
        return settled
    if error is not None:
        return outcome_of(job, task.failure_policy, error)
    return success(job, task.failure_policy, result)


def _settled(
    job: JobContext, result: object, error: BaseException | None = None
) -> outcomes.Settled | None:
    """Return how a call of the handler has ended the claim; None if no call has.

    What the handler or its middleware did afterwards changes nothing; an error is logged.
    """
    if isinstance(result, outcomes.Settled):
        settled = result
    elif job.steps.ended_as is not None:
        suspended = suspension(error, job.steps)
        cause = suspended.__cause__ if suspended else None
        job._error = cause  # the error of a failed step
        settled = outcomes.Settled(*job.steps.ended_as, "" if cause is None else error_text(cause))
    else:
        return None
    if (
        error is not None
        and suspension(error, job.steps) is None
        and not was_told_to_end(job, error)
    ):
        log.error(
            "%r raised after its end was stored", job, exc_info=error, extra=job._log_fields()
        )
    return settled


def run_function(job: JobContext, pool: SyncPool, why: str) -> str | outcomes.Settled | None:
    """Let the database run a task that is unknown here, if it has a function for it.

    The call also ends the claim; if there is no function, as that of an unknown task. `why` then
    goes to the log.
    """
    try:
        with transaction(job, True, pool) as (connection, own_part):
            timeout = {"timeout": f"{_milliseconds(job.timeout)}ms"}
            execute(connection, sql.SET_STATEMENT_TIMEOUT, timeout)
            claim = {"id": job.id, "claim": job.claim}
            (ended,) = execute(connection, sql.RUN_FUNCTION, claim)
            own_part.begin(driver(connection))
    except psycopg.errors.QueryCanceled as error:
        return timed_out(job, RETRY_POLICY_ONLY, error)
    except BaseException as error:
        return None if job._goes_back else outcome_of(job, RETRY_POLICY_ONLY, error)
    state, outcome, said = ended
    if outcome == "released":
        log.warning("%r was given back and is %s: %s", job, state, why, extra=job._log_fields())
    return outcomes.Settled(outcome, state, said or "")


def _milliseconds(timeout: dt.timedelta | None) -> int:
    """Return a statement_timeout; 0 means none."""
    return 0 if timeout is None else max(round(timeout.total_seconds() * 1000), 1)


def decode_args(job: JobContext) -> dict[str, Any]:
    """Return a job's arguments; for asynchronous codecs in an event loop of its own."""
    codec = job.client.codec
    args: dict[str, Any]
    if codec.how(job._stored) == "async":  # in a process, which has no event loop
        args = asyncio.run(codec.decode_stored_async(job._stored))
    else:
        args = codec.decode_stored(job._stored)
    return args


async def decode_args_async(job: JobContext) -> dict[str, Any]:
    """Return a job's arguments, decoded here, in a thread, or by awaiting asynchronous codecs."""
    codec = job.client.codec
    how = codec.how(job._stored)
    args: dict[str, Any]
    if how == "direct":
        args = codec.decode_stored(job._stored)
    elif how == "thread":
        args = await in_own_thread(codec.decode_stored, job._stored)
    else:
        args = await codec.decode_stored_async(job._stored)
    return args


def middleware(
    job: JobContext, surrounding: Sequence[Middleware]
) -> contextlib.AbstractContextManager[object]:
    """Return the middleware around a function, with the first one outermost."""
    return Entered(job, surrounding) if surrounding else _NOTHING


def middleware_async(
    job: JobContext, surrounding: Sequence[Middleware]
) -> contextlib.AbstractAsyncContextManager[object]:
    """Return the middleware around a coroutine, with the first one outermost."""
    return AsyncEntered(job, surrounding) if surrounding else _NOTHING


_NOTHING = contextlib.nullcontext()

"""Running a handler: in the event loop, a thread or a process."""

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
from pgdefer.database.pool import AsyncPool, SyncPool
from pgdefer.tasks.context import JobContext, Middleware, enter_job
from pgdefer.tasks.failure_policy import RETRY_POLICY_ONLY
from pgdefer.tasks.middleware import AsyncEntered, Entered
from pgdefer.tasks.raised import JobSuspended
from pgdefer.tasks.task import Task
from pgdefer.worker import memory, outcomes
from pgdefer.worker.ending import outcome_of, success, timed_out
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


def run(job: JobContext, task: Task[..., Any], pool: SyncPool, call: Call | None) -> str | None:
    """Run a function; return the outcome, SETTLED, or None if its transaction wrote a success.

    If the arguments have already been decoded, `call` calls the function with them.
    """
    enter_job(job)
    try:
        positional, named = call or task.unbind(decode_args(job))
        result: object = None
        with memory.capped(task.execution.max_memory), middleware(job, task.middleware):
            if task.execution.transactional:
                call_in_transaction(job, task, pool, positional, named)
                return None
            job.result = result = call_handler(task, positional, named)
    except JobSuspended:
        return outcomes.SETTLED
    except BaseException as error:
        return outcome_of(job, task.failure_policy, error)
    return success(job, task.failure_policy, result)


async def run_async(job: JobContext, task: Task[..., Any], pool: AsyncPool) -> str | Call | None:
    """Run a coroutine, as `run` does; for an ordinary function, return how to call it."""
    enter_job(job)
    try:
        args = await decode_args_async(job)
        positional, named = task.unbind(args)
        if not task.is_async:
            return positional, named
        result: object = None
        async with middleware_async(job, task.middleware):
            if task.execution.transactional:
                await call_in_transaction_async(job, task, pool, positional, named)
                return None
            job.result = result = await call_handler_async(task, positional, named)
    except JobSuspended:
        return outcomes.SETTLED
    except BaseException as error:
        return outcome_of(job, task.failure_policy, error)
    return success(job, task.failure_policy, result)


def run_function(job: JobContext, pool: SyncPool) -> str | None:
    """Let the database run a task that is unknown here, if it has a function for it.

    This also ends the claim: without a function, as one of an unknown task. Returns the same as
    `run`.
    """
    try:
        with transaction(job, True, pool) as (connection, own_part):
            timeout = {"timeout": f"{_milliseconds(job.timeout)}ms"}
            execute(connection, sql.SET_STATEMENT_TIMEOUT, timeout)
            claim = {"id": job.id, "claim": job.claim}
            ((state,),) = execute(connection, sql.RUN_FUNCTION, claim)
            own_part.begin(driver(connection))
    except psycopg.errors.QueryCanceled as error:
        return timed_out(job, RETRY_POLICY_ONLY, error)
    except BaseException as error:
        return outcome_of(job, RETRY_POLICY_ONLY, error)
    if state != "succeeded":
        log.warning("%r has a task that is not known here; the database says %s", job, state)
        return outcomes.SETTLED
    return None


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
        args = await asyncio.to_thread(codec.decode_stored, job._stored)
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

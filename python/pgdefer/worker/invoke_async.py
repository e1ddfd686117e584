"""Calling a handler, also in a transaction that ends its job.

Tests: integration/test_transactional.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from pgdefer._text import logger
from pgdefer.database.callers import AnyAsyncConnection, driver_of, is_django
from pgdefer.database.execute_async import execute_async
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.database.pool import AsyncPool
from pgdefer.tasks.context import JobContext, RetryLater, running_job
from pgdefer.tasks.task import Task
from pgdefer.worker.forked import EndedIfForked
from pgdefer.worker.outcomes import Settled
from pgdefer.worker.transaction import (
    LONGEST_WAIT,
    OwnPart,
    Session,
    check_begins,
    check_can_end,
    check_has_run,
    check_may_begin,
    check_session,
    closed_if_busy,
    gives_back_if_late,
    last_statements,
    losses_told_apart,
    settled_by,
)

__all__ = [
    "call_handler_async",
    "call_in_transaction_async",
    "driver_async",
    "transaction_async",
]

log = logger("pgdefer.worker")


async def call_handler_async(
    task: Task[..., Any], positional: list[Any], named: dict[str, Any]
) -> object:
    """Call a handler; return its value, or the RetryLater that it raised. Its steps have ended."""
    try:
        with EndedIfForked():
            return check_has_run(await task.function(*positional, **named))
    except RetryLater as asked:
        return asked
    finally:
        job = running_job()
        if job is not None and not job.steps.running.is_over_async():
            await job._end_steps_async()


async def call_in_transaction_async(
    job: JobContext,
    task: Task[..., Any],
    pool: AsyncPool,
    positional: list[Any],
    named: dict[str, Any],
) -> Settled:
    """Call a handler with a connection, write the outcome in its transaction, and return it."""
    maker = task.execution.transactional
    async with (
        job.steps.storing_async() as take_steps,
        transaction_async(job, maker, pool) as (connection, own_part),
    ):
        result = await call_handler_async(task, [connection, *positional], named)
        if isinstance(connection, Session):
            check_session(connection)
            await connection.flush()
            check_begins(await connection.connection())
        job.result = result
        last = last_statements(job, result, take_steps)
        own = await driver_async(connection)
        check_can_end(connection, own)
        own_part.begin(own)
        for statement, parameters in last:
            rows = await execute_async(connection, statement, parameters)
    return settled_by(result, rows)


async def driver_async(connection: Any) -> Any:
    """Return the driver's connection of a psycopg or SQLAlchemy connection."""
    if isinstance(connection, psycopg.AsyncConnection):
        return connection
    if is_django(connection):
        return connection.connection
    return driver_of(await connection.connection())


@contextlib.asynccontextmanager
async def transaction_async(
    job: JobContext, maker: Callable[[], Any] | bool, pool: AsyncPool
) -> AsyncIterator[tuple[AnyAsyncConnection, OwnPart]]:
    """Begin a handler's transaction, on a connection or in a session that `maker` makes."""
    async with contextlib.AsyncExitStack() as stack:
        if callable(maker):
            own_part = stack.enter_context(losses_told_apart())
            session = await stack.enter_async_context(maker())
            if not is_django(session):  # Django's has already begun
                await stack.enter_async_context(session.begin())
            yield session, own_part
            return
        connection = await _opened_async(job, stack, pool)
        own_part = stack.enter_context(losses_told_apart(connection))
        # Another handler may have changed them.
        await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        connection.row_factory, connection.cursor_factory = tuple_row, psycopg.AsyncCursor
        own_part.begin(connection)
        await stack.enter_async_context(connection.transaction())
        own_part.end()
        stack.enter_context(closed_if_busy(connection))
        yield connection, own_part


async def _opened_async(
    job: JobContext, stack: contextlib.AsyncExitStack, pool: AsyncPool
) -> psycopg.AsyncConnection[Any]:
    """Open a connection. If that fails, wait and try again: it is not the job's fault."""
    waits = GrowingDelay(last=LONGEST_WAIT)
    with gives_back_if_late(job):
        while True:
            try:
                return await stack.enter_async_context(pool.connection(waits=False, undo=True))
            except psycopg.OperationalError as error:
                log.warning("%r waits for a connection: %s", job, error, extra=job._log_fields())
            await asyncio.sleep(waits.next())
            check_may_begin(job)

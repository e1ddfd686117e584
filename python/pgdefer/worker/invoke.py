# Generated from invoke_async.py: change that, and run `make generate`.
"""Calling a handler, also in a transaction that ends its job.

Tests: integration/test_transactional.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from pgdefer._text import logger
from pgdefer.database.callers import AnyConnection, driver_of, is_django
from pgdefer.database.execute import execute
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.database.pool import SyncPool
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
    "call_handler",
    "call_in_transaction",
    "driver",
    "transaction",
]

log = logger("pgdefer.worker")


def call_handler(task: Task[..., Any], positional: list[Any], named: dict[str, Any]) -> object:
    """Call a handler; return its value, or the RetryLater that it raised. Its steps have ended."""
    try:
        with EndedIfForked():
            return check_has_run(task.function(*positional, **named))
    except RetryLater as asked:
        return asked
    finally:
        job = running_job()
        if job is not None and not job.steps.running.is_over():
            job._end_steps()


def call_in_transaction(
    job: JobContext,
    task: Task[..., Any],
    pool: SyncPool,
    positional: list[Any],
    named: dict[str, Any],
) -> Settled:
    """Call a handler with a connection, write the outcome in its transaction, and return it."""
    maker = task.execution.transactional
    with (
        job.steps.storing() as take_steps,
        transaction(job, maker, pool) as (connection, own_part),
    ):
        result = call_handler(task, [connection, *positional], named)
        if isinstance(connection, Session):
            check_session(connection)
            connection.flush()
            check_begins(connection.connection())
        job.result = result
        last = last_statements(job, result, take_steps)
        own = driver(connection)
        check_can_end(connection, own)
        own_part.begin(own)
        for statement, parameters in last:
            rows = execute(connection, statement, parameters)
    return settled_by(result, rows)


def driver(connection: Any) -> Any:
    """Return the driver's connection of a psycopg or SQLAlchemy connection."""
    if isinstance(connection, psycopg.Connection):
        return connection
    if is_django(connection):
        return connection.connection
    return driver_of(connection.connection())


@contextlib.contextmanager
def transaction(
    job: JobContext, maker: Callable[[], Any] | bool, pool: SyncPool
) -> Iterator[tuple[AnyConnection, OwnPart]]:
    """Begin a handler's transaction, on a connection or in a session that `maker` makes."""
    with contextlib.ExitStack() as stack:
        if callable(maker):
            own_part = stack.enter_context(losses_told_apart())
            session = stack.enter_context(maker())
            if not is_django(session):  # Django's has already begun
                stack.enter_context(session.begin())
            yield session, own_part
            return
        connection = _opened(job, stack, pool)
        own_part = stack.enter_context(losses_told_apart(connection))
        # Another handler may have changed them.
        connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        connection.row_factory, connection.cursor_factory = tuple_row, psycopg.Cursor
        own_part.begin(connection)
        stack.enter_context(connection.transaction())
        own_part.end()
        stack.enter_context(closed_if_busy(connection))
        yield connection, own_part


def _opened(
    job: JobContext, stack: contextlib.ExitStack, pool: SyncPool
) -> psycopg.Connection[Any]:
    """Open a connection. If that fails, wait and try again: it is not the job's fault."""
    waits = GrowingDelay(last=LONGEST_WAIT)
    with gives_back_if_late(job):
        while True:
            try:
                return stack.enter_context(pool.connection(waits=False, undo=True))
            except psycopg.OperationalError as error:
                log.warning("%r waits for a connection: %s", job, error, extra=job._log_fields())
            time.sleep(waits.next())
            check_may_begin(job)

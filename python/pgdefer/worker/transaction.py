"""The worker's part of a handler's transaction.

Tests: integration/test_transactional.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from pgdefer.database import sql
from pgdefer.database.callers import Rows
from pgdefer.database.watchdog import watchdog
from pgdefer.errors import PgDeferError, TransactionLost, describe, is_transient, sqlstate_of
from pgdefer.tasks.context import JobAborted, JobContext, JobTimeout, RetryLater
from pgdefer.tasks.steps import TakeSteps
from pgdefer.worker import outcomes
from pgdefer.worker.ending import TIMED_OUT, is_late, result_json

__all__ = [
    "LONGEST_WAIT",
    "OwnPart",
    "Session",
    "check_begins",
    "check_can_end",
    "check_has_run",
    "check_may_begin",
    "check_session",
    "closed_if_busy",
    "gives_back_if_late",
    "last_statements",
    "losses_told_apart",
    "settled_by",
]

# SQLSTATEs of errors that the application causes, though they may pass: an earlier error in the
# transaction, its statement_timeout and lock_timeout, deadlocks, conflicts of its transactions.
OF_APPLICATION = frozenset({"25P02", "57014", "55P03", "40P01", "40001"})

# The longest pause of a job that waits for its connection, in seconds: shorter than the time after
# which a process that was told to end its job is killed.
LONGEST_WAIT = 0.5

HAS_ENDED = (
    "the handler has ended its transaction, whose COMMIT or ROLLBACK is for the worker: "
    "what it has committed remains"
)

# The types that a call returns if the function's code has not run yet.
UNRUN = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


@contextlib.contextmanager
def gives_back_if_late(job: JobContext) -> Iterator[None]:
    """Give the job back if its timeout passes in the block, where it waits for a connection."""
    try:
        yield
    except (asyncio.CancelledError, JobAborted, JobTimeout):
        if job._abort_reason == TIMED_OUT:
            job._goes_back = True
        raise


def check_may_begin(job: JobContext) -> None:
    """Raise JobAborted if a job that waits for its connection is to end, or to go back."""
    job.check_abort()
    if job._is_recalled:
        job._goes_back = True
        raise JobAborted("the handler has not begun")


def check_has_run(result: object) -> object:
    """Return a handler's return value. Raises TypeError if its code has not run yet."""
    if isinstance(result, UNRUN):
        if isinstance(result, types.CoroutineType):
            result.close()  # or Python would warn that it was never awaited
        raise TypeError(
            f"the task returned a {type(result).__name__}, whose code nobody runs: make the "
            "function, and each decorator below @app.task, an `async def` without `yield`"
        )
    return result


def last_statements(
    job: JobContext, result: object, take_steps: TakeSteps
) -> list[tuple[sql.Statement, dict[str, Any]]]:
    """Return the last statements of the handler's transaction, each with its parameters.

    Raises JobTimeout if it is too late: the transaction is then rolled back.
    """
    if is_late(job):
        raise JobTimeout
    claim = {"id": job.id, "claim": job.claim}
    if isinstance(result, RetryLater):
        last = (sql.RETRY_LATER, outcomes.yield_parameters(job.id, job.claim, result))
    else:
        last = (sql.SUCCEED, {**claim, "result": result_json(job, result)})
    if not job.steps.kept:
        return [last]
    return [(sql.FINISH_STEPS, {**claim, "steps": take_steps()}), last]


def settled_by(result: object, rows: Rows) -> outcomes.Settled:
    """Return what the last statement has made of a claim; its rows have the job's new state."""
    if isinstance(result, RetryLater):
        return outcomes.Settled("yielded", rows[0][0], result.message)
    return outcomes.SUCCEEDED


@contextlib.contextmanager
def closed_if_busy(connection: Any) -> Iterator[None]:
    """Close the connection if a block raises while a stream or copy is open.

    Its traceback may keep that open, and ROLLBACK would wait for it.
    """
    try:
        yield
    except BaseException:
        if connection.lock.locked():
            connection.pgconn.finish()
        raise


def check_can_end(connection: Any, driver: Any) -> None:
    """Raise PgDeferError if the handler has left no transaction in which its job could end.

    `driver` is the driver's connection. If it is a library's, that may begin a transaction only
    with the next statement.
    """
    info = getattr(driver, "info", None)
    status = getattr(info, "transaction_status", None)
    pipeline = getattr(info, "pipeline_status", PipelineStatus.OFF)
    if status == TransactionStatus.ACTIVE or pipeline != PipelineStatus.OFF:
        driver.pgconn.finish()  # a statement would wait for it, or be sent with the next ones
        raise PgDeferError(
            "the handler has left a stream, a copy or a pipeline open: use each in a `with` "
            "statement, or close it"
        )
    if status == TransactionStatus.INERROR:
        raise PgDeferError(
            "a statement of the handler has failed, which has ended the transaction: let the "
            "error pass, or run the statement in a savepoint"
        )
    if driver is not connection:
        return
    if status == TransactionStatus.IDLE:
        raise PgDeferError(HAS_ENDED)
    if driver.closed and not driver.broken:
        raise PgDeferError("the handler has closed its connection, which is for the worker to do")


@runtime_checkable
class Session(Protocol):
    """A SQLAlchemy session, which must send all its changes before the last statement."""

    def flush(self) -> Any:
        """Send pending changes."""

    def in_transaction(self) -> bool:
        """Whether it has a transaction."""


def check_session(session: Session) -> None:
    """Raise PgDeferError if the handler has ended the transaction of its session."""
    if not session.in_transaction():
        raise PgDeferError(HAS_ENDED)


def check_begins(connection: Any) -> None:
    """Raise PgDeferError if SQLAlchemy's connection has each statement committed at once."""
    connection = getattr(connection, "sync_connection", connection)
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise PgDeferError(
            "the session's engine is in AUTOCOMMIT, so what the handler has written is committed: "
            "bind the task's sessionmaker to "
            "engine.execution_options(isolation_level='READ COMMITTED')"
        )


class OwnPart:
    """The worker's part of a handler's transaction: BEGIN, the last statement and COMMIT.

    Each has a time limit, as all calls of the worker have. If the server can't do one of them, that
    is not the job's fault.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._connection: Any = None
        self._stop: Callable[[], None] = _nothing

    def begin(self, connection: Any) -> None:
        """Record that the worker's part begins, on this driver's connection."""
        self.is_on = True
        self._connection = connection
        self._stop = watchdog.begin(connection)

    def end(self) -> None:
        """Record that it has ended."""
        self.is_on = False
        self._stop()

    def is_cause(self, error: BaseException) -> bool:
        """Whether this is an error of the server, not of what the handler has set or deferred."""
        code = sqlstate_of(error) or ""
        if not self.is_on or code in OF_APPLICATION or not is_transient(error):
            return False
        if code == "25006":  # read-only
            info = getattr(self._connection, "info", None)
            names = "in_hot_standby", "default_transaction_read_only"
            return info is None or any(info.parameter_status(name) == "on" for name in names)
        return True


def _nothing() -> None: ...


@contextlib.contextmanager
def losses_told_apart(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None = None,
) -> Iterator[OwnPart]:
    """Raise TransactionLost if the transaction ended because its connection was lost.

    Also if the server could not do the worker's part, for example because its disk was full.
    """
    own_part = OwnPart()
    try:
        yield own_part
    except Exception as error:
        if connection is None:
            is_lost = getattr(error, "connection_invalidated", False)
        else:
            is_lost = isinstance(error, psycopg.Error) and connection.broken
        if is_lost:
            raise TransactionLost("the connection was lost in the handler's transaction") from error
        if own_part.is_cause(error):
            said = f"the handler's transaction could not be ended: {describe(error)}"
            raise TransactionLost(said) from error
        raise
    finally:
        own_part.end()

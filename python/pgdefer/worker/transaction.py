"""The worker's part of a handler's transaction."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import psycopg

from pgdefer.database import sql
from pgdefer.database.callers import Rows
from pgdefer.database.watchdog import watchdog
from pgdefer.errors import TransactionLost, describe, is_transient
from pgdefer.tasks.context import JobContext, JobTimeout, RetryLater
from pgdefer.tasks.steps import TakeSteps
from pgdefer.worker import outcomes
from pgdefer.worker.ending import TIMED_OUT, result_json

__all__ = [
    "OwnPart",
    "Session",
    "check_has_run",
    "driver_of",
    "last_statements",
    "losses_told_apart",
    "settled_by",
]

# The types that a call returns if the function's code has not run yet.
UNRUN = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)


def check_has_run(result: object) -> object:
    """Return a handler's return value. Raises TypeError if its code has not run yet."""
    if isinstance(result, UNRUN):
        if isinstance(result, types.CoroutineType):
            result.close()  # or Python complains that nobody awaits it
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
    if job._abort_reason == TIMED_OUT:
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
    return outcomes.Settled("succeeded", "succeeded")


def driver_of(connection: Any) -> Any:
    """Return the driver's connection of an SQLAlchemy connection."""
    connection = getattr(connection, "sync_connection", connection)
    return connection.connection.driver_connection


@runtime_checkable
class Session(Protocol):
    """An SQLAlchemy session, which must send all its changes before the last statement."""

    def flush(self) -> Any:
        """Send pending changes."""


class OwnPart:
    """The worker's part of a handler's transaction: BEGIN, the last statement and COMMIT.

    Each has a time limit, as all calls of the worker have; if one fails, that is not the job's
    fault.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._stop: Callable[[], None] = _nothing

    def begin(self, connection: Any) -> None:
        """Record that the worker's part begins, on this driver's connection."""
        self.is_on = True
        self._stop = watchdog.begin(connection)

    def end(self) -> None:
        """Record that it has ended."""
        self.is_on = False
        self._stop()


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
            is_lost = isinstance(error, psycopg.Error) and connection.closed
        if is_lost:
            raise TransactionLost("the connection was lost in the handler's transaction") from error
        if own_part.is_on and is_transient(error):
            said = f"the handler's transaction could not be ended: {describe(error)}"
            raise TransactionLost(said) from error
        raise
    finally:
        own_part.end()

"""Errors: one class for every SQLSTATE of the queue, and those that Python itself raises."""

# The names are the contract's (job_not_found, claim_lost ...), so they have no suffix.
# ruff: noqa: N818

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import psycopg

from ._text import plain

__all__ = [
    "SQLSTATES",
    "AlreadyQueued",
    "ClaimLost",
    "DecodeError",
    "DependencyCycle",
    "EncodeError",
    "IncompatibleClient",
    "InvalidParameter",
    "InvalidState",
    "JobCancelled",
    "JobFailed",
    "JobNotFound",
    "NotInstalled",
    "PgDeferError",
    "QueueNotEmpty",
    "TransactionLost",
    "UnknownTask",
    "WorkerGone",
    "WrongIsolation",
    "concerning",
    "describe",
    "is_lost",
    "is_refused",
    "is_transient",
    "refused",
    "sqlstate_of",
    "translate",
    "translated",
]


class PgDeferError(Exception):
    """Base of every error that this package raises.

    `sqlstate`, `detail` and `hint` are PostgreSQL's, None where the error was found in Python.
    """

    sqlstate: str | None = None

    def __init__(
        self, message: str = "", *, detail: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        said = f"{self.message} ({self.detail})" if self.detail else self.message
        return f"{said.removesuffix('.')}. {self.hint}" if self.hint else said


class JobNotFound(PgDeferError):
    """QJ001: the id does not exist."""

    sqlstate = "QJ001"


class ClaimLost(PgDeferError):
    """QJ002: the claim is not the current one; another decides about the job now."""

    sqlstate = "QJ002"


class InvalidState(PgDeferError):
    """QJ003: the job's state does not allow this; `detail` names the state."""

    sqlstate = "QJ003"


class AlreadyQueued(PgDeferError):
    """QJ004: queueing_lock is taken by a job that has not started.

    `detail` names that one, of a retry the job that was to be retried.
    """

    sqlstate = "QJ004"


class DependencyCycle(PgDeferError):
    """QJ005: the new need would close a circle; `detail` names the path."""

    sqlstate = "QJ005"


class QueueNotEmpty(PgDeferError):
    """QJ006: refused without force."""

    sqlstate = "QJ006"


class WorkerGone(PgDeferError):
    """QJ007: the worker was reaped or deregistered."""

    sqlstate = "QJ007"


class WrongIsolation(PgDeferError):
    """QJ008: the transaction is not READ COMMITTED where that is needed."""

    sqlstate = "QJ008"


class IncompatibleClient(PgDeferError):
    """QJ090: this client and the schema's version do not fit."""

    sqlstate = "QJ090"


class InvalidParameter(PgDeferError, ValueError):
    """22023: a bad argument; nothing was changed."""

    sqlstate = "22023"


class NotInstalled(PgDeferError):
    """The database has no schema queue, or it lacks what this client calls."""


class JobFailed(PgDeferError):
    """The job whose result was asked for has failed; `id` is its id, `error` its last error."""

    def __init__(self, id: int, error: str | None, state: str = "failed") -> None:
        super().__init__(f"job {id} {state}" if state == "failed" else f"job {id} was {state}")
        if error:
            self.message += f": {error}"
        self.id = id
        self.error = error


class JobCancelled(JobFailed):
    """The job whose result was asked for was cancelled."""

    def __init__(self, id: int, error: str | None) -> None:
        super().__init__(id, error, "cancelled")


class EncodeError(PgDeferError, TypeError):
    """An argument or result can't be stored as JSON."""


class DecodeError(PgDeferError, ValueError):
    """Stored arguments can't be turned into what the task takes; a retry would not help."""


class TransactionLost(PgDeferError):
    """The connection was lost in a handler's transaction: whether it had committed isn't known."""


class UnknownTask(PgDeferError, LookupError):
    """The task isn't registered in this process."""


SQLSTATES: dict[str, type[PgDeferError]] = {
    "QJ001": JobNotFound,
    "QJ002": ClaimLost,
    "QJ003": InvalidState,
    "QJ004": AlreadyQueued,
    "QJ005": DependencyCycle,
    "QJ006": QueueNotEmpty,
    "QJ007": WorkerGone,
    "QJ008": WrongIsolation,
    "QJ090": IncompatibleClient,
    "22023": InvalidParameter,
    # Undefined schema, function and table: queue.* is all that is ever called.
    "3F000": NotInstalled,
    "42883": NotInstalled,
    "42P01": NotInstalled,
}


# What functions on many jobs refuse in a job's row, in the words of those on one.
_REFUSALS = {
    "QJ001": (
        "job not found",
        "The id is wrong, its transaction has not committed, or the job was pruned or deleted.",
    ),
    "QJ003": (
        "the job's state does not allow this",
        "Where another transaction may be at the job, try again; else see what force does.",
    ),
    "QJ004": ("already queued", "Another job with its queueing_lock waits."),
}


def refused(id: int, state: str | None, code: str) -> PgDeferError:
    """Return the error that stands for a job's row; `state` is the job's, None without one."""
    message, hint = _REFUSALS[code]
    detail = f"id: {id}" if state is None else f"id: {id}, state: {state}"
    return SQLSTATES[code](message, detail=detail, hint=hint)


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error of psycopg, SQLAlchemy, psycopg2 or asyncpg."""
    original: Any = getattr(error, "orig", None) or error
    for name in ("sqlstate", "pgcode"):
        code = getattr(original, name, None)
        if isinstance(code, str):
            return code
    return None


def describe(error: BaseException) -> str:
    """Return an error as one line for the log: never what the server quotes of the data."""
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        return plain(f"{error.diag.message_primary} ({error.sqlstate})")
    return plain(" ".join(str(error).split())) or type(error).__name__


def is_lost(error: BaseException) -> bool:
    """Whether it says that the connection is lost: the server went, or the line to it."""
    kinds = (psycopg.OperationalError, psycopg.InterfaceError, OSError)
    return isinstance(error, kinds) and sqlstate_of(error) in (None, "57P01", "57P02", "57P03")


# Classes of errors that lie in the state of the server or of its other sessions, not in what was
# sent: the connection (08), the transaction's state, such as on a server that only reads (25),
# deadlocks (40), resources such as memory, disks and connections (53), locks (55), an operator
# (57), the system (58), the server's files (F0), and faults of the server (XX). All others lie in
# the statement and its data, and come again however often it is sent.
_TRANSIENT = frozenset({"08", "25", "40", "53", "55", "57", "58", "F0", "XX"})


def is_transient(error: BaseException) -> bool:
    """Whether the server may take the same statement later: it refused it for no fault of that."""
    return (sqlstate_of(error) or "")[:2] in _TRANSIENT


def is_refused(error: BaseException) -> bool:
    """Whether a server refused the connection for its database, role or password.

    By its words, as libpq keeps no SQLSTATE of that. Of a server that speaks another language than
    English it is never true.
    """
    return isinstance(error, psycopg.OperationalError) and bool(_REFUSED.search(str(error)))


_REFUSED = re.compile(
    r"""FATAL:\ .*
        ( (database|role)\ ".*"\ does\ not\ exist | no\ such\ (database|user)
        | authentication\ failed | pg_hba\.conf | not\ permitted\ to\ log\ in
        | permission\ denied\ for\ database )
      | no\ password\ supplied""",
    re.VERBOSE,
)


def translate(error: BaseException) -> PgDeferError | None:
    """Return the error that stands for a driver's, or None where there is none.

    Beside SQLSTATES, values that can't be stored, as a text with a NUL, are bad arguments; some the
    driver refuses by itself.
    """
    original: Any = getattr(error, "orig", None) or error
    code = sqlstate_of(error) or ""
    kind = SQLSTATES.get(code)
    if kind is None and (
        code.startswith("22") or (not code and isinstance(original, psycopg.DataError))
    ):
        kind = InvalidParameter
    if kind is None:
        return None
    diag = getattr(original, "diag", None) or original
    message = getattr(diag, "message_primary", None) or str(original)
    detail = getattr(diag, "message_detail", None) or getattr(original, "detail", None)
    hint = getattr(diag, "message_hint", None) or getattr(original, "hint", None)
    if kind is NotInstalled:
        hint = "Run `pgdefer install` on this database."
    return kind(message, detail=detail or None, hint=hint or None)


@contextlib.contextmanager
def concerning(what: str, name: str) -> Iterator[None]:
    """Have an InvalidParameter say what it is about."""
    try:
        yield
    except InvalidParameter as error:
        text = f"{what} {name!r}: {error.message}"
        raise InvalidParameter(text, detail=error.detail, hint=error.hint) from error


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise the errors of SQLSTATES in place of the driver's; others pass."""
    try:
        yield
    except psycopg.Error as error:
        if (better := translate(error)) is not None:
            raise better from error
        raise
    except PgDeferError:
        raise
    except Exception as error:
        if hasattr(error, "orig") and (better := translate(error)) is not None:
            raise better from error
        raise

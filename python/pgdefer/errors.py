"""Errors: one class for each SQLSTATE of the queue, and errors that only this package raises."""

# The names are the contract's (job_not_found, claim_lost ...), so they have no suffix.
# ruff: noqa: N818

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import psycopg

from pgdefer._text import escaped

__all__ = [
    "POOLER_HINT",
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
    "Naming",
    "NotInstalled",
    "PgDeferError",
    "QueueNotEmpty",
    "StepChanged",
    "StepFailed",
    "TransactionLost",
    "UnknownTask",
    "WorkerGone",
    "WrongIsolation",
    "describe",
    "is_lost",
    "is_refused",
    "is_transient",
    "refused",
    "refused_outcome",
    "sqlstate_of",
    "translate",
    "translated",
]


class PgDeferError(Exception):
    """Base of every error that this package raises.

    `sqlstate`, `detail` and `hint` are what they are in PostgreSQL's errors. Each may be None.
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
    """QJ002: the claim is no longer the current one."""

    sqlstate = "QJ002"


class InvalidState(PgDeferError):
    """QJ003: the job's state does not allow this; `detail` names the state."""

    sqlstate = "QJ003"


class AlreadyQueued(PgDeferError):
    """QJ004: a job that has not started holds the queueing_lock.

    `detail` names that job; for a retry, the job that should have been retried. Also raised if the
    idempotency_key belongs to a job in a queue that the role may not use; `detail` then names the
    key.
    """

    sqlstate = "QJ004"


class DependencyCycle(PgDeferError):
    """QJ005: the new need would create a dependency cycle; `detail` names the path, or the lock."""

    sqlstate = "QJ005"


class QueueNotEmpty(PgDeferError):
    """QJ006: refused without force."""

    sqlstate = "QJ006"


class WorkerGone(PgDeferError):
    """QJ007: the worker was reaped or deregistered."""

    sqlstate = "QJ007"


class WrongIsolation(PgDeferError):
    """QJ008: the transaction must be READ COMMITTED, but is not."""

    sqlstate = "QJ008"


class StepChanged(PgDeferError):
    """QJ009: a step of a durable job differs from the one that was finished under its name.

    Also raised if a job is to continue from a step that it has not finished.
    """

    sqlstate = "QJ009"


class IncompatibleClient(PgDeferError):
    """QJ090: this client and the schema's version are incompatible."""

    sqlstate = "QJ090"


class InvalidParameter(PgDeferError, ValueError):
    """22023: a bad argument; nothing was changed."""

    sqlstate = "22023"


class NotInstalled(PgDeferError):
    """The database has no schema queue, or it lacks what this client calls."""

    #: What to do about it: Django has a way of its own.
    remedy: ClassVar[str] = "Run `pgdefer install` on this database."


class JobFailed(PgDeferError):
    """The job whose result was requested has failed; `id` is its id, `error` its last error."""

    def __init__(self, id: int, error: str | None, state: str = "failed") -> None:
        super().__init__(f"job {id} {state}" if state == "failed" else f"job {id} was {state}")
        if error:
            self.message += f": {error}"
        self.id = id
        self.error = error


class JobCancelled(JobFailed):
    """The job whose result was requested was cancelled."""

    def __init__(self, id: int, error: str | None) -> None:
        super().__init__(id, error, "cancelled")


class StepFailed(PgDeferError):
    """A step of a durable job has failed for good, by its own retry policy.

    `step` is its name, `error` the text of its last error. All later runs raise it again, so a
    handler that does not catch it fails the job at once. `Job.retry` tries the step again if the
    handler has begun no other since; otherwise pass `from_step`. Only in the run in which the step
    fails, `__cause__` is the error itself.
    """

    def __init__(self, step: str, error: str) -> None:
        super().__init__(f"step {step} failed: {error}")
        self.step = step
        self.error = error


class EncodeError(PgDeferError, TypeError):
    """An argument or result can't be stored as JSON."""


class DecodeError(PgDeferError, ValueError):
    """Stored arguments can't be decoded, or do not fit the task; a retry would not help."""


class TransactionLost(PgDeferError):
    """The connection was lost in a handler's transaction or step, which may have committed."""


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
    "QJ009": StepChanged,
    "QJ090": IncompatibleClient,
    "22023": InvalidParameter,
    # Undefined schema, function and table: the package calls only queue.*.
    "3F000": NotInstalled,
    "42883": NotInstalled,
    "42P01": NotInstalled,
}


# Refusals in the rows of functions on many jobs, in the words of functions on one job.
REFUSALS = {
    "QJ001": (
        "job not found",
        "The id is wrong, its transaction has not committed, or the job was pruned or deleted.",
    ),
    "QJ003": (
        "the job's state does not allow this",
        "Where another transaction changes the job, try again.",
    ),
    "QJ004": ("already queued", "Another job has its queueing_lock."),
    "QJ009": ("the job has finished no such step", "`pgdefer job steps {id}` lists them."),
}


def refused(id: int, state: str | None, code: str) -> PgDeferError:
    """Return the error for a job's row; `state` is the job's state, or None."""
    message, hint = REFUSALS.get(code, (f"the call was refused ({code})", ""))
    if code == "QJ003" and state == "running":
        hint = "move, retry and delete take a running job with force=True."
    detail = f"id: {id}" if state is None else f"id: {id}, state: {state}"
    return SQLSTATES.get(code, PgDeferError)(message, detail=detail, hint=hint.format(id=id))


# Refusals of outcomes, in the words of queue.retry_later.
_REFUSED_OUTCOMES = {
    "QJ001": REFUSALS["QJ001"],
    "QJ005": (
        "the new need would create a dependency cycle",
        "A job can't need itself, a job that needs it, or one that waits behind it for its lock.",
    ),
}


def refused_outcome(needs: Sequence[int], code: str) -> PgDeferError:
    """Return the error for an outcome; `needs` are those that it would have added."""
    message, hint = _REFUSED_OUTCOMES.get(code, (f"the outcome was refused ({code})", ""))
    detail = f"needs: {', '.join(map(str, needs))}" if needs else None
    return SQLSTATES.get(code, PgDeferError)(message, detail=detail, hint=hint or None)


def _original(error: BaseException) -> Any:
    """Return the driver's error, from one that SQLAlchemy or Django raised in its place."""
    if type(error).__module__ == "django.db.utils" and isinstance(error.__cause__, psycopg.Error):
        return error.__cause__
    original = getattr(error, "orig", None)
    if original is None:
        return error
    # SQLAlchemy's own error of asyncpg leaves some of it out, which depends on the version.
    cause = original.__cause__
    return cause if type(cause).__module__.startswith("asyncpg.") else original


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error of psycopg, SQLAlchemy, Django, psycopg2 or asyncpg."""
    original = _original(error)
    for name in ("sqlstate", "pgcode"):
        code = getattr(original, name, None)
        if isinstance(code, str):
            return code
    return None


def describe(error: BaseException) -> str:
    """Return an error as one line for the log, without the data that the server quotes."""
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        said = escaped(f"{error.diag.message_primary} ({error.sqlstate})")
        return f"{said}; {POOLER_HINT}" if _is_of_pooler(error) else said
    return escaped(" ".join(str(error).split())) or type(error).__name__


#: What to do about a prepared statement that another session has, as poolers share sessions.
POOLER_HINT = "behind a pooler? pass pgbouncer=True, or --pgbouncer"


def _is_of_pooler(error: BaseException) -> bool:
    """Whether a prepared statement is missing, or is there already, as behind a pooler."""
    code = sqlstate_of(error)
    return code in ("26000", "42P05") or (
        code == "08P01" and "prepared statement" in str(_original(error))
    )


def is_lost(error: BaseException) -> bool:
    """Whether an error means that the connection is lost, or that the server went down."""
    kinds = (psycopg.OperationalError, psycopg.InterfaceError, OSError)
    return isinstance(error, kinds) and sqlstate_of(error) in (None, "57P01", "57P02", "57P03")


# Classes of errors caused by the state of the server or of other sessions, not by the statement:
# the connection (08), the transaction's state, such as on a read-only server (25), deadlocks (40),
# resources such as memory, disks and connections (53), locks (55), an operator (57), the system
# (58), the server's files (F0), and faults of the server (XX). The statement or its data cause all
# other errors, so sending it again would not help.
_TRANSIENT = frozenset({"08", "25", "40", "53", "55", "57", "58", "F0", "XX"})


def is_transient(error: BaseException) -> bool:
    """Whether the server may accept the same statement later, as the statement is not the cause."""
    return (sqlstate_of(error) or "")[:2] in _TRANSIENT


def is_refused(error: BaseException) -> bool:
    """Whether a server refused the connection because of its database, role or password.

    Judged by the text, because libpq keeps no SQLSTATE for this. Never true if the server's
    messages are not in English.
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
    """Return the package's error for a driver's error, or None if there is none.

    Besides SQLSTATES, values that can't be stored, such as text with a NUL, are bad arguments. The
    driver itself refuses some of them.
    """
    original = _original(error)
    code = sqlstate_of(error) or ""
    kind = SQLSTATES.get(code)
    if kind is None and (
        code.startswith("22") or (not code and isinstance(original, psycopg.DataError))
    ):
        kind = InvalidParameter
    if kind is None:
        return None
    diag = getattr(original, "diag", None) or original
    message = getattr(diag, "message_primary", None) or getattr(original, "message", None)
    detail = getattr(diag, "message_detail", None) or getattr(original, "detail", None)
    hint = getattr(diag, "message_hint", None) or getattr(original, "hint", None)
    if kind is NotInstalled:
        hint = NotInstalled.remedy
    return kind(message or str(original), detail=detail or None, hint=hint or None)


class Naming:
    """A block in which the errors of wrong arguments begin with what those are for, as a task."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, InvalidParameter | EncodeError):
            if not error.message.startswith(_NAMED):
                error.message = f"{self._what}: {error.message}"
                error.args = (error.message,)
        elif (
            error is not None
            and type(error) in (TypeError, ValueError)
            and not str(error).startswith(_NAMED)
        ):
            error.args = (f"{self._what}: {error}",)


# How messages begin that already say what they are about.
_NAMED = ("the task ", "a job of ", "jobs of ", "the schedule ")


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise the errors of SQLSTATES in place of the driver's; others pass through."""
    try:
        yield
    except psycopg.Error as error:
        if (better := translate(error)) is not None:
            raise better from error
        if _is_of_pooler(error):
            error.add_note(POOLER_HINT)
        raise
    except PgDeferError:
        raise
    except Exception as error:
        if _original(error) is not error and (better := translate(error)) is not None:
            raise better from error
        raise

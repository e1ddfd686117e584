"""The running job: `current_job()`.

Tests: integration/test_worker.py, integration/test_processes.py.
"""

from __future__ import annotations

import contextvars
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeAlias, cast

from pgdefer._text import escaped
from pgdefer.client.client import Client
from pgdefer.codec import VERSION, unwrap
from pgdefer.tasks.claim_calls import attempts_left, extend, needs
from pgdefer.tasks.claim_calls_async import attempts_left_async, extend_async, needs_async
from pgdefer.tasks.durable import DurableCalls
from pgdefer.tasks.durable_async import AsyncDurableCalls
from pgdefer.tasks.need import Need
from pgdefer.tasks.raised import JobAborted, JobTimeout, RetryLater
from pgdefer.tasks.steps import Steps

__all__ = [
    "JobAborted",
    "JobContext",
    "JobTimeout",
    "Middleware",
    "Need",
    "RetryLater",
    "current_job",
    "enter_job",
    "leave_job",
    "running_job",
]


class JobContext(DurableCalls, AsyncDurableCalls):
    """A running job, as its handler sees it: the claimed job, and whether to stop.

    The pair (id, claim) identifies this run: no other run has it, and only its holder may end it.
    """

    __slots__ = (
        "_abort_reason",
        "_args",
        "_error",
        "_goes_back",
        "_headers",
        "_is_recalled",
        "_late_at",
        "_row",
        "_stored",
        "attempt",
        "claim",
        "client",
        "deadline",
        "id",
        "lock",
        "parent",
        "priority",
        "queue",
        "result",
        "scheduled_at",
        "steps",
        "task",
        "timeout",
    )

    id: int
    claim: int
    task: str
    queue: str
    priority: int
    lock: str | None
    attempt: int
    scheduled_at: dt.datetime | None
    deadline: dt.datetime | None
    timeout: dt.timedelta | None
    parent: int | None
    _headers: str | None

    def __init__(self, client: Client, row: Sequence[Any]) -> None:
        self.client = client
        self._row = row
        # The columns of queue.fetch, in order.
        (
            self.id,
            self.claim,
            self.task,
            self._stored,
            self.queue,
            self.priority,
            self.lock,
            self.attempt,
            self.scheduled_at,
            self.deadline,
            self.timeout,
            self._headers,
            self.parent,
            steps,
        ) = row
        self.steps = Steps(steps)
        self._args: dict[str, Any] | None = None
        self._abort_reason: str | None = None
        self._error: BaseException | None = None
        # Whether to give the job back if its handler waits for a connection; whether it goes back.
        self._is_recalled = self._goes_back = False
        # When its timeout passes, for a handler that may keep the worker from noticing that.
        self._late_at: float | None = None
        #: The handler's return value, for the middleware around it.
        self.result: Any = None

    def __repr__(self) -> str:
        return f"<job {self.id} {escaped(self.task)} attempt {self.attempt} claim {self.claim}>"

    def _log_fields(self) -> dict[str, object]:
        """Return the fields of a log record about the job."""
        return {"id": self.id, "task": self.task, "queue": self.queue, "attempt": self.attempt}

    @property
    def dsn(self) -> str:
        """The DSN of the job's database, for connections that the handler opens itself."""
        return self.client.source.conninfo()

    @property
    def headers(self) -> Mapping[str, Any]:
        """The job's headers. Raises DecodeError if Python can't read them."""
        return {} if self._headers is None else cast("dict[str, Any]", unwrap(self._headers))

    @property
    def args(self) -> Any:
        """The arguments by name as they are stored, decoded when first read.

        They lack the defaults of the task's parameters. Raises DecodeError if they can't be read,
        or if the decoder of a value is `async def`.
        """
        if self._args is None:
            self._args = self.client.codec.decode_stored(self._stored)
            self._args.pop(VERSION, None)
        return self._args

    @property
    def scheduled_for(self) -> dt.datetime | None:
        """The time of the recurring run, in its schedule's zone; None for other jobs."""
        text = unwrap(self._stored).get("scheduled_for")
        try:
            return dt.datetime.fromisoformat(text)
        except (TypeError, ValueError):
            return None

    def _is_here(self) -> bool:
        """Whether the calling code belongs to the job's run.

        False also in threads that the handler started without a copy of its context.
        """
        return running_job() is self

    def should_abort(self) -> bool:
        """Whether the handler should end: the job was cancelled, lost, timed out or must go back.

        It must go back if its worker stops at once. Handlers that are not coroutines should
        check this from time to time, and raise `JobAborted` (or return) when it is true; coroutines
        are cancelled. At the timeout, `JobTimeout` is raised in the handler's thread.
        """
        return self._abort_reason is not None

    def check_abort(self) -> None:
        """Raise JobAborted if `should_abort` is true."""
        if self._abort_reason is not None:
            raise JobAborted(self._abort_reason)

    def needs(self) -> list[Need]:
        """Return the jobs that this job needs, such as a group's members, in the order of ids.

        Their states are the present ones. Raises DecodeError if a result can't be decoded.
        """
        return needs(self.client, self.id)

    async def needs_async(self) -> list[Need]:
        """Return the jobs that this job needs, such as a group's members, in the order of ids.

        Their states are the present ones. Raises DecodeError if a result can't be decoded.
        """
        return await needs_async(self.client, self.id)

    def max_attempts(self) -> int | None:
        """Return the number of failures at which the job fails for good; None means no limit."""
        return attempts_left(self.client, self.id, self.claim)[0]

    async def max_attempts_async(self) -> int | None:
        """Return the number of failures at which the job fails for good; None means no limit."""
        return (await attempts_left_async(self.client, self.id, self.claim))[0]

    def is_last_attempt(self) -> bool:
        """Whether the job fails for good if this run fails, by its retry policy.

        If the task has `retry_on` or `decide`, an error may end the job earlier.
        """
        return attempts_left(self.client, self.id, self.claim)[1]

    async def is_last_attempt_async(self) -> bool:
        """Whether the job fails for good if this run fails: as `is_last_attempt`."""
        return (await attempts_left_async(self.client, self.id, self.claim))[1]

    def extend(self, lease: dt.timedelta) -> dt.datetime:
        """Give this run its own lease. Only the lease then decides when the run is dead.

        Returns its end; a timeout still limits the run. Raises ClaimLost if it is too late.
        """
        return extend(self.client, self.id, self.claim, lease)

    async def extend_async(self, lease: dt.timedelta) -> dt.datetime:
        """Give this run its own lease. Only the lease then decides when the run is dead.

        Returns its end; a timeout still limits the run. Raises ClaimLost if it is too late.
        """
        return await extend_async(self.client, self.id, self.claim, lease)


# Code around a handler: `App(middleware=[...])`.
Middleware: TypeAlias = Callable[
    [JobContext], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]
]

_current: contextvars.ContextVar[JobContext | None] = contextvars.ContextVar("pgdefer_job")


def current_job() -> JobContext:
    """Return the job whose handler is running. Raises LookupError outside of a handler."""
    job = running_job()
    if job is None:
        raise LookupError("no job is running here (a batch's jobs are its handler's argument)")
    return job


def enter_job(job: JobContext | None) -> contextvars.Token[JobContext | None]:
    """Make a job, or none, the running one in this context; `leave_job` takes the token."""
    return _current.set(job)


def leave_job(token: contextvars.Token[JobContext | None]) -> None:
    """Undo `enter_job`."""
    _current.reset(token)


def running_job() -> JobContext | None:
    """Return the job whose handler is running, or None."""
    return _current.get(None)

"""The job that runs here: `current_job()`."""

from __future__ import annotations

import contextvars
import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ._codec import unwrap
from ._errors import PgDeferError
from ._options import listed
from ._text import plain

if TYPE_CHECKING:
    import asyncio

    from ._app import App
    from ._options import HasId
    from ._slots import Slots
    from ._threads import Interruptible

__all__ = [
    "JobAborted",
    "JobContext",
    "JobTimeout",
    "Middleware",
    "Need",
    "RetryLater",
    "current_job",
]


@dataclasses.dataclass(frozen=True)
class Need:
    """A job that another needs: its state, its result once it has one, its last error.

    Of a job of a queue that is not this role's there is but the id; one that was deleted by force
    has the state `deleted`.
    """

    id: int
    task: str | None
    state: str | None
    result: Any
    error: str | None


class JobContext:
    """A running job, as its handler sees it: what was claimed, and whether to stop.

    The pair (id, claim) names this run: no other run has it, and only its holder may end it.
    """

    __slots__ = (
        "_abort",
        "_asked_at",
        "_call",
        "_headers",
        "_is_in_process",
        "_is_refused",
        "_is_released",
        "_row",
        "_runner",
        "_slots",
        "_stored",
        "_timer",
        "app",
        "attempt",
        "claim",
        "deadline",
        "id",
        "lock",
        "parent",
        "priority",
        "queue",
        "scheduled_at",
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
    # When it was asked for, by the worker's clock; only of jobs with a timeout.
    _asked_at: float

    def __init__(self, app: App, row: Sequence[Any]) -> None:
        self.app = app
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
        ) = row
        self._abort: str | None = None
        self._is_refused = False
        self._is_released = False
        self._runner: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._call: Interruptible[str | None] | None = None
        self._slots: Slots | None = None
        self._is_in_process = False

    def __repr__(self) -> str:
        return f"<job {self.id} {plain(self.task)} attempt {self.attempt} claim {self.claim}>"

    @property
    def headers(self) -> Mapping[str, Any]:
        """What was given as headers. Raises DecodeError for what Python can't read."""
        return {} if self._headers is None else cast("dict[str, Any]", unwrap(self._headers))

    @property
    def scheduled_for(self) -> dt.datetime | None:
        """The time that a recurring run is for, in its schedule's zone; None for other jobs."""
        text = unwrap(self._stored).get("scheduled_for")
        try:
            return dt.datetime.fromisoformat(text)
        except (TypeError, ValueError):
            return None

    def should_abort(self) -> bool:
        """Whether the job was cancelled, timed out, or lost, or its worker stops at once.

        Handlers that are no coroutines ask this now and then, and raise `JobAborted` (or return)
        when it is true; coroutines are cancelled. At its timeout `JobTimeout` is raised in the
        handler's thread.
        """
        return self._abort is not None

    def check_abort(self) -> None:
        """Raise JobAborted where `should_abort` is true."""
        if self._abort is not None:
            raise JobAborted(self._abort)

    def needs(self) -> list[Need]:
        """Return what the job needs, as it stands now, by id: in a group its members."""
        return self.app.needs(self)

    async def needs_async(self) -> list[Need]:
        """As `needs`, for asyncio."""
        return await self.app.needs_async(self)

    def extend(self, lease: dt.timedelta) -> dt.datetime:
        """Give this run a lease of its own, which then alone decides when it is dead.

        Returns its end; a timeout still bounds the run. Raises ClaimLost where it is too late.
        """
        return self.app.extend(self, lease)

    async def extend_async(self, lease: dt.timedelta) -> dt.datetime:
        """As `extend`, for asyncio."""
        return await self.app.extend_async(self, lease)


# What surrounds a handler: `App(middleware=[...])`.
Middleware: TypeAlias = Callable[[JobContext], AbstractContextManager[Any]]

_current: contextvars.ContextVar[JobContext] = contextvars.ContextVar("pgdefer_job")


def current_job() -> JobContext:
    """Return the job whose handler is running; raises LookupError outside of one."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError("no job is running here") from None


def running_job() -> JobContext | None:
    """Return the job whose handler is running, or None."""
    return _current.get(None)


class JobTimeout(BaseException):
    """Raised in the thread of a handler that is no coroutine when the job's timeout has passed.

    Wherever it is, as KeyboardInterrupt is; a call that runs no Python code has to return before.
    Its attempt is `timed_out`, however it ends from then on.
    """


class JobAborted(PgDeferError):  # noqa: N818
    """Raised by a handler to end an aborted job: it becomes cancelled, and isn't retried."""


class RetryLater(PgDeferError):  # noqa: N818
    """Raised or returned by a handler: not a failure, call me again.

    After `at`, if given, and after `needs`, which are added to those that the job has already;
    `needs=None` runs again as soon as `at` allows, whatever the needs' states.
    """

    def __init__(
        self,
        message: str = "",
        *,
        at: dt.datetime | None = None,
        needs: Iterable[int | HasId] | None = (),
    ) -> None:
        super().__init__(message)
        if at is not None and at.tzinfo is None:
            raise ValueError(f"at has no time zone: {at!r}")
        self.at = at
        self.needs = None if needs is None else tuple(listed("needs", needs))

"""A job by its id: waiting for its result, asking about it, changing it."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import _sql
from ._errors import refused
from ._execute import AnyAsyncConnection, AnyConnection, Rows
from ._options import to_json

if TYPE_CHECKING:
    from ._app import App

__all__ = ["Job"]

R_co = TypeVar("R_co", covariant=True)


@dataclasses.dataclass(frozen=True)
class Job(Generic[R_co]):
    """A deferred job, or one that `App.job` names. Equal to another of the same id.

    `int(job)` is its id. Nothing else is kept here: each method asks the database.

    Each but `result` takes a `connection`, as `defer` does: then it happens in the caller's
    transaction, else in one of its own. Each raises JobNotFound where there is no such job, or none
    yet, as its transaction has not committed.

    What changes the job raises InvalidState where its state does not allow that, and where it
    can't be changed just now: the caller's own transaction has deferred it, or another is at it.
    It raises WrongIsolation in a transaction that is not READ COMMITTED. Until the transaction
    ends, no worker takes in new jobs, and such calls on other connections wait: keep it short.
    """

    id: int
    app: App = dataclasses.field(repr=False, compare=False)

    def __int__(self) -> int:
        return self.id

    # Asking

    def result(self, timeout: float | None = None) -> R_co:
        """Wait until it has succeeded, and return its result: as `App.result`."""
        found: R_co = self.app.result(self, timeout)
        return found

    async def result_async(self, timeout: float | None = None) -> R_co:  # noqa: ASYNC109
        """As `result`, for asyncio."""
        found: R_co = await self.app.result_async(self, timeout)
        return found

    def state(self, *, connection: AnyConnection | None = None) -> str:
        """Return its state, as the view queue.jobs has it."""
        return _said(self.app.call(_sql.STATE, {"id": self.id}, connection))

    async def state_async(self, *, connection: AnyAsyncConnection | None = None) -> str:
        """As `state`, for asyncio."""
        return _said(await self.app.call_async(_sql.STATE, {"id": self.id}, connection))

    def why(self, *, connection: AnyConnection | None = None) -> str:
        """Return why it is not running: what it waits for, or how it ended."""
        return _said(self.app.call(_sql.WHY, {"id": self.id}, connection))

    async def why_async(self, *, connection: AnyAsyncConnection | None = None) -> str:
        """As `why`, for asyncio."""
        return _said(await self.app.call_async(_sql.WHY, {"id": self.id}, connection))

    # Changing

    def cancel(self, *, abort: bool = False, connection: AnyConnection | None = None) -> str:
        """Cancel it, if it has not started, and return `cancelled`.

        With `abort` the worker of a running one is told to stop it, and `running` is returned: it
        becomes cancelled unless it succeeds before. Raises InvalidState where it has finished, or
        runs and there is no `abort`.
        """
        given = {"id": self.id, "abort": abort}
        return _said(self.app.call(_sql.CANCEL, given, connection))

    async def cancel_async(
        self, *, abort: bool = False, connection: AnyAsyncConnection | None = None
    ) -> str:
        """As `cancel`, for asyncio."""
        given = {"id": self.id, "abort": abort}
        return _said(await self.app.call_async(_sql.CANCEL, given, connection))

    def retry(self, *, force: bool = False, connection: AnyConnection | None = None) -> str:
        """Run it again if it has finished, at once if it waits for a retry; return its new state.

        Failures are counted anew. With `force` a running one's claim is lost, and an `expires_at`
        that has passed no longer holds. Raises InvalidState without `force` where it runs or has
        expired, and where there is nothing to retry; AlreadyQueued where it has never started, and
        its queueing_lock is another job's.
        """
        given = {"ids": [self.id], "force": force}
        return _outcome(self.app.call(_sql.RETRY, given, connection))

    async def retry_async(
        self, *, force: bool = False, connection: AnyAsyncConnection | None = None
    ) -> str:
        """As `retry`, for asyncio."""
        given = {"ids": [self.id], "force": force}
        return _outcome(await self.app.call_async(_sql.RETRY, given, connection))

    def reschedule(
        self, at: dt.datetime | None = None, *, connection: AnyConnection | None = None
    ) -> str:
        """Give it another time, None: now; return its new state.

        Raises InvalidState where it runs or has finished, ValueError for a time without a zone.
        """
        given = {"id": self.id, "at": to_json("at", at)}
        return _said(self.app.call(_sql.RESCHEDULE, given, connection))

    async def reschedule_async(
        self, at: dt.datetime | None = None, *, connection: AnyAsyncConnection | None = None
    ) -> str:
        """As `reschedule`, for asyncio."""
        given = {"id": self.id, "at": to_json("at", at)}
        return _said(await self.app.call_async(_sql.RESCHEDULE, given, connection))

    def hold(self, *, connection: AnyConnection | None = None) -> str:
        """Put it aside until `unhold`, and return `held`; it keeps its place at its lock.

        Raises InvalidState where it runs or has finished.
        """
        return _said(self.app.call(_sql.HOLD, {"id": self.id}, connection))

    async def hold_async(self, *, connection: AnyAsyncConnection | None = None) -> str:
        """As `hold`, for asyncio."""
        return _said(await self.app.call_async(_sql.HOLD, {"id": self.id}, connection))

    def unhold(self, *, connection: AnyConnection | None = None) -> str:
        """Let it go on, and return its new state. Raises InvalidState where it is not held."""
        return _said(self.app.call(_sql.UNHOLD, {"id": self.id}, connection))

    async def unhold_async(self, *, connection: AnyAsyncConnection | None = None) -> str:
        """As `unhold`, for asyncio."""
        return _said(await self.app.call_async(_sql.UNHOLD, {"id": self.id}, connection))

    def set_priority(self, priority: int, *, connection: AnyConnection | None = None) -> str:
        """Change its priority, if it runs or has finished that of its next run; return its state.

        Raises TypeError for what is no int, ValueError for one that 32 bits don't hold.
        """
        given = {"ids": [self.id], "priority": to_json("priority", priority)}
        return _outcome(self.app.call(_sql.SET_PRIORITY, given, connection))

    async def set_priority_async(
        self, priority: int, *, connection: AnyAsyncConnection | None = None
    ) -> str:
        """As `set_priority`, for asyncio."""
        given = {"ids": [self.id], "priority": to_json("priority", priority)}
        return _outcome(await self.app.call_async(_sql.SET_PRIORITY, given, connection))

    def set_args(self, args: Mapping[str, Any], *, connection: AnyConnection | None = None) -> str:
        """Give it other arguments, in place of all it had; return its state.

        They are not checked against the task's. A failed or cancelled job has them for its retry;
        its lock and keys stay. Raises InvalidState where it runs or has succeeded.
        """
        given = {"id": self.id, "args": self.app.codec.dumps_args(args)}
        return _said(self.app.call(_sql.SET_ARGS, given, connection))

    async def set_args_async(
        self, args: Mapping[str, Any], *, connection: AnyAsyncConnection | None = None
    ) -> str:
        """As `set_args`, for asyncio."""
        given = {"id": self.id, "args": self.app.codec.dumps_args(args)}
        return _said(await self.app.call_async(_sql.SET_ARGS, given, connection))

    def delete(self, *, force: bool = False, connection: AnyConnection | None = None) -> None:
        """Remove it and every trace of it.

        With `force` a running one too, whose claim is lost, and one that unfinished jobs need,
        which count it as failed unless it had succeeded. Raises InvalidState for these without.
        """
        given = {"ids": [self.id], "force": force}
        _outcome(self.app.call(_sql.DELETE, given, connection))

    async def delete_async(
        self, *, force: bool = False, connection: AnyAsyncConnection | None = None
    ) -> None:
        """As `delete`, for asyncio."""
        given = {"ids": [self.id], "force": force}
        _outcome(await self.app.call_async(_sql.DELETE, given, connection))


def _said(rows: Rows) -> str:
    """Return what a function on one job returned."""
    ((said,),) = rows
    return str(said)


def _outcome(rows: Rows) -> str:
    """Return what became of the one job that a function on many was given, or raise why not."""
    ((id, outcome, error),) = rows
    if error is not None:
        raise refused(id, outcome, error)
    return str(outcome)

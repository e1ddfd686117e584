"""A fake job, for handlers that are called directly.

Tests: integration/test_testing.py.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from pgdefer.checks import check_number
from pgdefer.client.client import Client
from pgdefer.options import checked_interval, checked_mapping, checked_time
from pgdefer.tasks.context import JobContext, enter_job, leave_job
from pgdefer.tasks.need import Need
from pgdefer.tasks.steps import check_stored_name, checked_progress
from pgdefer.tasks.tries import Tries, called_within, called_within_async
from pgdefer.worker.ending import LOST, STOPPED, TIMED_OUT

__all__ = ["FakeJob", "fake_job"]

# A step's function with its arguments.
Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]

# Those of the database, and a worker's own.
_REASONS = ("cancelled", "moved", "failed", "done", "deleted", "retried", TIMED_OUT, STOPPED, LOST)


class _NoClient:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError("a fake job has no database: defer the job in a TestQueue, and run it")


class FakeJob(JobContext):
    """A JobContext without a database: `needs` and the like return values that the test sets.

    A step calls its function and returns the value. What needs a database raises RuntimeError.
    """

    __slots__ = ("_max_attempts", "_needs", "emitted", "leases", "progresses")

    def __init__(
        self,
        row: Sequence[Any],
        args: Mapping[str, Any],
        needs: Sequence[Need],
        max_attempts: int | None,
    ) -> None:
        super().__init__(cast("Client", _NoClient()), row)
        self._args = dict(args)
        self._max_attempts = max_attempts
        self._needs = list(needs)
        #: The leases that the handler has requested.
        self.leases: list[dt.timedelta] = []
        #: The streams and values that the handler has emitted.
        self.emitted: list[tuple[str, Any]] = []
        #: The progress that it has reported: each percentage with its message.
        self.progresses: list[tuple[float | None, str | None]] = []

    def abort(self, reason: str = "cancelled") -> None:
        """Make `should_abort` true."""
        _check_reason(reason)
        self._abort_reason = reason

    def needs(self) -> list[Need]:
        """Return the needs that the test passed."""
        return list(self._needs)

    async def needs_async(self) -> list[Need]:
        """Return the needs that the test passed."""
        return list(self._needs)

    def max_attempts(self) -> int | None:
        """Return the number that the test passed."""
        return self._max_attempts

    async def max_attempts_async(self) -> int | None:
        """Return the number that the test passed."""
        return self._max_attempts

    def is_last_attempt(self) -> bool:
        """Whether its attempt is the last one of that number."""
        return self._max_attempts is not None and self.attempt >= self._max_attempts

    async def is_last_attempt_async(self) -> bool:
        """Whether its attempt is the last one of that number."""
        return self.is_last_attempt()

    def extend(self, lease: dt.timedelta) -> dt.datetime:
        """Record a lease; return its end by this process's clock."""
        checked_interval("lease", lease)
        self.leases.append(lease)
        return dt.datetime.now(dt.UTC) + lease

    async def extend_async(self, lease: dt.timedelta) -> dt.datetime:
        """Record a lease; return its end by this process's clock."""
        return self.extend(lease)

    def emit(self, stream: str, value: Any) -> int:
        """Record a value; return its number in the stream."""
        check_stored_name("stream", stream)
        self.emitted.append((stream, value))
        return sum(name == stream for name, _ in self.emitted)

    async def emit_async(self, stream: str, value: Any) -> int:
        """Record a value; return its number in the stream."""
        return self.emit(stream, value)

    def progress(self, percent: float | None, message: str | None = None) -> None:
        """Record a progress."""
        checked_progress(percent, message)
        self.progresses.append((percent, message))

    async def progress_async(self, percent: float | None, message: str | None = None) -> None:
        """Record a progress."""
        self.progress(percent, message)

    def _try_step(self, _key: str, call: Call, tries: Tries, _is_lazy: bool) -> Any:
        return called_within(*call, tries.timeout)

    async def _try_step_async(self, _key: str, call: Call, tries: Tries, _is_lazy: bool) -> Any:
        return await called_within_async(*call, tries.timeout)


def _check_reason(reason: str) -> None:
    if reason not in _REASONS:
        shown = ", ".join(map(repr, _REASONS))
        raise ValueError(f"the reason to abort must be one of {shown}, not {reason!r}")


@contextlib.contextmanager
def fake_job(
    *,
    id: int = 1,
    task: str = "task",
    args: Mapping[str, Any] | None = None,
    queue: str = "default",
    priority: int = 0,
    lock: str | None = None,
    attempt: int = 1,
    max_attempts: int | None = 1,
    scheduled_at: dt.datetime | None = None,
    scheduled_for: dt.datetime | None = None,
    deadline: dt.datetime | None = None,
    timeout: dt.timedelta | None = None,
    headers: Mapping[str, Any] | None = None,
    parent: int | None = None,
    needs: Sequence[Need] = (),
    abort: str | None = None,
) -> Iterator[FakeJob]:
    """Make `current_job()` return this job in the block, so that a handler can be called.

    With `abort`, a reason, `should_abort` is true from the start.
    """
    for name, number in (("attempt", attempt), ("max_attempts", max_attempts)):
        if name == "attempt" or number is not None:
            check_number(name, number, int, at_least=1)
    for name, time in (
        ("scheduled_at", scheduled_at),
        ("scheduled_for", scheduled_for),
        ("deadline", deadline),
    ):
        checked_time(name, time)
    checked_interval("timeout", timeout)
    given = checked_mapping("args", {} if args is None else args)
    given_headers = None if headers is None else checked_mapping("headers", headers)
    stored = {} if scheduled_for is None else {"scheduled_for": scheduled_for.isoformat()}
    row = (
        id,
        1,
        task,
        f" {json.dumps(stored)}",
        queue,
        priority,
        lock,
        attempt,
        scheduled_at,
        deadline,
        timeout,
        None if headers is None else f" {json.dumps(given_headers)}",
        parent,
        None,
    )
    job = FakeJob(row, {**given, **stored}, needs, max_attempts)
    if abort is not None:
        job.abort(abort)
    token = enter_job(job)
    try:
        yield job
    finally:
        leave_job(token)

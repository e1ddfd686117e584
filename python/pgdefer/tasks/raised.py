"""What ends a handler's run, besides its errors.

Tests: integration/test_failures.py, integration/test_worker_timeouts.py.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

from pgdefer.errors import PgDeferError
from pgdefer.options import HasId, as_list

__all__ = ["JobAborted", "JobSuspended", "JobTimeout", "RetryLater", "suspension"]


class JobSuspended(BaseException):
    """Raised by `sleep`, `wait_for`, `call` and `gather` to end the run: the job continues later.

    In a later run these methods return. It is not an Exception, so `except Exception` does not
    catch it; do not catch it either.
    """


def suspension(error: BaseException | None) -> JobSuspended | None:
    """Return the JobSuspended that an error is, or of which the group of a TaskGroup consists."""
    while isinstance(error, BaseExceptionGroup) and error.split(JobSuspended)[1] is None:
        error = error.exceptions[0]
    return error if isinstance(error, JobSuspended) else None


class JobTimeout(BaseException):
    """Raised in the thread of a handler that is not a coroutine when the job's timeout has passed.

    Like KeyboardInterrupt it is raised anywhere, but only once a call that runs no Python code has
    returned. The attempt is then `timed_out`, however it ends.
    """


class JobAborted(PgDeferError):  # noqa: N818
    """Raised by a handler to end an aborted job: it becomes cancelled, and is not retried."""


class RetryLater(PgDeferError):  # noqa: N818
    """Raised or returned by a handler: the job is to be called again; this is not a failure.

    The next call comes after `at`, and after `needs`, which are added to the job's needs. With
    `needs=None` it comes as soon as `at` allows, whatever the states of its needs.
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
        self.needs = None if needs is None else tuple(as_list("needs", needs))

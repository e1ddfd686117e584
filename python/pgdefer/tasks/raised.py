"""What ends a handler's run, other than its own errors.

Tests: integration/test_failures.py, integration/test_worker_timeouts.py.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pgdefer.errors import ClaimLost, PgDeferError
from pgdefer.options import HasId, as_list, checked_time

if TYPE_CHECKING:
    from pgdefer.tasks.steps import Steps

__all__ = ["JobAborted", "JobSuspended", "JobTimeout", "RetryLater", "members", "suspension"]


class JobSuspended(BaseException):
    """Raised by `sleep`, `wait_for`, `call` and `gather` to end the run: the job continues later.

    In a later run these methods return. It is not an Exception, so `except Exception` does not
    catch it; do not catch it either.
    """


def suspension(error: BaseException | None, steps: Steps) -> JobSuspended | None:
    """Return the JobSuspended that an error is, or that a TaskGroup's group contains; else None.

    It is None if the group contains other errors, too. ClaimLost does not count as one once a call
    has ended the claim: concurrent calls may then raise it. Of several JobSuspended, the one that a
    failed step has caused is returned.
    """
    if error is None:  # as in most calls
        return None
    found = list(members(error))
    suspended = [one for one in found if isinstance(one, JobSuspended)]
    others = [one for one in found if not isinstance(one, JobSuspended)]
    if steps.ended_as is not None:
        others = [one for one in others if not isinstance(one, ClaimLost)]
    suspended.sort(key=lambda one: one.__cause__ is None)
    return suspended[0] if suspended and not others else None


def members(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that a group contains, also within other groups; else the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from members(one)
    else:
        yield error


class JobTimeout(BaseException):
    """Raised in the thread of a handler that is not a coroutine when the job's timeout has passed.

    Like KeyboardInterrupt, it may be raised anywhere in Python code; it waits for a call of other
    code, such as C, to return. The attempt is then `timed_out`, however the handler ends.
    """


class JobAborted(PgDeferError):  # noqa: N818
    """Raised by a handler to end an aborted job: it becomes cancelled, and is not retried."""


class RetryLater(PgDeferError):  # noqa: N818
    """Raised or returned by a handler to have the job run again later. This is not a failure.

    The next run comes after `at`, and once `needs`, which are added to the job's needs, allow it.
    With `needs=None` it comes as soon as `at` allows, whatever the states of its needs.
    """

    def __init__(
        self,
        message: object = "",
        *,
        at: dt.datetime | None = None,
        needs: Iterable[int | HasId] | None = (),
    ) -> None:
        super().__init__("" if message is None else str(message))
        checked_time("at", at)
        self.at = at
        self.needs = None if needs is None else tuple(as_list("needs", needs))

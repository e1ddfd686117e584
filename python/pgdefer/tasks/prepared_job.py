"""A job that is not deferred yet.

Tests: integration/test_defer.py, unit/test_misuse.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from pgdefer.options import JobOptions, as_list, defer_object

__all__ = ["PreparedJob", "check_prepared", "jobs_json"]

R_co = TypeVar("R_co", covariant=True)


@dataclasses.dataclass(frozen=True)
class PreparedJob(Generic[R_co]):
    """A call of a task, for `defer_many` to defer with others."""

    task: str
    args: str = dataclasses.field(repr=False)
    given: JobOptions
    add_headers: Callable[[JobOptions], JobOptions] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @property
    def options(self) -> JobOptions:
        """The options with the App's headers, which are made for each job that is deferred.

        A later run of a durable job prepares its children again, and does not defer them.
        """
        return self.given if self.add_headers is None else self._with_headers

    @functools.cached_property
    def _with_headers(self) -> JobOptions:
        return self.given if self.add_headers is None else self.add_headers(self.given)

    def to_json(self) -> str:
        """Return the object that queue.defer_many takes."""
        return defer_object(self.task, self.args, self.options)


def check_prepared(calls: Iterable[PreparedJob[Any]]) -> list[PreparedJob[Any]]:
    """Return the calls as a list. Raises TypeError for anything else, such as deferred jobs."""
    found = as_list("calls", calls)
    for call in found:
        if not isinstance(call, PreparedJob):
            raise TypeError(f"a call must come from task.prepare(...), not {call!r}")
    return found


def jobs_json(calls: Iterable[PreparedJob[Any]]) -> str:
    """Return the array that queue.defer_many takes."""
    return f"[{','.join(call.to_json() for call in calls)}]"

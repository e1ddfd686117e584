"""The calls that a durable job's handler defers, and awaits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

__all__ = ["Prepared", "check_prepared", "prepared_list"]


@runtime_checkable
class Prepared(Protocol):
    """A call that `task.prepare` returned."""

    @property
    def task(self) -> str:
        """The task's name."""

    def to_json(self) -> str:
        """Return the object that queue.defer_many takes."""


def check_prepared(call: object) -> None:
    """Raise TypeError for what `task.prepare` has not returned."""
    if not isinstance(call, Prepared):
        raise TypeError(f"pass task.prepare(...), not {call!r}")


def prepared_list(calls: Any) -> list[Prepared]:
    """Return calls as a list. Raises TypeError if it is none, or of other things."""
    if not isinstance(calls, Iterable):
        raise TypeError(f"pass a list of prepared jobs, not {calls!r}")
    found = list(calls)
    for call in found:
        check_prepared(call)
    return found

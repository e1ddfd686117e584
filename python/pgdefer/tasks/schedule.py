"""Schedules that the code defines; the database decides when they run.

Tests: unit/test_recurring.py, integration/test_recurring.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pgdefer.errors import EncodeError

__all__ = ["Schedule", "removed_schedules", "schedules_json"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The arguments of queue.schedule; `args` is JSON text."""

    name: str
    cron: str
    timezone: str
    task: str
    args: str
    options: Mapping[str, Any]

    def to_json(self, source: str) -> str:
        """Return the object that sql.SCHEDULE takes."""
        rest = {
            "name": self.name,
            "cron": self.cron,
            "timezone": self.timezone,
            "task": self.task,
            "options": {**self.options, "source": source},
        }
        try:
            head = json.dumps(rest, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EncodeError(f"the options can't be stored: {error}") from error
        return f'{head[:-1]}, "args": {self.args}}}'


def schedules_json(schedules: Iterable[Schedule], source: str) -> str:
    """Return the JSON text of sql.SCHEDULE's parameter."""
    # Sorted, so that two processes that register the same schedules lock them in the same order.
    ordered = sorted(schedules, key=lambda schedule: schedule.name)
    return f"[{','.join(schedule.to_json(source) for schedule in ordered)}]"


def removed_schedules(found: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the names of the schedules that the database has but the code does not, sorted."""
    return sorted(set(found) - set(known))

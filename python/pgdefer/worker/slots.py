"""A worker's slots, each for one job at a time; some may be kept for urgent jobs."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pgdefer.options import interval_text
from pgdefer.worker.prefetch import Filling, Prefetch

__all__ = ["Slots", "parse_slots"]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclasses.dataclass(eq=False)
class Slots:
    """`size` slots; with a horizon, for jobs whose deadline is nearer than that.

    With `tasks`, only for jobs of these tasks. `is_listed`: queues go in the order of the list.

    `used` counts the jobs that run and those that are claimed, `running` only the former. The jobs
    of a batch count as one.
    `max_running` limits the jobs of a queue that the whole worker runs at once.
    """

    size: int
    horizon: dt.timedelta | None = None
    used: int = 0
    tasks: Sequence[str] | None = None
    is_listed: bool = False
    running: int = 0
    prefetch: Prefetch = dataclasses.field(default_factory=lambda: Prefetch(0, 0))
    filling: Filling = dataclasses.field(default_factory=Filling)
    max_running: Mapping[str, int] | None = None

    def __str__(self) -> str:
        return str(self.size) if self.horizon is None else f"{self.size}:{self.horizon}"

    @property
    def free(self) -> int:
        """The number of free slots."""
        return max(self.size - self.used, 0)

    @property
    def may_ask(self) -> bool:
        """Whether jobs may be asked for, now or later, without any of these ending before."""
        return self.free > 0

    @property
    def is_full(self) -> bool:
        """Whether a job runs in each."""
        return self.running >= self.size

    @property
    def wanted(self) -> int:
        """The number of jobs to ask for: those to start at once, and those to claim ahead."""
        ahead = max(self.size - self.used + self.prefetch.allowed, 0) - self.free
        return self.at_once + ahead

    @property
    def at_once(self) -> int:
        """The number of jobs that the free slots take: more than there are slots, in batches."""
        return self.filling.wanted(self.free)

    # What becomes of them

    def ask(self, jobs: int) -> None:
        """Take note that so many jobs are being asked for."""

    def answered(self, asked: int, came: int) -> None:
        """Take note of how many jobs have come; none where the call has failed."""
        self.prefetch.answered(asked, came)

    def claimed(self, jobs: int) -> None:
        """Take note that so many jobs are claimed."""
        self.used += jobs

    def started(self) -> None:
        """Take note that a claimed job has started."""
        self.running += 1

    def left(self, *, has_started: bool) -> None:
        """Take note that a claimed job has ended, or was given back."""
        self.used -= 1
        self.running -= has_started

    async def turn(self) -> None:
        """Wait for a moment, if jobs may be asked for then."""

    def note_waiting(self) -> None:
        """Take note that a claimed job waits for a slot."""

    def options(self, ahead: int = 0) -> str | None:
        """Return the options of queue.fetch."""
        options = self._filters()
        if self.is_listed:
            options["order"] = "listed"
        if ahead:
            options["ahead"] = ahead
        if self.max_running:
            options["max_running"] = dict(self.max_running)
        return json.dumps(options) if options else None

    def sleep_options(self, *, is_busy: bool) -> str:
        """Return the options of queue.before_sleep: those that say which jobs it fetches, and when.

        With `max_running` a worker may have to leave jobs to others, so it does not stand in line.
        """
        options = self._filters()
        if not self.max_running:
            options |= {"in_line": True, "busy": is_busy}
        return json.dumps(options)

    def _filters(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.horizon is not None:
            options["deadline_within"] = interval_text(self.horizon)
        if self.tasks is not None:
            options["tasks"] = list(self.tasks)
        return options

    @classmethod
    def parse(cls, text: int | str) -> Slots:
        """Read `N` or `N:HORIZON`, the horizon as 5s, 30m, 2h, 1d, 1w or none."""
        found = re.fullmatch(r"(\d+)(?::(?:(\d+)([smhdw])|none))?", str(text))
        if found is None or int(found[1]) < 1:
            raise ValueError(
                f"slots are N or N:HORIZON, such as 2:30m, with N at least 1, not {text!r}"
            )
        if found[2] is None:
            return cls(int(found[1]))
        try:
            horizon = dt.timedelta(**{_UNITS[found[3]]: int(found[2])})
        except OverflowError:
            raise ValueError(f"the horizon of {text!r} is too far") from None
        return cls(int(found[1]), horizon)


def parse_slots(
    texts: Iterable[int | str],
    tasks: Sequence[str] | None = None,
    *,
    is_listed: bool = False,
    prefetch: int = 0,
    max_running: Mapping[str, int] | None = None,
) -> list[Slots]:
    """Return the slots, those with the nearest horizon first.

    For those that take any job, up to `prefetch` jobs are claimed ahead.
    """
    slots = [Slots.parse(text) for text in texts]
    if not slots:
        raise ValueError("slots is empty")
    for each in slots:
        each.tasks, each.is_listed, each.max_running = tasks, is_listed, max_running
        each.prefetch = Prefetch(each.size, 0 if each.options() else prefetch)
    return sorted(slots, key=_nearness)


def _nearness(slots: Slots) -> float:
    return math.inf if slots.horizon is None else slots.horizon.total_seconds()

"""A worker's slots, each for one job at a time; some may be kept for urgent jobs."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import re
from collections.abc import Iterable

from ._options import interval_text

__all__ = ["Slots", "arrange"]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclasses.dataclass(eq=False)
class Slots:
    """`size` slots; with a horizon, for jobs whose deadline is nearer than that."""

    size: int
    horizon: dt.timedelta | None = None
    used: int = 0

    def __str__(self) -> str:
        return str(self.size) if self.horizon is None else f"{self.size}:{self.horizon}"

    @property
    def free(self) -> int:
        """How many are free."""
        return self.size - self.used

    def options(self, *, alone: bool = False) -> str | None:
        """Return the options of queue.fetch."""
        options: dict[str, object] = {}
        if alone:
            options["alone"] = "crashed"
        if self.horizon is not None:
            options["deadline_within"] = interval_text(self.horizon)
        return json.dumps(options) if options else None

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


def arrange(given: Iterable[int | str]) -> list[Slots]:
    """Return the slots, those with the nearest horizon first."""
    slots = [Slots.parse(text) for text in given]
    if not slots:
        raise ValueError("slots is empty")
    return sorted(slots, key=_nearness)


def _nearness(slots: Slots) -> float:
    return math.inf if slots.horizon is None else slots.horizon.total_seconds()

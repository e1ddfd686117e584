"""Plots of what happened in the last hours, as shapes that a template draws in SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Plot", "bars", "lasting", "lines"]

WIDTH, HEIGHT = 1000.0, 100.0

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plot:
    """Rectangles (x, y, width, height, name) or lines (points, name), and the value at the top."""

    top: float
    rectangles: list[tuple[float, float, float, float, str]]
    lines: list[tuple[str, str]]


def bars(rows: Sequence[Row], names: Sequence[str]) -> Plot:
    """Return stacked bars: for each row, its value of each name."""
    top = max((sum(row[name] for name in names) for row in rows), default=0)
    wide = WIDTH / max(len(rows), 1)
    found = []
    for place, row in enumerate(rows):
        below = HEIGHT
        for name in names:
            if row[name]:
                height = HEIGHT * row[name] / top
                below -= height
                x, width = round(place * wide, 2), round(wide * 0.85, 2)
                found.append((x, round(below, 2), width, round(height, 2), name))
    return Plot(top, found, [])


def lines(rows: Sequence[Row], names: Sequence[str]) -> Plot:
    """Return a line for each name, broken where a row has no value."""
    values = [row[name] for row in rows for name in names if row[name] is not None]
    top = max(values, default=0)
    found = [(" ".join(points), name) for name in names for points in _runs(rows, name, top or 1)]
    return Plot(top, [], found)


def _runs(rows: Sequence[Row], name: str, top: float) -> Iterator[list[str]]:
    wide = WIDTH / max(len(rows), 1)
    points: list[str] = []
    for place, row in enumerate(rows):
        if row[name] is None:
            if points:
                yield points
            points = []
            continue
        y = round(HEIGHT - HEIGHT * row[name] / top, 2)
        # a step as wide as the row, so that a value without neighbours is seen
        points += [f"{place * wide:.2f},{y}", f"{(place + 1) * wide:.2f},{y}"]
    if points:
        yield points


def lasting(seconds: float | None) -> str:
    """Return a time as the plots and tables show it, to two or three digits."""
    if seconds is None:
        return ""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds * 1_000)} ms"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"

"""Plots of what happened in the last hours, as shapes that a template draws in SVG.

Tests: unit/test_plots.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Plot", "bar_plot", "duration", "line_plot"]

WIDTH, HEIGHT = 1000.0, 100.0

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plot:
    """Rectangles (x, y, width, height, name) or lines (points, name), and the greatest value."""

    most: float
    rectangles: list[tuple[float, float, float, float, str]]
    lines: list[tuple[str, str]]


def bar_plot(rows: Sequence[Row], names: Sequence[str]) -> Plot:
    """Return stacked bars: for each row, its value of each name."""
    most = max((sum(row[name] for name in names) for row in rows), default=0)
    step = WIDTH / max(len(rows), 1)
    rectangles = []
    for number, row in enumerate(rows):
        y = HEIGHT
        for name in names:
            if row[name]:
                height = HEIGHT * row[name] / most
                y -= height
                x, width = round(number * step, 2), round(step * 0.85, 2)
                rectangles.append((x, round(y, 2), width, round(height, 2), name))
    return Plot(most, rectangles, [])


def line_plot(rows: Sequence[Row], names: Sequence[str]) -> Plot:
    """Return a line for each name, broken where a row has no value."""
    most = max((row[name] for row in rows for name in names if row[name] is not None), default=0)
    lines = [
        (" ".join(points), name) for name in names for points in _pieces(rows, name, most or 1)
    ]
    return Plot(most, [], lines)


def _pieces(rows: Sequence[Row], name: str, most: float) -> Iterator[list[str]]:
    """Yield the points of each piece of a line."""
    step = WIDTH / max(len(rows), 1)
    points: list[str] = []
    for number, row in enumerate(rows):
        if row[name] is None:
            if points:
                yield points
            points = []
            continue
        y = round(HEIGHT - HEIGHT * row[name] / most, 2)
        # as wide as the row, so that a value without neighbours is seen
        points += [f"{number * step:.2f},{y}", f"{(number + 1) * step:.2f},{y}"]
    if points:
        yield points


def duration(seconds: float | None) -> str:
    """Return a duration as the plots and tables show it, to two or three digits."""
    if seconds is None:
        return ""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds * 1_000)} ms"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"

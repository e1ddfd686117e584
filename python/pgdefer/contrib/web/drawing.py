"""The graph of a job's needs as boxes and lines, which a template draws in SVG.

Tests: contrib/test_web.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = ["Drawing", "draw"]

BOX_WIDTH, BOX_HEIGHT = 150, 34
COLUMN, ROW = 200, 44  # from one box to the next

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Box:
    """A job, and the corner at its upper left."""

    id: int
    task: str | None
    state: str | None
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Boxes in columns by depth, and lines (x1, y1, x2, y2) from needs to their dependents."""

    width: int
    height: int
    boxes: list[Box]
    lines: list[tuple[int, int, int, int]]


def draw(rows: Sequence[Row]) -> Drawing:
    """Return the drawing of the rows of `queue.graph`."""
    jobs = {row["job_id"]: row for row in rows}
    needs: dict[int, list[int]] = {id: [] for id in jobs}
    for row in rows:
        if row["need_id"] in jobs:
            needs[row["job_id"]].append(row["need_id"])
    places = _places(jobs, needs)
    boxes = [Box(id, jobs[id]["task"], jobs[id]["state"], *at) for id, at in places.items()]
    lines = [_line(places[need], at) for id, at in places.items() for need in needs[id]]
    width = max((box.x for box in boxes), default=0) + BOX_WIDTH
    height = max((box.y for box in boxes), default=0) + BOX_HEIGHT
    return Drawing(width, height, boxes, lines)


def _line(start: tuple[int, int], end: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the line from the right side of a box to the left side of another."""
    middle = BOX_HEIGHT // 2
    return (start[0] + BOX_WIDTH, start[1] + middle, end[0], end[1] + middle)


def _places(jobs: dict[int, Row], needs: dict[int, list[int]]) -> dict[int, tuple[int, int]]:
    """Place each job beside the middle of its needs, so that few lines cross."""
    columns: dict[int, list[int]] = {}
    for id, row in jobs.items():
        columns.setdefault(row["depth"], []).append(id)
    places: dict[int, tuple[int, int]] = {}
    for number, depth in enumerate(sorted(columns)):
        heights = {
            id: [places[need][1] for need in needs[id] if need in places] for id in columns[depth]
        }
        ordered = sorted(columns[depth], key=lambda id: (_middle(heights[id]), id))
        for line, id in enumerate(ordered):
            places[id] = (number * COLUMN, line * ROW)
    return places


def _middle(heights: Sequence[int]) -> float:
    return sum(heights) / len(heights) if heights else 0.0

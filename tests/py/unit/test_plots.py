"""The shapes of the page's plots."""

from __future__ import annotations

import pytest

from pgdefer.contrib.web.plots import bar_plot, duration, line_plot


def test_bars_are_stacked() -> None:
    plot = bar_plot([{"a": 1, "b": 3}, {"a": 0, "b": 0}, {"a": 2, "b": 0}], ["a", "b"])
    assert plot.most == 4
    assert [(name, y, height) for _, y, _, height, name in plot.rectangles] == [
        ("a", 75.0, 25.0),
        ("b", 0.0, 75.0),
        ("a", 50.0, 50.0),
    ]
    assert all(x >= 0 and x + width <= 1000 for x, _, width, _, _ in plot.rectangles)
    assert bar_plot([], ["a"]).rectangles == bar_plot([{"a": 0}], ["a"]).rectangles == []


def test_lines_are_broken_where_nothing_is_known() -> None:
    plot = line_plot([{"a": 2.0}, {"a": None}, {"a": 1.0}, {"a": 0.0}], ["a"])
    assert plot.most == 2
    assert plot.lines == [
        ("0.00,0.0 250.00,0.0", "a"),
        ("500.00,50.0 750.00,50.0 750.00,100.0 1000.00,100.0", "a"),
    ]
    assert line_plot([{"a": None}], ["a"]).lines == []
    assert line_plot([{"a": 0.0}], ["a"]).lines == [("0.00,100.0 1000.00,100.0", "a")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.0011, "1.1 ms"),
        (0.25, "250 ms"),
        (2.51, "2.5 s"),
        (59.0, "59 s"),
        (90.0, "1.5 min"),
        (7200.0, "2.0 h"),
        (1e6, "12 d"),
    ],
)
def test_how_long_times_are_told(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text

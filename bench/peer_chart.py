"""The plot of bench_peers.py, and its tables between the marks of a page."""

from __future__ import annotations

import html
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import percentile, short
from peer_runs import Found

BEGIN = "<!-- bench_peers.py writes from here -->"
END = "<!-- to here -->"
ROW, LABEL, WIDTH, BAR = 18, 130, 420, 220
STYLE = """
  text { font: 12px sans-serif; fill: #24292f; }
  .title { font-weight: bold; }
  rect { fill: #8c959f; }
  .ours { fill: #0969da; }
  .page { fill: #ffffff; }
"""


def halves(page: Path) -> tuple[str, str]:
    """Return what stands before and after the marks of a page."""
    text = page.read_text("utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{page} lacks the marks {BEGIN} and {END}")
    return before, after


def write(page: Path, lines: Sequence[str], plot: Path | None) -> None:
    """Put lines between the marks of a page, and the plot above them; make the page if there is none."""
    before, after = halves(page)
    picture = []
    if plot:
        relative = os.path.relpath(plot, page.parent)
        picture = [f"![Each system's jobs a second, and how long jobs wait]({relative})", ""]
    text = "\n".join([before + BEGIN, "", *picture, *lines, "", END + after])
    page.write_text(text, "utf-8")


def draw(
    path: Path, found: Mapping[str, Mapping[str, Sequence[Found]]], names: Sequence[str]
) -> None:
    """Draw a chart of bars for each scenario, two in a row."""
    charts = []
    for scenario, systems in found.items():
        values = {name: figure(systems[name]) for name in names if systems.get(name)}
        waits = max(len(runs[0].waits) for runs in systems.values()) if systems else 0
        unit = ("jobs a second", "ms; less is better")[waits > 0]
        charts.append((scenario, unit.replace("ms", "p99 in ms") if waits > 1 else unit, values))
    height = ROW * (len(names) + 3)
    total = (2 * WIDTH, height * ((len(charts) + 1) // 2))
    size = f'width="{total[0]}" height="{total[1]}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {total[0]} {total[1]}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" {size}/>',
    ]
    for number, chart in enumerate(charts):
        left, top = WIDTH * (number % 2), height * (number // 2) + ROW
        lines += [f'<g transform="translate({left} {top})">', *bars(*chart, names), "</g>"]
    path.write_text("\n".join([*lines, "</svg>", ""]), "utf-8")


def bars(title: str, unit: str, values: Mapping[str, float], names: Sequence[str]) -> list[str]:
    """Return one chart."""
    lines = [f'<text class="title" x="8" y="0">{html.escape(f"{title} ({unit})")}</text>']
    most = max(values.values(), default=1)
    for number, name in enumerate(names, start=1):
        y = number * ROW + 2
        lines.append(f'<text x="8" y="{y}">{html.escape(name)}</text>')
        value = values.get(name)
        if value is None:
            lines.append(f'<text x="{LABEL}" y="{y}">-</text>')
            continue
        width = max(1, round(BAR * value / most))
        ours = ' class="ours"' if name.startswith("pgdefer") else ""
        lines.append(f'<rect{ours} x="{LABEL}" y="{y - 11}" width="{width}" height="{ROW - 5}"/>')
        lines.append(f'<text x="{LABEL + width + 5}" y="{y}">{short(value)}</text>')
    return lines


def figure(runs: Sequence[Found]) -> float:
    """Return the figure of some runs: a rate, or a p99 in ms."""
    if waits := [1000 * wait for run in runs for wait in run.waits]:
        return percentile(waits, 0.99) if len(runs[0].waits) > 1 else statistics.median(waits)
    return statistics.median(run.rate for run in runs)

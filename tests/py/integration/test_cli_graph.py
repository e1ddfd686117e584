"""Graphs of jobs, drawn in the terminal and written for Mermaid and Graphviz."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from pgdefer.cli import Exit, _graph
from pgdefer.cli._base import cli, out
from pgdefer.database.source import PsycopgConnection

pytestmark = pytest.mark.client

ODD = '"quoted" \\n <b>{x} --> y; #1 `t`\n日本 ]'
Edges = set[tuple[int, int]]


@pytest.fixture
def invoke(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PGDEFER_DSN", dsn)
    return lambda *words: CliRunner().invoke(cli, ["graph", *map(str, words)])


def defer(conn: PsycopgConnection, needs: list[list[int]], task: str = "t") -> None:
    """Defer jobs 1, 2, ... that need these."""
    for each in needs:
        conn.execute("select queue.defer(%s, needs => %s)", [task, each or None])


def random_needs(count: int, seed: int) -> list[list[int]]:
    """Return the needs of each job: one connected graph."""
    dice = random.Random(seed)
    found: list[list[int]] = [[]]
    for id in range(2, count + 1):
        nearby = range(max(1, id - 12), id)
        found.append(sorted(dice.sample(nearby, min(len(nearby), dice.randint(1, 3)))))
    return found


def edges_of(needs: list[list[int]]) -> Edges:
    return {(need, id) for id, each in enumerate(needs, 1) for need in each}


def rows_of(needs: list[list[int]]) -> Iterator[dict[str, Any]]:
    """The rows of queue.graph."""
    for id, each in enumerate(needs, 1):
        for need in each or [None]:  # type: ignore[list-item]
            yield {"job_id": id, "need_id": need, "depth": 1 - id, "task": "t", "state": "ready"}


def traced(lines: list[str]) -> Edges:
    """Follow the rails of a drawing from every job down to those that they reach."""
    marks = {}  # (line, column) -> id
    for at, line in enumerate(lines):
        if found := re.match(r"([│ ]*)[●○]([│ ]*)(\d+) ", line):
            marks[at, len(found[1])] = int(found[3])
    width = max(map(len, lines))
    grid = [line.ljust(width) for line in [*lines, ""]]
    with_a_job = {at for at, _ in marks}
    edges: Edges = set()
    for (at, column), id in marks.items():
        if at + 1 not in with_a_job:
            starts = [(at + 2, end) for end in ends_of(grid[at + 1], column)]
        else:
            starts = [(at + 1, column)] if grid[at + 1][column] in "│●○" else []
        edges |= {(id, marks[followed(grid, marks, *start)]) for start in starts}
    return edges


def ends_of(row: str, column: int) -> list[int]:
    """Return where a line that comes from a job above goes down."""
    found = [column] if row[column] in "│├┤┼" else []
    for step, leaves, stops in ((1, "├┼┬╰┴", "┤╮"), (-1, "┤┼┬╯┴", "├╭")):
        beside = column
        while row[beside] in (leaves if beside == column else "─│┼┬"):
            beside += step
            found += [beside] if row[beside] in "┼┬" + stops else []
    return found


def followed(grid: list[str], marks: dict[tuple[int, int], int], at: int, column: int) -> Any:
    """Return where a rail ends that goes down."""
    while (at, column) not in marks:
        assert grid[at][column] in "│├┤┼", f"a rail ends in line {at}"
        at += 1
    return at, column


def drawn(needs: list[list[int]]) -> list[str]:
    return [line.plain for line in _graph.drawing(_graph.graph_of(list(rows_of(needs))))]


def test_a_drawing() -> None:
    assert drawn([[], [1], [1], [2, 3], [4]]) == [
        "●  1 t ready  ◀",
        "├──╮",
        "●  │  2 t ready",
        "│  ●  3 t ready",
        "├──╯",
        "●  4 t ready",
        "●  5 t ready",
    ]


@pytest.mark.parametrize("seed", range(60))
def test_rails_lead_where_they_should(seed: int) -> None:
    needs = random_needs(random.Random(seed).randint(1, 30), seed)
    lines = drawn(needs)
    jobs = [line for line in lines if "ready" in line]
    assert len(jobs) == len(needs), "each once"
    assert traced(lines) == edges_of(needs), "\n".join(lines)


@pytest.mark.parametrize("count", [1, 10, 200])
def test_graphs(invoke: Any, conn: PsycopgConnection, count: int) -> None:
    needs = random_needs(count, seed=count)
    defer(conn, needs, task=ODD)
    id = count  # all are before the last, or beside those
    shown = {row[0] for row in conn.execute("select job_id from queue.graph(%s)", [id]).fetchall()}
    edges = {edge for edge in edges_of(needs) if {*edge} <= shown}

    rows = json.loads(invoke(id, "--json").stdout)
    assert {(row["need_id"], row["job_id"]) for row in rows if row["need_id"]} == edges

    mermaid = invoke(id, "--as", "mermaid").stdout.splitlines()
    assert mermaid[0] == "flowchart TD"
    nodes, arrows, others = set(), set(), []
    for line in mermaid[1:]:
        if found := re.fullmatch(r'  j(\d+)\["([\w .,:/_#;-]*)<br/>(\w+)"\]:::(\w+)', line):
            nodes.add(int(found[1]))
            label = re.sub(r"#(\d+);", lambda code: chr(int(code[1])), found[2])
            assert label == f"{found[1]} " + ODD.replace("\n", "\\n")
        elif found := re.fullmatch(r"  j(\d+) --> j(\d+)", line):
            arrows.add((int(found[1]), int(found[2])))
        else:
            others.append(line.split()[0])
    assert (nodes, arrows) == (shown, edges)
    assert set(others) == {"classDef", "style"}

    text = invoke(id).stdout
    assert text.count("◀") == 1
    if text.startswith("step 1:"):
        found_edges = {
            (int(need), int(found[1]))
            for found in re.finditer(r"^  (\d+) .*  after ([\d, ]+)$", text, re.MULTILINE)
            for need in found[2].split(", ")
        }
        assert found_edges == edges
    else:
        assert traced(text.splitlines()) == edges

    dot = invoke(id, "--as", "dot").stdout
    assert len(re.findall(r"^  j\d+ \[", dot, re.MULTILINE)) == len(shown)
    if program := shutil.which("dot"):
        plain = subprocess.run(
            [program, "-Tplain"], input=dot, capture_output=True, text=True, check=True
        ).stdout
        words = [line.split() for line in plain.splitlines()]
        assert {int(word[1][1:]) for word in words if word[0] == "node"} == shown
        found_edges = {(int(w[1][1:]), int(w[2][1:])) for w in words if w[0] == "edge"}
        assert found_edges == edges
        picture = subprocess.run(
            [program, "-Tsvg"], input=dot, capture_output=True, text=True, check=True
        ).stdout
        assert "&quot;quoted&quot; \\n &lt;b&gt;{x}" in picture


def test_a_wide_graph_is_listed(invoke: Any, conn: PsycopgConnection, monkeypatch: Any) -> None:
    monkeypatch.setattr(out, "_width", 80)
    defer(conn, [[], *([1] for _ in range(40)), list(range(2, 42))])
    lines = invoke(42).stdout.splitlines()
    assert lines[:3] == ["step 1: 1 job", "  1 t ready", "step 2: 40 jobs"]
    assert lines[3] == "  2 t waiting  after 1"
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1].endswith("…"), "the last need does not fit"


def test_what_is_gone_and_what_is_not_there(invoke: Any, conn: PsycopgConnection) -> None:
    defer(conn, [[], [1], [2]])
    conn.execute("select queue.delete('{1}', true)")
    assert invoke(2).stdout.splitlines() == [
        "●  1 ? deleted",
        "●  2 t upstream_failed  ◀",
        "●  3 t upstream_failed",
    ]
    assert invoke(99).exit_code == Exit.NOT_FOUND


def test_a_terminal_is_not_controlled_by_a_name(conn: PsycopgConnection, invoke: Any) -> None:
    conn.execute("select queue.defer(E'\\x1b[31mred')")
    for form in ("text", "mermaid", "dot"):
        assert "\x1b" not in invoke(1, "--as", form).stdout

"""`pgdefer graph`: draws the jobs that a job needs and those that need it.

Tests: integration/test_cli_graph.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.text import Text

from pgdefer.database import sql

from . import _show
from ._base import DSN, AsJson, out, session

# The directions (up, down, left, right) to which a character of a drawing leads.
LINES = {
    "ud": "│",
    "lr": "─",
    "dr": "╭",
    "dl": "╮",
    "ur": "╰",
    "ul": "╯",
    "udr": "├",
    "udl": "┤",
    "dlr": "┬",
    "ulr": "┴",
    "udlr": "┼",
    "u": "╵",
    "d": "╷",
    "": " ",
}
COLOURS = {
    "succeeded": "#b7e4c7",
    "failed": "#f8a5a5",
    "upstream_failed": "#f8a5a5",
    "cancelled": "#e0b3f0",
    "deleted": "#d0d0d0",
    "running": "#a9cdf5",
    "ready": "#b5ecf2",
    "held": "#f7e3a1",
}
OTHERS = "#ffffff"


class Form(enum.StrEnum):
    """The values of `graph --as`."""

    text = "text"
    mermaid = "mermaid"
    dot = "dot"


@dataclasses.dataclass
class Node:
    """A job of the graph."""

    id: int
    task: str
    state: str
    is_asked: bool
    needs: list[int]
    dependents: list[int]


Graph = Mapping[int, Node]


def graph(
    id: Annotated[int, typer.Argument(metavar="ID", help="The job's id.", show_default=False)],
    form: Annotated[Form, typer.Option("--as", help="The format.")] = (Form.text),
    dsn: DSN = None,
    as_json: AsJson = False,
) -> None:
    """Draw the jobs that a job needs and those that need it, first to last."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.GRAPH, {"id": id})
    if rows.texts is not None:
        _show.print_json(rows.texts)
        return
    found = graph_of(rows.values)
    match form:
        case Form.mermaid:
            _show.write(mermaid(found))
        case Form.dot:
            _show.write(dot(found))
        case Form.text:
            lines = drawing(found)
            if max(map(_rails_width, lines)) > max(20, out.width // 2):
                lines = listing(found)
            for line in lines:
                out.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def graph_of(rows: Sequence[Mapping[str, Any]]) -> Graph:
    """Return the jobs of queue.graph's rows, each with its neighbours."""
    found: dict[int, Node] = {}
    for row in rows:
        task = _show.escaped(row["task"] or "?")
        new = Node(row["job_id"], task, row["state"], row["depth"] == 0, [], [])
        node = found.setdefault(new.id, new)
        if row["need_id"] is not None:
            node.needs.append(row["need_id"])
    for node in found.values():
        for need in node.needs:
            found[need].dependents.append(node.id)
    return found


def order_of(found: Graph) -> list[Node]:
    """Return the jobs, each after its needs; jobs that follow from one job are together."""
    missing = {id: len(node.needs) for id, node in found.items()}
    stack = [id for id, count in sorted(missing.items(), reverse=True) if not count]
    order = []
    while stack:
        order.append(found[stack.pop()])
        for id in sorted(order[-1].dependents, reverse=True):
            missing[id] -= 1
            if not missing[id]:
                stack.append(id)
    return order


def drawing(found: Graph) -> list[Text]:
    """Return the graph as lines, like `git log --graph`: one per job, with rails at its left.

    A rail leads from a job to the next that needs it, or that a job above needs as well.
    """
    rails: list[int | None] = []  # the job to which each leads
    lines = []
    for node in order_of(found):
        at = rails.index(node.id) if node.id in rails else _free(rails)
        before = [target is not None for target in rails]
        mark = "●" if node.dependents or node.needs else "○"
        marks = ["│" if target is not None else " " for target in rails]
        marks[at] = mark
        lines.append(Text("  ".join(marks).rstrip() + "  ").append_text(_label(node)))
        before[at] = bool(node.dependents)
        rails[at] = None
        ends = []
        for id in node.dependents:
            if id not in rails:
                # the first goes straight down
                rails[at if rails[at] is None else _free(rails)] = id
            ends.append(rails.index(id))
        link = _link(before, [target is not None for target in rails], at, ends)
        if link:
            lines.append(link)
        while rails and rails[-1] is None:
            rails.pop()
    return lines


def _free(rails: list[int | None]) -> int:
    """Return the first free rail, or a new one."""
    if None not in rails:
        rails.append(None)
    return rails.index(None)


def _link(before: list[bool], after: list[bool], at: int, ends: Sequence[int]) -> Text | None:
    """Return the line that joins a job's rail to those of its dependents, if it needs one."""
    if not ends or set(ends) == {at}:
        return None
    left, right = min(at, *ends), max(at, *ends)
    cells = []
    for column, goes_on in enumerate(after):
        up, down = column < len(before) and before[column], goes_on
        is_met = column == at or column in ends
        toward = ("l" if left < column else "") + ("r" if column < right else "")
        if not left <= column <= right or (not is_met and up and down):
            toward = ""  # a rail that only crosses
        cells.append(LINES.get(("u" if up else "") + ("d" if down else "") + toward, "─"))
    text = ""
    for column, cell in enumerate(cells):
        text += cell + ("──" if left <= column < right else "  ")
    return Text(text.rstrip())


def _label(node: Node) -> Text:
    label = Text(f"{node.id} {_show.short(node.task, 60)} ", style="bold" if node.is_asked else "")
    label.append(node.state, _show.STYLES.get(node.state, ""))
    return label.append("  ◀" if node.is_asked else "")


def _rails_width(line: Text) -> int:
    text = line.plain
    return cell_len(text) - cell_len(text.lstrip("│─╭╮╰╯├┤┬┴┼╵╷●○ "))


def listing(found: Graph) -> list[Text]:
    """Return the graph as a list of jobs with their needs, if it is too wide to draw."""
    steps: dict[int, int] = {}
    order = order_of(found)
    for node in order:
        steps[node.id] = 1 + max((steps[need] for need in node.needs), default=0)
    lines = []
    for step in range(1, max(steps.values()) + 1):
        there = [node for node in order if steps[node.id] == step]
        lines.append(Text(f"step {step}: {_show.count_of(len(there), 'job')}", style="bold"))
        for node in sorted(there, key=lambda node: node.id):
            line = Text("  ").append_text(_label(node))
            if node.needs:
                line.append(f"  after {', '.join(map(str, node.needs))}", "dim")
            lines.append(line)
    return lines


def mermaid(found: Graph) -> str:
    """Return the graph as a Mermaid flowchart."""
    lines = ["flowchart TD"]
    for node in order_of(found):
        label = f"{node.id} {_show.short(node.task, 60)}"
        # entities, because quotes and tags would end or change the label
        label = "".join(
            letter if letter.isalnum() or letter in " .,:/_-" else f"#{ord(letter)};"
            for letter in label
        )
        lines.append(f'  j{node.id}["{label}<br/>{node.state}"]:::{node.state}')
    lines += [f"  j{need} --> j{node.id}" for node in order_of(found) for need in node.needs]
    for state in sorted({node.state for node in found.values()}):
        fill = COLOURS.get(state, OTHERS)
        lines.append(f"  classDef {state} fill:{fill},stroke:#555,color:#000")
    lines += [f"  style j{node.id} stroke-width:3px" for node in found.values() if node.is_asked]
    return "\n".join(lines)


def dot(found: Graph) -> str:
    """Return the graph in Graphviz's language."""
    lines = ["digraph jobs {", '  node [shape=box, style="rounded,filled"]']
    for node in order_of(found):
        label = f"{node.id} {_show.short(node.task, 60)}".replace("\\", "\\\\").replace('"', '\\"')
        width = ", penwidth=3" if node.is_asked else ""
        fill = COLOURS.get(node.state, OTHERS)
        lines.append(f'  j{node.id} [label="{label}\\n{node.state}", fillcolor="{fill}"{width}]')
    lines += [f"  j{need} -> j{node.id}" for node in order_of(found) for need in node.needs]
    return "\n".join([*lines, "}"])

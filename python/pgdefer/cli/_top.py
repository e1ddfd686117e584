"""`pgdefer top`: queues, workers and rates, live.

Tests: integration/test_cli_screens.py, integration/test_cli_database.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from pgdefer.database import sql

from . import _show
from ._base import DSN, LONGEST, AsJson, Exit, Rows, fail, is_asked, no_nan, out
from ._many import DSNS, PATIENCE, Databases, databases, named

QUEUES = {
    "database": "database",
    "queue": "queue",
    "paused": "",
    "ready": "ready",
    "running": "running",
    "blocked": "blocked",
    "scheduled": "sched.",
    "waiting": "waiting",
    "upstream_failed": "need failed",
    "held": "held",
    "failed": "failed",
    "oldest": "oldest ready",
    "per_second": "done/s",
    "failed_5m": "failed in 5 min",
    "workers": "workers",
}
WORKERS = {
    "database": "database",
    "id": "worker",
    "name": "name",
    "is_dead": "",
    "running": "running",
    "memory": "memory",
    "silent_for": "last seen",
    "up_for": "up for",
    "queues": "queues",
}
# The columns that a narrow terminal leaves out.
LEAST = ("failed_5m", "waiting", "held", "scheduled", "upstream_failed", "blocked", "failed")
HEADING = 2
# The wait is this many times as long as a query takes, so that `top` is not itself the load.
TIMES = 4


def top(
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=LONGEST, callback=no_nan, help="The seconds between queries."),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    dsn: DSN = None,
    dsns: DSNS = None,
    as_json: AsJson = False,
) -> None:
    """Show queues, workers and rates, live. q quits, any other key refreshes.

    The busiest queues come first; rates are those of the last 5 minutes. With --dsns,
    databases that can't be asked are left out, and named at the end; the exit code is then 13.
    """
    if as_json and not once:
        fail(Exit.USAGE, "--json needs --once")
    if not once and not (out.is_terminal and is_asked()):
        fail(Exit.USAGE, "this is not a terminal: pass --once")
    with (
        contextlib.suppress(KeyboardInterrupt),
        databases(dsn, dsns, as_json=as_json, patience=PATIENCE) as on,
    ):
        if once:
            _print_once(on)
        else:
            _show_until_quit(on, interval)


def _show_until_quit(on: Databases, interval: float) -> None:
    """Query and draw again and again, until a key quits."""
    key: str | None = ""
    with _keys(), Live(console=out, screen=True, auto_refresh=False) as live:
        while key not in ("q", "Q", "\x04"):
            begun = time.monotonic()
            queues, workers = _ask(on)
            took = time.monotonic() - begun
            until = time.monotonic() + max(interval, TIMES * took)
            key = None
            while key is None:  # at first, and when the terminal's size has changed
                size = out.size
                picture = _picture(queues, workers, missing=on.missing, height=size.height)
                live.update(picture, refresh=True)
                key = _wait(until, size)


def _ask(on: Databases) -> tuple[Rows, Rows]:
    """Return the queues, the busiest first, and the workers."""
    found = on.ask(lambda each: (each.call(sql.TOP_QUEUES), each.call(sql.WORKERS)))
    queues = named({name: rows for name, (rows, _) in found.items()})
    work = [row["running"] + row["ready"] for row in queues.values]
    busiest = sorted(range(len(work)), key=lambda at: -work[at])
    return queues.pick(busiest), named({name: rows for name, (_, rows) in found.items()})


def _print_once(on: Databases) -> None:
    queues, workers = _ask(on)
    if queues.texts is not None and workers.texts is not None:
        parts = (", ".join(each.texts or []) for each in (queues, workers))
        _show.write('{{"queues": [{}], "workers": [{}]}}'.format(*parts))
    else:
        out.print(_picture(queues, workers, missing=on.missing))


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Receive keys one by one, without echo."""
    try:
        import termios  # noqa: PLC0415 (not on every system)
        import tty  # noqa: PLC0415
    except ImportError:
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait(until: float, size: tuple[int, int]) -> str | None:
    """Wait for a key, and return it; "" when the time is over, None when the size has changed."""
    while (rest := until - time.monotonic()) > 0:
        if out.size != size:
            return None
        if select.select([sys.stdin], [], [], min(rest, 0.2))[0]:
            return os.read(sys.stdin.fileno(), 1).decode("latin-1") or "q"
    return ""


def _picture(queues: Rows, workers: Rows, *, missing: int, height: int | None = None) -> Group:
    alive = sum(row["is_alive"] for row in workers.values)
    ready, running = (sum(row[key] for row in queues.values) for key in ("ready", "running"))
    rate = float(sum(row["per_second"] for row in queues.values))
    head = f"{ready} ready, {running} running, {rate:.3g} done/s, workers: {alive}"
    if missing:
        head += f", {_show.count_of(missing, 'database')} missing"
    # zeros are blank, and a column of zeros is left out
    busy = [
        row | {key: row[key] or None for key in ("per_second", *LEAST)} for row in queues.values
    ]
    there = [
        row
        | {
            "is_dead": None if row["is_alive"] else "dead",
            "memory": _show.size(row["memory"]),
        }
        for row in workers.values
        if row["is_alive"] or row["running"]
    ]
    room = max(2, (height or 10**9) - 1 - 2 * (1 + HEADING) - 1)
    for_workers = min(len(there), max(room // 3, room - len(queues.values)))
    parts: list[RenderableType] = [
        Text(f"pgdefer  {time.strftime('%H:%M:%S')}  {head}", "bold", no_wrap=True)
    ]
    for rows, columns, count in (
        (busy, QUEUES, room - for_workers),
        (there, WORKERS, for_workers),
    ):
        if rows:
            right = ("oldest", "per_second", "memory", "silent_for", "up_for")
            # a line counts those without room
            shown = rows if len(rows) <= count else rows[: max(count - 1, 0)]
            made = _show.grid(Rows(shown), columns, right=right, least=LEAST, is_noted=False)
            parts += [Text(), made]
            if len(shown) < len(rows):
                parts.append(Text(f"… and {len(rows) - len(shown)} more", "dim"))
    return Group(*parts)

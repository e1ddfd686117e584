"""`pgdefer top`: queues, workers and rates, live."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from pgdefer import _sql

from . import _show
from ._base import DSN, Session, out, session

QUEUES = {
    "queue": "queue",
    "paused": "",
    "ready": "ready",
    "running": "running",
    "blocked": "blocked",
    "scheduled": "scheduled",
    "waiting": "waiting",
    "upstream_failed": "upstream failed",
    "held": "held",
    "failed": "failed",
    "oldest": "oldest ready",
    "per_second": "done/s",
    "failed_5m": "failed in 5 min",
    "workers": "workers",
}
WORKERS = {
    "id": "worker",
    "name": "name",
    "queues": "queues",
    "running": "running",
    "silent_for": "last seen ago",
    "up_for": "up for",
}


def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Look so often, in seconds.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    dsn: DSN = None,
) -> None:
    """Show queues, workers and rates, until interrupted."""
    with contextlib.suppress(KeyboardInterrupt), session(dsn) as on:
        if once:
            out.print(_picture(on))
            return
        with Live(_picture(on), console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_picture(on), refresh=True)


def _picture(on: Session) -> Group:
    queues, workers = on.call(_sql.TOP_QUEUES), on.call(_sql.WORKERS)
    alive = sum(row["is_alive"] for row in workers.values)
    ready, running = (sum(row[key] for row in queues.values) for key in ("ready", "running"))
    rate = sum(row["per_second"] or 0 for row in queues.values)
    head = f"{ready} ready, {running} running, {rate:.3g}/s in the last 5 minutes, {alive} workers"
    workers.values = [row for row in workers.values if row["is_alive"] or row["running"]]
    parts: list[RenderableType] = [
        Text(f"pgdefer  {time.strftime('%H:%M:%S')}  {head}", style="bold"),
        _show.grid(queues, QUEUES, right=("oldest", "per_second")),
        _show.grid(workers, WORKERS, right=("silent_for", "up_for")),
    ]
    return Group(*parts)

"""`pgdefer move-in`: takes over the waiting jobs of another queue in the same database."""

from __future__ import annotations

import enum
import json
from typing import Annotated

import typer

from pgdefer.database import sql

from . import _show
from ._base import DSN, AsJson, DryRun, out, session


class Origin(enum.StrEnum):
    """The queues whose jobs can be moved in."""

    procrastinate = "procrastinate"


def move_in(
    origin: Annotated[Origin, typer.Argument(help="The other queue.", show_default=False)],
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Take over the waiting jobs of another queue, all or none.

    They keep args, queue, priority, locks and times, and are cancelled there. If the queueing lock
    of a job is taken here, it becomes the job that has the lock. The other queue's workers may
    continue: their running jobs, and jobs behind those for the same lock, stay there.
    """
    del origin  # there is one
    counts = {"moved": 0, "locked": 0, "scheduled": 0}
    with session(dsn, dry_run=dry_run) as on, on.transaction():
        on.execute(sql.MOVE_IN_LOCK)
        after = 0
        while True:
            (row,) = on.call(sql.MOVE_IN_PROCRASTINATE, {"after": after}).values
            if not row["found"]:
                break
            after = row["last"]
            counts["moved"] += row["found"]
            counts["locked"] += row["locked"]
            counts["scheduled"] += row["scheduled"]
        counts |= on.call(sql.MOVE_IN_LEFT).values[0]
    if as_json:
        _show.write(json.dumps(counts))
        return
    lines = {
        "moved": "waiting jobs moved",
        "locked": "of these have a lock",
        "scheduled": "of these are scheduled for later",
        "behind": "stay behind a running job of the same lock: run this again later",
        "running": "still run there",
    }
    for name, text in lines.items():
        out.print(f"{counts[name]} {text}", highlight=False)

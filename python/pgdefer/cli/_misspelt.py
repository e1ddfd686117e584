"""A line on stderr for a queue or task that may be misspelt.

Tests: integration/test_cli_queues.py.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator

import psycopg
from rich.text import Text

from pgdefer._text import escaped
from pgdefer.database import sql

from ._base import Session, err
from ._job import GLANCE

MOST = 10_000  # more names take longer to compare than a user would wait
_NAMES = {"queue": sql.QUEUE_NAMES, "task": sql.TASK_NAMES}


@contextlib.contextmanager
def doubted(
    on: Session, *, queue: str | None = None, task: str | None = None, may_be_new: bool = False
) -> Iterator[None]:
    """Say once the block is done which name was new. It is no error: jobs may follow.

    With `may_be_new`, say so only if the name resembles another one.
    """
    names = {"queue": queue, "task": task}
    doubts = [_doubt(on, kind, name, may_be_new) for kind, name in names.items() if name]
    yield
    for doubt in filter(None, doubts):
        err.print(Text(escaped(f"pgdefer: {doubt}"), style="yellow"), soft_wrap=True)


def _doubt(on: Session, kind: str, name: str, may_be_new: bool) -> str | None:
    """Return what to say about a name that is new to the database, unless all names are."""
    # This role may not read the views, or it takes too long: it is only a warning.
    with contextlib.suppress(psycopg.Error), on.transaction():
        known = [row["name"] for row in on.call(_NAMES[kind]).values]
        if not known or _is_one_of(name, known):
            return None
        near = difflib.get_close_matches(name.removesuffix("*"), known[:MOST], 1)
        if (may_be_new and not near) or _has_job(on, kind, name):
            return None
        said = f"the {kind} {name} is new or misspelt: no recent job, worker or schedule names it"
        return f"{said}; did you mean {near[0]}?" if near else said
    return None


def _is_one_of(name: str, known: list[str]) -> bool:
    if name.endswith("*"):
        return any(one.startswith(name[:-1]) for one in known)
    return name in known or name == "default"


def _has_job(on: Session, kind: str, name: str) -> bool:
    asked = dict.fromkeys(("pattern", "queue", "state", "task", "before"))
    asked |= {kind: name, "by": "text", "max_jobs": 1, "max_bytes": GLANCE}
    return any(row["id"] is not None for row in on.call(sql.SEARCH, asked).values)

"""The jobs that filters select, for the list and for calls on all of them.

Tests: contrib/test_web.py, contrib/test_web_time.py.
"""

from __future__ import annotations

import re
from typing import Any

from . import queries
from .visit import BadRequest, Form, Visit

__all__ = ["TIMES", "filters_of", "find", "used_filters"]

FILTERS = ("state", "queue", "task", "by", "pattern")
# The times by which a filter selects, and what the page calls them.
TIMES = {
    "created": "Deferred",
    "scheduled": "Scheduled",
    "started": "Started",
    "finished": "Finished",
}
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?", re.ASCII)
# How many bytes a search reads; how many jobs' times are compared, and how many in one statement.
NEAR, FAR = 750_000, 50_000_000
LOOKS = {NEAR: 200, FAR: 10_000}
BATCH = {NEAR: 100, FAR: 500}

Found = tuple[list[dict[str, Any]], dict[str, Any] | None]


def filters_of(form: Form, prefix: str = "") -> dict[str, Any]:
    """Return the filters in a URL or a form."""
    asked: dict[str, Any] = {name: form.maybe(prefix + name) for name in FILTERS}
    asked["by"] = asked["by"] or "text"
    asked |= {name: form.maybe(prefix + name) for name in ("at", "from", "to", "zone")}
    asked["at"] = asked["at"] or "created"
    if asked["at"] not in TIMES:
        raise BadRequest
    for moment in (asked["from"], asked["to"]):
        if moment is not None and not MOMENT.fullmatch(moment):
            raise BadRequest
    return asked


def has_time(asked: dict[str, Any]) -> bool:
    """Return whether a time is asked for."""
    return asked["from"] is not None or asked["to"] is not None


def used_filters(asked: dict[str, Any]) -> dict[str, str]:
    """Return the filters that are set."""
    unused = () if has_time(asked) else ("at", "zone")
    return {n: value for n, value in asked.items() if value is not None and n not in unused}


def find(
    visit: Visit, asked: dict[str, Any], before: int | None, most: int, max_bytes: int = FAR
) -> Found:
    """Return the newest jobs below `before`, and where to continue if there may be more."""
    wanted = {name: asked[name] for name in FILTERS}
    if has_time(asked):
        return find_by_time(visit, asked, wanted | {"max_bytes": max_bytes}, before, most)
    return search(visit, queries.JOBS, **wanted, before=before, n=most, max_bytes=max_bytes)


def find_by_time(
    visit: Visit, asked: dict[str, Any], wanted: dict[str, Any], before: int | None, most: int
) -> Found:
    """As `find`, for jobs of a time: look at a bounded number that match the other filters."""
    time = {"from": asked["from"], "to": asked["to"], "zone": asked["zone"] or "UTC"}
    if asked["to"] is not None and asked["at"] != "scheduled":
        # a job that was deferred after that time has not started or finished before it, either
        after = {"to": time["to"], "zone": time["zone"]}
        first = visit.read(queries.FIRST_AFTER, **after)[0]["id"]
        before = first if before is None else min(before, first or before)
    found: list[dict[str, Any]] = []
    batch = BATCH[wanted["max_bytes"]]
    looked = 0
    while True:
        rows, end = search(
            visit, queries.JOBS_BY_TIME[asked["at"]], **wanted, **time, before=before, n=batch
        )
        for row in rows:
            looked += 1
            if asked["at"] == "created" and row["is_older"]:
                return found, None
            if row["is_found"]:
                found.append(row)
                if len(found) == most:
                    return found, stopped(looked, row["id"])
        if end is None:
            return found, None
        before = end["next_id"]
        if len(rows) < batch or looked >= LOOKS[wanted["max_bytes"]]:
            return found, stopped(looked, end["next_id"])


def stopped(looked: int, next_id: int) -> dict[str, Any]:
    """Return where to continue, in the form of a search's last row."""
    return {"next_id": next_id, "excerpt": f"stopped after a look at the times of {looked} jobs"}


def search(visit: Visit, statement: str, **values: Any) -> Found:
    """Return the jobs that a statement finds, and the last row of the search if it stopped."""
    rows = visit.read(statement, **values)
    end = rows.pop() if rows and rows[-1]["id"] is None else None
    return rows, end

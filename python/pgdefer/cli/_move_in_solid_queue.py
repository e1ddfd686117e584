"""Moving in the waiting jobs of Solid Queue, with arguments as ActiveJob stores them.

Tests: integration/test_move_in.py.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from pgdefer.codec import Codec
from pgdefer.database import move_in_sql, sql
from pgdefer.errors import PgDeferError
from pgdefer.options import limit_of_semaphore

from ._base import Session

__all__ = ["arguments", "move_in"]

# ActiveJob's marks within a hash; they only say which keys were symbols.
_MARKS = frozenset({"_aj_symbol_keys", "_aj_ruby2_keywords", "_aj_hash_with_indifferent_access"})
# The keyword for positional arguments, whose names only the Ruby code knows.
_POSITIONAL = "arguments"
_VALUES: dict[str, Callable[[Any], Any]] = {
    "Symbol": str,
    "Date": dt.date.fromisoformat,
    "DateTime": dt.datetime.fromisoformat,
    "Time": dt.datetime.fromisoformat,
    "TimeWithZone": dt.datetime.fromisoformat,
    "Duration": lambda value: dt.timedelta(seconds=value),
    "BigDecimal": Decimal,
}


def move_in(on: Session) -> dict[str, int]:
    """Take over its waiting jobs, and return how many."""
    counts = {"moved": 0, "limited": 0, "scheduled": 0}
    with on.transaction():
        on.execute(move_in_sql.SOLID_TIMES)
        with move_in_sql.tables_of("solid-queue"):
            on.execute(move_in_sql.SOLID_LOCK)
            on.execute(move_in_sql.SOLID_LOCK_MORE)
            on.execute(move_in_sql.SOLID_LOCK_CLAIMED)
        slots: dict[str, int | None] = {}
        held: list[str] = []
        for row in on.call(move_in_sql.SOLID_KEYS).values:
            if row["is_held"]:
                held.append(row["key"])
            else:
                slots[row["key"]] = row["slots"]
        asked: dict[str, Any] = {"after": move_in_sql.BELOW_ALL, "held": held}
        while rows := on.call(move_in_sql.SOLID, asked).values:
            jobs = json.dumps([_job(row, slots) for row in rows])
            on.call(sql.DEFER_MANY, {"jobs": jobs})
            on.call(move_in_sql.SOLID_END, {"ids": [row["id"] for row in rows]})
            asked["after"] = rows[-1]["id"]
            counts["moved"] += len(rows)
            counts["limited"] += sum(row["concurrency_key"] is not None for row in rows)
            counts["scheduled"] += sum(row["is_scheduled"] for row in rows)
        on.call(move_in_sql.SOLID_SLOTS, {"keys": list(slots)})
        return counts | on.call(move_in_sql.SOLID_LEFT).values[0]


def _job(row: Mapping[str, Any], slots: Mapping[str, int | None]) -> dict[str, Any]:
    """Return a job of Solid Queue as queue.defer_many takes it."""
    try:
        stored = json.loads(row["arguments"])
        args = Codec().encode(arguments(stored.get("arguments") or []))
    except (
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        LookupError,
        RecursionError,
    ) as error:
        raise PgDeferError(
            f"the arguments of job {row['id']} ({row['class_name']}) can't be read: {error}"
        ) from error
    told = ("locale", "timezone", "executions")
    headers = {"id": row["id"], "active_job_id": stored.get("job_id")}
    headers |= {name: stored[name] for name in told if stored.get(name) is not None}
    options = move_in_sql.UNCHANGED | {"headers": {"solid_queue": headers}}
    job = {
        "task": row["class_name"],
        "args": args,
        "queue": row["queue_name"],
        "priority": -row["priority"],
        "queueing_lock": "",
        "options": options,
    }
    if row["is_scheduled"]:
        job["scheduled_at"] = row["scheduled_at"].isoformat()
    else:
        options["delay"] = 0
    if (key := row["concurrency_key"]) is not None:
        job |= limit_of_semaphore(key, slots[key])
    return job


def arguments(stored: Sequence[Any]) -> dict[str, Any]:
    """Return ActiveJob's arguments by name: keywords by theirs, others as the list `arguments`."""
    positional = list(stored)
    keywords = {}
    if positional and isinstance(positional[-1], dict) and "_aj_ruby2_keywords" in positional[-1]:
        keywords = _value(positional.pop())
    if not positional:
        return keywords
    if _POSITIONAL in keywords:
        raise ValueError(f"there are positional arguments, and one named {_POSITIONAL}")
    return {_POSITIONAL: _value(positional), **keywords}


def _value(stored: Any) -> Any:
    """Return a value as Python's handlers get it."""
    if isinstance(stored, list):
        return [_value(one) for one in stored]
    if not isinstance(stored, dict):
        return stored
    if "_aj_globalid" in stored:
        return stored["_aj_globalid"]
    kind = str(stored.get("_aj_serialized", "")).rpartition("::")[2].removesuffix("Serializer")
    if kind in _VALUES:
        return _VALUES[kind](stored["value"])
    return {name: _value(one) for name, one in stored.items() if name not in _MARKS}

"""The map of keys to shards, as a program knows it; and how a job's key is found.

Tests: cluster/test_map.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import psycopg

from pgdefer.app import App
from pgdefer.checks import check_text
from pgdefer.options import IN_TEMPLATES, as_list
from pgdefer.tasks.prepared_job import PreparedJob, check_prepared

__all__ = [
    "PARTS",
    "SLOTS",
    "KeyedJob",
    "ShardMap",
    "is_unreached",
    "key_of",
    "part_of",
    "shard_of",
]

SLOTS = 1024
PARTS = 4096  # of a slot
# The SQLSTATEs that say to ask elsewhere: the key belongs to another shard; it is on its way.
ELSEWHERE = ("55000", "55P03")


def is_unreached(error: psycopg.OperationalError) -> bool:
    """Whether no connection was made. If one was lost, the call may have been made."""
    return getattr(error, "is_unreached", False)


def shard_of(key: str) -> int:
    """Return the slot of a key, 0 to 1023: the same as queue.shard_of."""
    check_text("a key", key, "tenant-1")
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:2], "big") >> 6


def part_of(key: str) -> int:
    """Return the part of its slot that a key is in, 0 to 4095."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:3], "big") >> 2 & (PARTS - 1)


@dataclasses.dataclass
class ShardMap:
    """The DSNs of the shards, and the shard of each slot, both with their versions."""

    #: The DSN of each shard.
    shards: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The shard of each slot, and the version of this entry.
    slots: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    #: The version of each shard's DSN.
    versions: dict[str, int] = dataclasses.field(default_factory=dict)

    def learn(self, told: Mapping[str, Any]) -> None:
        """Take over what the map of a shard knows better."""
        for name, dsn in told["shards"].items():
            version = told.get("versions", {}).get(name, 1)
            if version > self.versions.get(name, 0):
                self.shards[name], self.versions[name] = dsn, version
        theirs = [(name, version) for name, version in told["slots"]]
        mine = self.slots or theirs
        self.slots = [
            max(pair, key=lambda slot: slot[1]) for pair in zip(mine, theirs, strict=True)
        ]

    def owner_of(self, key: str) -> str:
        """Return the shard of a key."""
        return self.slots[shard_of(key)][0]

    def to_json(self) -> str:
        """Return the map as queue.shard_learn takes it."""
        return json.dumps(dataclasses.asdict(self))


def _fill(template: str, args: Mapping[str, Any]) -> str:
    """Fill {field} from args, as the database does."""

    def value(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        given = args.get(found[1])
        if isinstance(given, Mapping) and "__pgdefer__" in given:
            given = given.get("value")
        if isinstance(given, bool):
            return "true" if given else "false"
        if isinstance(given, str | int):
            return str(given)
        raise ValueError(
            f"{template!r} is filled by what is no text or whole number: pass shard_key"
        )

    return IN_TEMPLATES.sub(value, template)


@dataclasses.dataclass(frozen=True)
class KeyedJob:
    """A job with its key."""

    key: str
    call: PreparedJob[Any]

    @classmethod
    def all_of(cls, calls: Iterable[tuple[str, PreparedJob[Any]]]) -> list[KeyedJob]:
        """Return calls with their keys. Raises TypeError or ValueError for what is none."""
        found = []
        pair: Any
        for pair in as_list("calls", calls):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(
                    f"each of calls must be a key and a call, (key, call), not {pair!r}"
                )
            check_text("a key", pair[0], "tenant-1")
            check_prepared([pair[1]])
            found.append(cls(*pair))
        return found

    def to_json(self) -> str:
        """Return the object that queue.shard_defer_many takes."""
        return f'{{"shard_key": {json.dumps(self.key)}, {self.call.to_json()[1:]}'


def key_of(app: App, call: PreparedJob[Any], shard_key: str | None) -> KeyedJob:
    """Return a job with its key: the one given, or else its lock, its share or the header tenant.

    Those of its task count if the job has none of its own. Raises ValueError without any.
    """
    defaults = app.client.defaults.get(call.task)
    registered = defaults.defaults() if defaults is not None else {}
    headers = {**registered.get("headers", {}), **call.options.options.get("headers", {})}
    if headers:
        options = {**call.options.options, "headers": headers}
        with_headers = dataclasses.replace(call.options, options=options)
        call = dataclasses.replace(call, given=with_headers, add_headers=None)
    if shard_key is None:
        given = registered | call.options.defaults()
        tenant = headers.get("tenant")
        template = given.get("lock") or given.get("share")
        shard_key = _fill(template, json.loads(call.args)) if template else tenant
    if not isinstance(shard_key, str) or not 0 < len(shard_key.encode()) <= 1000:
        raise ValueError(
            f"a job of {call.task!r} needs a shard_key of 1 to 1,000 bytes, or a lock or share"
        )
    return KeyedJob(shard_key, call)

"""Moving a slot: calls of extension/cluster/move.sql in the source and the target, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import psycopg

from pgdefer.contrib.cluster import sql
from pgdefer.contrib.cluster.shards import PARTS, ShardMap
from pgdefer.database.execute import execute
from pgdefer.database.sql import Statement

__all__ = ["Move", "move"]

LOCKED = "55P03"


@dataclasses.dataclass
class Move:
    """How a move went. `stays`: parts that have not moved, with the job that each waits for."""

    slot: int
    jobs: int = 0
    longest_pause: float = 0
    stays: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all of the slot has moved."""
        return not self.stays


class _Mover:
    """One move, on a connection to each side."""

    def __init__(self, source: Any, target: Any, slot: int, started: bool) -> None:
        self.source, self.target, self.started = source, target, started
        self.done = Move(slot)

    def call(self, connection: Any, statement: Statement, **parameters: Any) -> Any:
        """Make one step: a transaction. One that waits for a lock for too long is repeated."""
        parameters["slot"] = self.done.slot
        for _ in range(600):
            try:
                return execute(connection, statement, parameters)
            except psycopg.errors.LockNotAvailable:
                time.sleep(0.05)  # let those defer that wait behind this one
        return execute(connection, statement, parameters)

    def part(self, part: int, patience: float) -> None:
        """Move a part, unless it must wait for too long; then give its jobs back."""
        began = time.monotonic()
        while not self._leave(part):
            held = self.call(self.source, sql.HOLD, part=part, started=self.started)[0]
            if held[0]:
                continue
            if held[1] is not None:
                if time.monotonic() - began > patience:
                    self.call(self.source, sql.UNHOLD, part=part)
                    self.done.stays[part] = f"job {held[1]}: {held[2]}"
                    return
                time.sleep(0.01)
        self.arrive(part)
        self.done.stays.pop(part, None)
        self.done.longest_pause = max(self.done.longest_pause, time.monotonic() - began)

    def _leave(self, part: int) -> bool:
        parameters = {"part": part, "started": self.started}
        return bool(self.call(self.source, sql.PART_LEAVE, **parameters)[0][0])

    def arrive(self, part: int) -> None:
        """Bring the jobs of a part that has left to the target."""
        jobs = self.call(self.source, sql.PART_JOBS, part=part)[0][0]
        self.done.jobs += self.call(self.target, sql.PART_ARRIVE, part=part, jobs=jobs)[0][0]
        self.call(self.source, sql.PART_GONE, part=part)


def move(
    known: ShardMap, slot: int, way: tuple[str, str], *, patience: float, started: bool
) -> Move:
    """Move a slot from a shard to another; a move that was interrupted goes on."""
    source, target = way
    if source == target:
        return Move(slot)
    with contextlib.ExitStack() as stack:
        here, there = (
            stack.enter_context(psycopg.connect(known.shards[name], autocommit=True))
            for name in (source, target)
        )
        mover = _Mover(here, there, slot, started)
        for connection in (here, there):
            execute(connection, sql.SET_LOCK_TIMEOUT, {})
        _be_the_only_mover(here, slot)
        version = mover.call(here, sql.LEAVE, target=target)[0][0]
        mover.call(here, sql.LIST)
        mover.call(there, sql.RECEIVE, source=source, version=version)
        mover.call(here, sql.UNHOLD, part=None)
        states = dict(mover.call(here, sql.PARTS))
        for part in [part for part, state in states.items() if state == "leaving"]:
            mover.arrive(part)
        empty = [row[0] for row in mover.call(here, sql.LEAVE_EMPTY)]
        mover.call(there, sql.ARRIVE_EMPTY, parts=empty)
        mover.call(here, sql.GONE_EMPTY, parts=empty)
        left = [part for part in range(PARTS) if part not in {*states, *empty}]
        for _ in range(3):
            for part in left:
                mover.part(part, patience)
            left = list(mover.done.stays)
        if mover.done.is_done:
            mover.call(there, sql.MOVED, version=version)
            mover.call(here, sql.MOVED, version=version)
        return mover.done


def _be_the_only_mover(connection: Any, slot: int) -> None:
    """Wait until a mover that died has ended its last step. Raises RuntimeError if one lives."""
    for _ in range(100):
        if execute(connection, sql.ONLY_MOVER, {"slot": slot})[0][0]:
            return
        time.sleep(0.05)
    raise RuntimeError(f"slot {slot} is being moved by another process")

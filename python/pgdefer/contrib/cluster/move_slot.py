"""Moving a slot: calls of extension/cluster/, step by step, in the source and the target.

Tests: cluster/test_move.py, cluster/test_repair.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import psycopg

from pgdefer.contrib.cluster import sql
from pgdefer.contrib.cluster.shards import PARTS
from pgdefer.database.execute import execute
from pgdefer.database.source import Source
from pgdefer.database.sql import Statement
from pgdefer.errors import PgDeferError

__all__ = ["Move", "SlotBusy", "move"]


class SlotBusy(PgDeferError):  # noqa: N818 (as the others)
    """The slot can't begin to move now: an open transaction or another mover has it."""


@dataclasses.dataclass
class Move:
    """How a move went. `stays`: the parts that have not moved, each with the job it waits for.

    `longest_pause` is the longest pause of a part, moved or not, in seconds; `pause_of` says how
    many of these went into `waiting` for running jobs and open transactions, `leaving` the source,
    and `arriving`. A pause ends when jobs run again: a large part moves in pieces, and its oldest
    jobs run in the target while the others follow. `longest_refusal` is for how many seconds defers
    for a part were refused, from its first piece to its last.
    """

    slot: int
    jobs: int = 0
    longest_pause: float = 0
    longest_refusal: float = 0
    pause_of: dict[str, float] = dataclasses.field(default_factory=dict)
    stays: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all of the slot has moved."""
        return not self.stays


class _Pause:
    """The time for which a part is paused, and what takes it."""

    def __init__(self) -> None:
        self.began = self._last = time.monotonic()
        self.spent: dict[str, float] = {}

    @property
    def length(self) -> float:
        return time.monotonic() - self.began

    def note(self, what: str) -> None:
        now = time.monotonic()
        self.spent[what] = self.spent.get(what, 0) + now - self._last
        self._last = now


class _Mover:
    """One move, on a connection to each side."""

    def __init__(self, source: Any, target: Any, done: Move, started: bool) -> None:
        self.source, self.target, self.done, self.started = source, target, done, started

    def call(self, connection: Any, statement: Statement, **parameters: Any) -> Any:
        """Make one step: a transaction. One that waits for a lock for too long is repeated."""
        for _ in range(600):
            with contextlib.suppress(psycopg.errors.LockNotAvailable):
                return self.once(connection, statement, **parameters)
            time.sleep(0.05)  # let others have what they wait for behind this one
        return self.once(connection, statement, **parameters)

    def once(self, connection: Any, statement: Statement, **parameters: Any) -> Any:
        with connection.transaction():
            connection.execute(sql.SET_TIME_LIMITS.psycopg)
            return execute(connection, statement, {"slot": self.done.slot, **parameters})

    def leave(self, target: str, patience: float) -> int:
        """Begin the move, once those who defer for the slot have committed; return its version.

        Meanwhile the slot refuses new defers, but only in every other second: a transaction that
        is in it may stay open for long. Raises SlotBusy after `patience` seconds.
        """
        began = time.monotonic()
        closed_at: float | None = None
        while True:
            with contextlib.suppress(psycopg.errors.LockNotAvailable):
                version: int = self.once(self.source, sql.LEAVE, target=target)[0][0]
                return version
            now = time.monotonic()
            if closed_at is not None and now - began > patience:
                raise SlotBusy(
                    f"slot {self.done.slot} stays: an open transaction has deferred for it",
                    hint="Let it end, or give the move more patience; then move the slot again.",
                )
            if closed_at is None or now - closed_at >= 2:
                closed_at = now
                self.once(self.source, sql.CLOSE, part=None)  # for a second

    def catch_up(self) -> None:
        """Let the source admit what has been committed, so that no paused part waits for that."""
        while self.call(self.source, sql.CATCH_UP)[0][0]:
            pass

    def part(self, part: int, patience: float) -> bool:
        """Move a part; if it would have to wait for too long, let its jobs run here again."""
        self.catch_up()
        while self.call(self.source, sql.HOLD_AHEAD, part=part, started=self.started)[0][0]:
            pass
        pause = _Pause()
        while True:
            has_left, why, may_pass = self._try(part, pause)
            if has_left:
                break
            if why and (not may_pass or pause.length > patience):
                self.call(self.source, sql.UNHOLD, part=part)
                self.done.stays[part] = why
                break
            if why:
                time.sleep(0.01)
        if has_left:
            self.done.stays.pop(part, None)
            self.arrive(part, pause)
        else:
            self.note(pause)
        return part not in self.done.stays

    def note(self, pause: _Pause) -> None:
        """Note how long a part was paused: its jobs can run from now on."""
        if pause.length > self.done.longest_pause:
            self.done.longest_pause, self.done.pause_of = pause.length, pause.spent

    def _try(self, part: int, pause: _Pause) -> tuple[bool, str, bool]:
        """Let a part leave, or hold what could start next in it.

        Return whether it has left, else what it waits for, and whether that may soon end.
        """
        parameters = {"part": part, "started": self.started}
        try:
            has_left = self.once(self.source, sql.PART_LEAVE, **parameters)[0][0]
            pause.note("leaving")
            if has_left:
                return True, "", True
            to_hold, job, why = self.once(self.source, sql.HOLD, **parameters)[0]
            pause.note("waiting")
            return False, f"job {job}: {why}" if job and not to_hold else "", why == "it runs"
        except psycopg.errors.LockNotAvailable:
            self.once(self.source, sql.CLOSE, part=part)  # so that nobody else enters
            pause.note("waiting")
            return False, "an open transaction", True
        except psycopg.errors.ObjectNotInPrerequisiteState as refused:
            return False, refused.diag.message_detail or "", False
        except psycopg.errors.ProgramLimitExceeded as refused:  # by a job of almost 256 MB
            return False, refused.diag.message_primary or "", False

    def arrive(self, part: int, pause: _Pause | None = None) -> None:
        """Bring a part that has left to the target, piece by piece."""
        began = time.monotonic()
        has_next = True
        while has_next:
            carried = self.call(self.source, sql.PART_JOBS, part=part)[0][0]
            jobs, receipt = self.call(self.target, sql.PART_ARRIVE, part=part, carried=carried)[0]
            self.done.jobs += jobs
            if pause is not None:
                pause.note("arriving")
                self.note(pause)
                pause = None
            try:
                has_next = self.call(self.source, sql.PART_GONE, part=part, receipt=receipt)[0][0]
            except psycopg.errors.ObjectNotInPrerequisiteState as refused:
                self.done.stays[part] = refused.diag.message_detail or ""
                has_next = False
        refused_for = time.monotonic() - began
        self.done.longest_refusal = max(self.done.longest_refusal, refused_for)

    def arrive_empty(self, leaving: Statement) -> list[int]:
        """Bring parts without jobs to the target, all at once, and return them."""
        parts = [row[0] for row in self.call(self.source, leaving)]
        if parts:
            carried = self.call(self.source, sql.EMPTY_PARTS, parts=parts)[0][0]
            arrived, receipts = zip(
                *self.call(self.target, sql.ARRIVE_EMPTY, carried=carried), strict=True
            )
            self.call(self.source, sql.GONE_EMPTY, parts=list(arrived), receipts=list(receipts))
        return parts


def move(done: Move, way: Mapping[str, Source], *, patience: float, started: bool) -> None:
    """Move a slot from a shard to another, of `way`; a move that was interrupted goes on.

    Parts that must wait come again, round by round, as long as one of three rounds moves any.
    """
    done.stays.clear()
    if len(way) < 2:
        return
    slot, (source, target) = done.slot, way
    with contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(shard.connect()) for shard in way.values())
        mover = _Mover(here, there, done, started)
        source_format = mover.call(here, sql.FORMAT)[0][0]
        coming = {"source": source, "format": source_format}
        version = mover.call(here, sql.MAP)[0][0]["slots"][slot][1] + 1
        mover.call(there, sql.MAY_RECEIVE, version=version, **coming)
        version = mover.leave(target, patience)
        _be_the_only_mover(mover)
        mover.call(here, sql.LIST)
        mover.call(there, sql.RECEIVE, version=version, **coming)
        mover.call(here, sql.UNHOLD, part=None)
        mover.arrive_empty(sql.LEFT_EMPTY)  # one by one, they would refuse defers for long
        states = dict(mover.call(here, sql.PARTS))
        for part in [part for part, state in states.items() if state == "leaving"]:
            mover.arrive(part)
        empty = mover.arrive_empty(sql.LEAVE_EMPTY)
        left = [part for part in range(PARTS) if part not in {*states, *empty}]
        idle = 0
        while left and idle < 3:
            moved = [part for part in left if mover.part(part, patience)]
            idle = 0 if moved else idle + 1
            left = list(done.stays)
        if done.is_done:
            mover.call(there, sql.MOVED, version=version)
            mover.call(here, sql.MOVED, version=version)


def _be_the_only_mover(mover: _Mover) -> None:
    """Wait until a mover that died has ended its last step. Raises SlotBusy if one lives."""
    for _ in range(100):
        if mover.call(mover.source, sql.MOVER)[0][0]:
            return
        time.sleep(0.05)
    raise SlotBusy(
        f"slot {mover.done.slot} is being moved by another process",
        hint="Wait for it, or end it; then move the slot again.",
    )

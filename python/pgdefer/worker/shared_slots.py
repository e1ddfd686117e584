"""Slots that the workers of several databases share, each in its turn.

A worker claims jobs only when it has been given a turn, or when nobody waits for one. Turns go
round: the worker that has waited longest is next. A turn that is not taken soon passes on, so a
database that does not answer keeps nobody waiting. Jobs that are claimed while all slots are taken
start in turn as well, one of each database.

While jobs are so short that slots become free all the time, some more are claimed, of which each
starts within a moment. They count for all databases together, so nobody hoards. A turn is then
worth several batches, because a call that reports the last batch as well saves another call. Every
other turn goes to a database that had no backlog when it was asked last, so that single jobs do not
wait behind all others' turns.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import TypeVar

from pgdefer.worker.heartbeat import clock
from pgdefer.worker.prefetch import AHEAD, WEIGHT
from pgdefer.worker.slots import Slots

__all__ = ["DatabaseSlots", "SharedSlots"]

# How long a turn, or a call that asks for jobs, may take before others get what it was given, in
# seconds.
PATIENCE = 0.1
# So many have a turn at the same time while jobs are short. In one call a worker claims, and
# starts, at most that part of what may be claimed ahead: batches are cheaper.
HOLDERS = 2
# How many batches a turn is worth then, and how long outcomes wait for the next call, in seconds.
TURN = 5
MOMENT = 0.005

T = TypeVar("T")


class SharedSlots:
    """`size` slots; the jobs of one database use at most `per_database` of them.

    Each of the databases that have a turn may claim `prefetch` jobs before there is a slot for
    them. The `keep` databases whose jobs ended last may keep connections for handlers. Only the
    workers' loop may use this.
    """

    def __init__(self, size: int, per_database: int, prefetch: int, keep: int) -> None:
        self.size = size
        self.per_database = per_database
        self.used = 0
        self.running = 0
        self._most_ahead = HOLDERS * prefetch
        self._keep = keep
        #: How often slots become free while jobs run, in seconds; when the last one did, or the
        #: first job began.
        self._gap = AHEAD
        self._freed_at = 0.0
        # Those that wait for a turn, or with a claimed job for a slot: the first comes next.
        self._wanting: dict[DatabaseSlots, None] = {}
        self.starting: dict[DatabaseSlots, None] = {}
        # What was promised to whom, and when: turns, and calls under way.
        self._promised: dict[DatabaseSlots, tuple[int, float]] = {}
        # Whose turn lasts for several calls: for how many more jobs; when the last answer came.
        self._turns: dict[DatabaseSlots, tuple[int, float]] = {}
        # Whether the last turn went to one with a backlog.
        self._was_backlog = False
        self._recent: dict[DatabaseSlots, None] = {}
        self._is_called = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ahead(self) -> int:
        """How many jobs may be claimed that start only when a slot becomes free."""
        gap, since = self._gap, clock() - self._freed_at
        if self.running >= self.size or since > PATIENCE:
            gap = max(gap, since)
        return 0 if gap >= AHEAD else min(self._most_ahead, int(AHEAD / max(gap, 1e-6)))

    def ahead_of(self, slots: DatabaseSlots) -> int:
        """How many of them may be one worker's: one, if it has no backlog."""
        if slots.has_filters:
            return 0
        return min(self.ahead, 1) if slots.found_few_ahead else self.ahead

    def room(self, slots: DatabaseSlots) -> int:
        """Return how many more jobs a worker may claim, without what others were promised."""
        oldest = clock() - PATIENCE
        promised = sum(
            jobs
            for other, (jobs, at) in self._promised.items()
            if at > oldest and other is not slots
        )
        free = self.size - self.used - promised
        if slots.takes_ahead:
            return free + self.ahead
        # At least that many even if no slot is free: jobs of others may always be claimed ahead.
        return max(free, min(free + self.ahead, self.ahead_of(slots)))

    def wanted(self, slots: DatabaseSlots) -> int:
        """Return how many jobs a worker may ask for now; without any, it gets a turn later."""
        own = slots.size - slots.used + self.ahead_of(slots)
        if own <= 0:
            return 0
        turn, at = self._promised.get(slots, (0, 0.0))
        if turn and at <= clock() - PATIENCE:
            turn = 0
        if not turn and (not self._wanting or slots in self._turns):
            turn = self._batch(slots, is_busy=True)
        if turn <= 0:
            self._wanting.setdefault(slots)
            self.look_soon()
            return 0
        return min(turn, own)

    def _batch(self, slots: DatabaseSlots, *, is_busy: bool) -> int:
        """Return how many jobs one of those that want some may claim.

        While all slots are taken, the jobs that wait for one leave time for a whole batch.
        """
        room, whole = self.room(slots), self.ahead // HOLDERS
        if is_busy and slots.takes_ahead and room < whole:
            return 0
        return min(room, max(math.ceil(room / (len(self._wanting) + 1)), whole))

    def begun(self, slots: DatabaseSlots) -> None:
        """Take note that a job of this database has started."""
        if not self.running:
            self._freed_at = clock()
        self.running += 1
        self._recent.pop(slots, None)

    def promise(self, slots: DatabaseSlots, jobs: int) -> None:
        """Take note that a worker is about to claim so many jobs; 0: no more."""
        self._wanting.pop(slots, None)
        if jobs:
            self._promised[slots] = jobs, clock()
        else:
            self._promised.pop(slots, None)
            self.look_soon()

    def answered(self, slots: DatabaseSlots, asked: int, came: int) -> None:
        """Take note that a call was answered; the turn goes on if that was all it asked for."""
        left, _ = self._turns.pop(slots, (0, 0.0))
        if came == asked < left:
            self._turns[slots] = left - came, clock()
        self.promise(slots, 0)

    def freed(self, slots: DatabaseSlots) -> None:
        """Take note that a job of this database has ended."""
        self.running -= 1
        now = clock()
        self._gap += (min(now - self._freed_at, AHEAD) - self._gap) * WEIGHT
        self._freed_at = now
        if not slots.running:
            self._recent[slots] = None
            if len(self._recent) > self._keep and (oldest := pop_first(self._recent)) is not None:
                oldest.on_rest()

    def forget(self, slots: DatabaseSlots) -> None:
        """Take note that a worker has ended."""
        for each in (self._wanting, self.starting, self._promised, self._turns, self._recent):
            each.pop(slots, None)
        self.look_soon()

    def look_soon(self) -> None:
        """Give free slots to those that wait, in the next moment."""
        if not self._is_called and (self._wanting or self.starting):
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_called = False
        self._start_waiting()
        self._give_turns()
        if self._wanting and (self._promised or self._turns) and self._timer is None:
            # Those that have a turn, or have been promised some jobs, may not answer.
            self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._look_again)

    def _start_waiting(self) -> None:
        """Start claimed jobs where slots are free."""
        passed: list[DatabaseSlots] = []
        while self.running < self.size and (slots := pop_first(self.starting)) is not None:
            if self._start_some(slots):
                self.starting[slots] = None
            elif slots.running >= slots.size:
                passed.append(slots)
        self.starting |= dict.fromkeys(passed)

    def _give_turns(self) -> None:
        """Let those that want jobs ask for some."""
        now = clock()
        self._promised = {on: p for on, p in self._promised.items() if p[1] > now - PATIENCE}
        self._turns = {on: t for on, t in self._turns.items() if t[1] > now - PATIENCE}
        for slots in self._in_order():
            is_next = slots not in self._turns
            jobs = self._batch(slots, is_busy=self.running >= self.size)
            if jobs > 0:
                if is_next:
                    self._begin_turn(slots, TURN * jobs)
                self.promise(slots, jobs)
                slots.take_turn()
                if is_next and len(self._turns) >= HOLDERS:
                    break
            elif slots.takes_ahead:
                break

    def _begin_turn(self, slots: DatabaseSlots, jobs: int) -> None:
        self._was_backlog = slots.has_backlog
        if self.ahead and slots.takes_ahead:
            self._turns[slots] = jobs, clock()

    def _in_order(self) -> list[DatabaseSlots]:
        """Return those that want jobs: first those whose turn it is.

        Where jobs are short, then one with a backlog and one without, while too few have a turn.
        """
        if not self.ahead:
            return list(self._wanting)
        first = [slots for slots in self._turns if slots in self._wanting]
        if len(self._turns) >= HOLDERS:
            return first
        both: tuple[list[DatabaseSlots], list[DatabaseSlots]] = [], []
        for slots in self._wanting:
            if slots not in self._turns:
                both[slots.has_backlog is self._was_backlog].append(slots)
        pairs = itertools.zip_longest(*both)
        return first + [slots for pair in pairs for slots in pair if slots is not None]

    def _start_some(self, slots: DatabaseSlots) -> bool:
        """Start jobs that wait, one or a batch; return whether more of them may start."""
        for _ in range(max(1, self.ahead // HOLDERS)):
            if self.running >= self.size:
                break
            if slots.running >= slots.size or not slots.start_next():
                return False
        return True

    def _look_again(self) -> None:
        self._timer = None
        self.look_soon()


class DatabaseSlots(Slots):
    """The slots of one database: `per_database` of those that are shared."""

    def __init__(self, shared: SharedSlots, like: Slots) -> None:
        super().__init__(
            shared.per_database,
            tasks=like.tasks,
            is_listed=like.is_listed,
            max_running=like.max_running,
        )
        self._shared = shared
        #: Whether options select jobs: then none are claimed before there is a slot for them.
        self.has_filters = bool(self.options())
        #: Whether the last call, made while no slot was free, found fewer jobs than it asked for.
        self.found_few_ahead = False
        self._asked_ahead = False
        #: Whether the last call found as many jobs as it asked for.
        self.has_backlog = False
        #: Starts the next claim that waits; returns whether more may start.
        self.start_next: Callable[[], bool] = _no_more
        #: Called when this database's turn comes, or when others have had jobs more recently.
        self.on_turn: Callable[[], None] = _nothing
        self.on_rest: Callable[[], None] = _nothing
        self._news: asyncio.Future[None] | None = None

    @property
    def takes_ahead(self) -> bool:
        """Whether to claim a batch of jobs that start only when a slot becomes free."""
        return not (self.has_filters or self.found_few_ahead)

    @property
    def may_ask(self) -> bool:
        """Whether jobs may be asked for, now or later, without any of these ending before."""
        return self.used < self.size + self._shared.ahead_of(self)

    @property
    def free(self) -> int:
        """The number of slots in which a job could start at once."""
        return max(min(self.size - self.used, self._shared.size - self._shared.used), 0)

    @property
    def is_full(self) -> bool:
        """Whether a claimed job must wait: for a slot, or because others' have waited longer."""
        shared = self._shared
        is_full = self.running >= self.size or shared.running >= shared.size
        return is_full or bool(shared.starting)

    @property
    def wanted(self) -> int:
        """The number of jobs to ask for now."""
        return self._shared.wanted(self)

    def take_turn(self) -> None:
        """Ask for jobs now."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self.on_turn()

    async def turn(self) -> None:
        """Wait a moment for the next turn, where that makes batches larger."""
        if self._shared.ahead and not self.wanted:
            self._news = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._news], timeout=MOMENT)
            self._news = None

    def ask(self, jobs: int) -> None:
        """Take note that so many jobs are being asked for."""
        self._asked_ahead = not self.free
        self._shared.promise(self, jobs)

    def answered(self, asked: int, came: int) -> None:
        """Take note that an answer has come, or none will."""
        self.has_backlog = came == asked
        self.found_few_ahead = self._asked_ahead and not self.has_backlog
        self._shared.answered(self, asked, came)

    def claimed(self, jobs: int) -> None:
        """Take note that so many jobs are claimed."""
        self.used += jobs
        self._shared.used += jobs

    def started(self) -> None:
        """Take note that a claimed job has started."""
        self.running += 1
        self._shared.begun(self)

    def left(self, *, has_started: bool) -> None:
        """Take note that a claimed job has ended, or was given back."""
        self.used -= 1
        self._shared.used -= 1
        if has_started:
            self.running -= 1
            self._shared.freed(self)
        self._shared.look_soon()

    def note_waiting(self) -> None:
        """Take note that a claimed job waits for a slot."""
        self._shared.starting.setdefault(self)
        self._shared.look_soon()


def pop_first(queue: dict[T, None]) -> T | None:
    """Remove the first of a queue, and return it."""
    for first in queue:
        del queue[first]
        return first
    return None


def _no_more() -> bool:
    """Start nothing: these slots have no worker yet."""
    return False


def _nothing() -> None:
    """Do nothing."""

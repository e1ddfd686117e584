"""Slots that several databases share: whose turn it is, and what becomes of one not taken."""

from __future__ import annotations

import asyncio

import pytest

from pgdefer.worker.shared_slots import PATIENCE, Share, SharedSlots
from pgdefer.worker.slots import Slots


class Player(Share):
    """A share whose worker only counts its turns."""

    def __init__(self, shared: SharedSlots) -> None:
        super().__init__(shared, Slots(1))
        self.turns = 0
        self.on_turn = self._count

    def _count(self) -> None:
        self.turns += 1

    def claim(self, jobs: int) -> None:
        """Fetch, and start what came."""
        self.ask(jobs)
        self.claimed(jobs)
        self.answered(jobs, jobs)
        for _ in range(jobs):
            self.started()


async def test_a_free_slot_goes_to_the_one_that_has_waited_longest() -> None:
    shared = SharedSlots(2, 2, prefetch=0, keep=1)
    large, first, second = (Player(shared) for _ in range(3))
    assert large.wanted == 2
    large.claim(2)
    assert [first.wanted, second.wanted, large.wanted] == [0, 0, 0]
    large.left(has_started=True)
    # It would like to have its slot again, but two others wait.
    assert large.wanted == 0
    await asyncio.sleep(0)
    assert [first.turns, second.turns, large.turns] == [1, 0, 0]
    assert [first.wanted, second.wanted] == [1, 0]
    first.claim(1)
    large.left(has_started=True)
    await asyncio.sleep(0)
    assert [first.turns, second.turns, large.turns] == [1, 1, 0]


async def test_a_turn_that_is_not_taken_passes_on() -> None:
    shared = SharedSlots(1, 1, prefetch=0, keep=1)
    busy, dead, alive = (Player(shared) for _ in range(3))
    busy.claim(1)
    assert [dead.wanted, alive.wanted] == [0, 0]
    busy.left(has_started=True)
    async with asyncio.timeout(30):
        while not alive.turns:  # noqa: ASYNC110 (the timer tells nobody)
            await asyncio.sleep(PATIENCE / 4)
    assert (dead.turns, alive.wanted) == (1, 1)
    alive.claim(1)
    assert (shared.used, shared.running) == (1, 1)


async def test_one_database_has_no_more_than_its_part() -> None:
    shared = SharedSlots(4, 2, prefetch=100, keep=1)
    one, other = Player(shared), Player(shared)
    assert one.wanted == 2
    one.claim(2)
    assert (one.wanted, one.is_full, other.wanted, other.is_full) == (0, True, 2, False)


async def test_a_turn_is_worth_a_call_while_jobs_wait_for_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgdefer.worker.shared_slots.clock", lambda: 0.0)
    shared = SharedSlots(2, 2, prefetch=10, keep=1)
    one, other = Player(shared), Player(shared)
    one.claim(2)
    for _ in range(100):  # so short that slots become free all the time
        one.left(has_started=True)
        one.claim(1)
    assert shared.ahead == 10
    one.claimed(6)
    # There is room for four more, but a batch has five.
    assert other.wanted == 0
    await asyncio.sleep(0)
    assert other.turns == 0
    one.left(has_started=False)
    await asyncio.sleep(0)
    assert (other.turns, other.wanted) == (1, 5)
    other.answered(5, 0)
    # While a slot is free, any room will do.
    one.left(has_started=True)
    one.claimed(2)
    assert other.wanted == 0
    await asyncio.sleep(0)
    assert (other.turns, other.wanted) == (2, 4)

"""Slots that several databases share: whose turn it is, and what becomes of one not taken."""

from __future__ import annotations

import asyncio

import pytest

from pgdefer.worker.shared_slots import PATIENCE, TURN, DatabaseSlots, SharedSlots
from pgdefer.worker.slots import Slots


class Player(DatabaseSlots):
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


async def test_a_free_slot_goes_to_the_one_that_has_waited_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgdefer.worker.shared_slots.clock", lambda: 0.0)
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
    shared = SharedSlots(2, 2, prefetch=5, keep=1)
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


def short_jobs(shared: SharedSlots, player: Player) -> None:
    """Have slots become free all the time."""
    for _ in range(100):
        player.claim(1)
        player.left(has_started=True)
    assert shared.ahead == 10


async def play(players: dict[Player, int], rounds: int) -> list[Player]:
    """Let players with such backlogs fetch, in calls of one round; return who got jobs, in order.

    The jobs end at once.
    """
    calls: dict[Player, int] = {}
    got: list[Player] = []
    for _ in range(rounds):
        for player in players:
            if player not in calls and (asked := player.wanted):
                player.ask(asked)
                calls[player] = asked
        await asyncio.sleep(0)
        for player in list(calls):
            asked = calls.pop(player)
            came = min(asked, players[player])
            player.claimed(came)
            player.answered(asked, came)
            for _ in range(came):
                player.started()
                player.left(has_started=True)
            got += [player] * bool(came)
        await asyncio.sleep(0)
    return got


async def test_a_turn_lasts_for_some_batches_while_jobs_are_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgdefer.worker.shared_slots.clock", lambda: 0.0)
    shared = SharedSlots(4, 4, prefetch=5, keep=1)
    players = {Player(shared): 1000 for _ in range(6)}
    short_jobs(shared, next(iter(players)))
    got = await play(players, 600)
    # Two have a turn at a time, each one for several calls.
    calls = len(got) / sum(player.turns for player in players)
    assert 3 <= calls <= TURN
    counts = [got.count(player) for player in players]
    assert max(counts) <= min(counts) + 2 * TURN


async def test_every_other_turn_goes_to_one_without_a_backlog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgdefer.worker.shared_slots.clock", lambda: 0.0)
    shared = SharedSlots(4, 4, prefetch=5, keep=1)
    busy = {Player(shared): 1000 for _ in range(20)}
    short_jobs(shared, next(iter(busy)))
    single = Player(shared)
    single.claim(4)
    single.ask(10)
    single.answered(10, 0)  # nothing is there that could be claimed ahead
    for _ in range(4):
        single.left(has_started=True)
    await play(busy, 200)
    # All the time others' jobs are claimed ahead of the slots.
    hog = Player(shared)
    hog.claimed(6)
    got = await play({**busy, single: 1}, 50)
    # It has waited for the turns that had begun, not for those of all that have waited longer.
    assert got.index(single) <= 2 * TURN


async def test_a_turn_of_several_batches_passes_on_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("pgdefer.worker.shared_slots.clock", lambda: now)
    shared = SharedSlots(4, 4, prefetch=5, keep=1)
    dead, other, alive, fast = (Player(shared) for _ in range(4))
    short_jobs(shared, fast)
    for player in (dead, other):
        shared.promise(fast, 14)
        assert player.wanted == 0
    shared.promise(fast, 0)
    await asyncio.sleep(0)
    # Both have a turn; neither calls.
    assert (dead.turns, other.turns) == (1, 1)
    assert alive.wanted == 0
    now = 2 * PATIENCE
    short_jobs(shared, fast)
    async with asyncio.timeout(30):
        while not alive.turns:  # noqa: ASYNC110 (the timer tells nobody)
            await asyncio.sleep(PATIENCE / 4)

#!/usr/bin/env python3
"""A cluster on paper: shards with skewed keys, one of them lost for a while, and a slot that moves.

    bench/simulate_cluster.py [--shards 100] [--load 0.6] [--skew 0.8] [--seed 1] ...

The model: keys have weights 1 / rank ** skew; a key's slot is that of queue.shard_of; slots are divided evenly. In each
second jobs are deferred for random keys, and each shard runs its oldest ones, as many as its capacity. While a shard is
lost, defers for its keys are refused and repeated when it is back. A slot moves with its waiting jobs. The same seed gives
the same figures. tests/py/cluster/test_simulation.py compares the model with three databases.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import itertools
import random
from collections.abc import Iterable, Sequence

SLOTS = 1024


def slot_of(key: str) -> int:
    """Return the slot of a key, as queue.shard_of does."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:2], "big") >> 6


@dataclasses.dataclass
class Model:
    """Shards, their waiting jobs, and what happened to them. The unit of time is a second."""

    shards: int
    capacity: int  # jobs a second of each shard
    now: int = 0
    lost: int | None = None

    def __post_init__(self) -> None:
        self.owner = [slot * self.shards // SLOTS for slot in range(SLOTS)]
        # per shard: (second, slot, number of jobs), the oldest first
        self.waiting: list[collections.deque[tuple[int, int, int]]] = [
            collections.deque() for _ in range(self.shards)
        ]
        self.outside: collections.Counter[tuple[int, int]] = (
            collections.Counter()
        )  # refused: (second, slot)
        self.accepted = [0] * self.shards
        self.refused = 0
        self.moved = 0
        self.ran = [0] * self.shards
        self.waits: list[collections.Counter[int]] = [
            collections.Counter() for _ in range(self.shards)
        ]
        self.backlog = [0] * self.shards
        self.most = [0] * self.shards

    def defer(self, slots: Iterable[int]) -> None:
        """Defer a job in each of these slots."""
        for slot, count in sorted(collections.Counter(slots).items()):
            self._accept(self.now, slot, count)

    def _accept(self, second: int, slot: int, count: int) -> None:
        shard = self.owner[slot]
        if shard == self.lost:
            self.refused += count
            self.outside[second, slot] += count
            return
        self.accepted[shard] += count
        self._add(shard, second, slot, count)

    def _add(self, shard: int, second: int, slot: int, count: int) -> None:
        self.waiting[shard].append((second, slot, count))
        self.backlog[shard] += count
        self.most[shard] = max(self.most[shard], self.backlog[shard])

    def lose(self, shard: int) -> None:
        """Stop a shard."""
        self.lost = shard

    def recover(self) -> None:
        """Start it again: what was refused is deferred again."""
        self.lost = None
        again, self.outside = self.outside, collections.Counter()
        for (second, slot), count in sorted(again.items()):
            self._accept(second, slot, count)

    def move(self, slot: int, target: int) -> int:
        """Move a slot with its waiting jobs; return how many they are."""
        source, self.owner[slot] = self.owner[slot], target
        moving = [job for job in self.waiting[source] if job[1] == slot]
        self.waiting[source] = collections.deque(
            job for job in self.waiting[source] if job[1] != slot
        )
        for second, _, count in moving:
            self.backlog[source] -= count
            self._add(target, second, slot, count)
        count = sum(count for *_, count in moving)
        self.moved += count
        return count

    def run(self) -> None:
        """Let each shard run its oldest jobs for a second."""
        for shard in range(self.shards):
            room = 0 if shard == self.lost else self.capacity
            queue = self.waiting[shard]
            while room and queue:
                second, slot, count = queue.popleft()
                now = min(count, room)
                if count > now:
                    queue.appendleft((second, slot, count - now))
                room -= now
                self.backlog[shard] -= now
                self.ran[shard] += now
                self.waits[shard][self.now - second] += now
        self.now += 1


def percentile(waits: Sequence[collections.Counter[int]], share: float) -> int:
    """Return the wait, in whole seconds, that this share of the jobs does not exceed."""
    all_waits = sum(waits, collections.Counter[int]())
    left = share * sum(all_waits.values())
    for wait in sorted(all_waits):
        left -= all_waits[wait]
        if left <= 0:
            return wait
    return 0


def simulate(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Run the scenario, and return lines of a table."""
    rng = random.Random(options.seed)
    keys = [slot_of(f"key {n}") for n in range(options.keys)]
    weights = list(itertools.accumulate((n + 1) ** -options.skew for n in range(options.keys)))
    rate = round(options.load * options.shards * options.capacity)
    model = Model(options.shards, options.capacity)
    per_slot: collections.Counter[int] = collections.Counter()
    lost_from, lost_to, move_at = (
        options.seconds // 4,
        options.seconds // 4 + options.lost_for,
        options.seconds // 2,
    )
    told = []

    def load() -> list[float]:
        shares = [0] * options.shards
        for slot, count in per_slot.items():
            shares[model.owner[slot]] += count
        return [share / max(1, model.now) / options.capacity for share in shares]

    others: list[collections.Counter[int]] = []
    caught_up = None
    lost = options.shards // 2
    for second in range(options.seconds):
        if second == lost_from:
            model.lose(lost)
        if second == lost_to:
            told.append(
                (
                    "jobs refused while it was lost",
                    f"{model.refused:,} of {rate * options.lost_for:,}",
                )
            )
            others = [w for shard, w in enumerate(model.waits) if shard != lost]
            told.append(
                (
                    "of the other shards, waits p50, p99",
                    f"{percentile(others, 0.5)} s, {percentile(others, 0.99)} s",
                )
            )
            model.recover()
        if second == move_at:
            loads = load()
            hot, cold = (
                max(range(options.shards), key=loads.__getitem__),
                min(range(options.shards), key=loads.__getitem__),
            )
            slot = max((s for s in range(SLOTS) if model.owner[s] == hot), key=per_slot.__getitem__)
            told.append(
                (
                    "most loaded shard, mean",
                    f"{max(loads):.2f}, {sum(loads) / len(loads):.2f} of a shard",
                )
            )
            jobs = model.move(slot, cold)
            told.append(
                (
                    f"slot {slot} moves",
                    f"from shard {hot} ({loads[hot]:.2f}) to {cold} ({loads[cold]:.2f}), {jobs:,} jobs",
                )
            )
            after = load()
            told.append(("then the two have", f"{after[hot]:.2f}, {after[cold]:.2f}"))
        drawn = rng.choices(keys, cum_weights=weights, k=rate)
        per_slot.update(drawn)
        model.defer(drawn)
        model.run()
        if caught_up is None and second >= lost_to and model.backlog[lost] < options.capacity:
            caught_up = second + 1 - lost_to
    told.append(
        (
            "the lost shard had caught up",
            "not in this run" if caught_up is None else f"{caught_up} s after it was back",
        )
    )
    told.append(("most jobs that waited in one shard", f"{max(model.most):,}"))
    deferred = rate * options.seconds
    rest = sum(model.backlog)
    told.append(("deferred = ran + waiting", f"{deferred:,} = {sum(model.ran):,} + {rest:,}"))
    assert deferred == sum(model.ran) + rest + sum(model.outside.values())
    return told


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--capacity", type=int, default=100, help="jobs a second of each shard")
    parser.add_argument("--load", type=float, default=0.6, help="of the capacity of all shards")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--skew", type=float, default=0.6, help="0: all keys alike; 1: Zipf's law")
    parser.add_argument("--seconds", type=int, default=400)
    parser.add_argument("--lost-for", type=int, default=30, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    for what, figure in simulate(parsed()):
        print(f"{what:36} {figure}")

#!/usr/bin/env python3
"""Jobs with several concurrency keys: how many later jobs pass one, and what reserving slots costs.

    bench/bench_reserve.py [--runs N]

First it counts the later jobs that pass a job of keys a and b while others keep both keys full. Then it drains 400 jobs
of 20 tenants, each with a limit of 1, and a shared key with limit 10; and 400 with 3 of 50 keys of limit 1. The jobs'
run times are drawn, and pass on a clock of its own: the figures do not depend on the machine. Both with several values
of the macro patience; with "never", no job reserves.
"""

from __future__ import annotations

import heapq
import json
import random
import re
from typing import Any

import psycopg
from common import arguments, bench

PATIENCE = {"1": 1, "4": 4, "never": 30_000}
MIXES = ("both keys", "both keys, few tenants", "one or both keys", "3 of 50 keys")

Connection = psycopg.Connection[tuple[Any, ...]]


def value(on: Connection, statement: str, *parameters: object) -> Any:
    """Return the one value of a statement."""
    row = on.execute(statement.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def set_patience(on: Connection, patience: int) -> None:
    """Let jobs reserve slots after so many changes of line."""
    text = value(on, "select pg_get_functiondef(oid) from pg_proc where proname = '_take_slots'")
    on.execute(re.sub(r"\d+/\* patience \*/", f"{patience}/* patience */", text).encode())


def job(*keys: tuple[str, int]) -> dict[str, Any]:
    """Return a job with these keys and limits, for defer_many."""
    limits = [{"key": key, "limit": limit} for key, limit in keys]
    return {"task": "t", "options": {"concurrency": limits}}


class Worker:
    """Claims and ends jobs."""

    def __init__(self, on: Connection) -> None:
        self.on = on
        self.id = value(on, "select queue.register_worker('w')")

    def defer(self, jobs: list[dict[str, Any]]) -> list[int]:
        """Defer jobs, and return their ids."""
        rows = self.on.execute("select queue.defer_many(%s)", [json.dumps(jobs)])
        return [id for (id,) in rows]

    def fetch(self) -> list[tuple[int, int]]:
        """Claim all that may start: ids and claims."""
        rows = self.on.execute("select id, claim from queue.fetch(%s, null, 1000)", [self.id])
        return [(id, claim) for id, claim in rows]

    def end(self, id: int, claim: int) -> None:
        """Let a job succeed."""
        outcome = {"id": id, "claim": claim, "outcome": "succeeded"}
        self.on.execute("select from queue.finish_many(%s)", [json.dumps([outcome])])


def passed(on: Connection) -> str:
    """Return how many later jobs start before one with both keys."""
    worker = Worker(on)
    worker.defer([job(("a", 1)), job(("b", 1))])
    running = worker.fetch()
    (both,) = worker.defer([job(("a", 1), ("b", 1))])
    worker.defer([job((key, 1)) for _ in range(120) for key in "ab"])
    for count in range(240):
        worker.end(*running.pop(0))  # the oldest: of the two keys in turn
        running += worker.fetch()
        if both in (id for id, _ in running):
            return str(count)
    return "all 240"


def drain(on: Connection, mix: str, seed: int) -> float:
    """Return how long 400 jobs take."""
    draw = random.Random(seed)
    jobs = []
    for _ in range(400):
        if mix == "3 of 50 keys":
            jobs.append(job(*((f"k{n}", 1) for n in draw.sample(range(50), 3))))
            continue
        few = min(int(draw.expovariate(1) * 6), 19)
        tenant = (f"t{draw.randrange(20) if mix == 'both keys' else few}", 1)
        which = draw.choice(["both", "shared", "tenant"]) if mix == "one or both keys" else "both"
        keys = {"both": [("g", 10), tenant], "shared": [("g", 10)], "tenant": [tenant]}[which]
        jobs.append(job(*keys))
    worker = Worker(on)
    length: dict[int, float] = {}
    now = 0.0
    running: list[tuple[float, int, int]] = []
    left = [jobs[first : first + 100] for first in range(0, 400, 100)]
    while True:
        if left and len(running) < 10:
            for id in worker.defer(left.pop(0)):
                length[id] = draw.expovariate(1 if draw.random() < 0.9 else 0.1)
        for id, claim in worker.fetch():
            heapq.heappush(running, (now + length[id], id, claim))
        if not running:
            return now
        now, id, claim = heapq.heappop(running)
        worker.end(id, claim)


def main() -> None:
    """Run it; each run of a drain draws other jobs."""
    options = arguments(__doc__, runs=4).parse_args()
    with bench(options) as on:
        print("reserves after | later jobs that pass | length of each drain, to that without")
        without: dict[str, list[float]] = {}
        for name, patience in reversed(PATIENCE.items()):
            with on.fresh("ours") as database, on.connect(database) as connection:
                set_patience(connection, patience)
                count = passed(connection)
            shown = []
            for mix in MIXES:
                with on.fresh("ours") as database, on.connect(database) as connection:
                    set_patience(connection, patience)
                    found = [drain(connection, mix, seed) for seed in range(options.runs)]
                base = without.setdefault(mix, found)
                ratios = [f"{a / b:.3f}" for a, b in zip(found, base, strict=True)]
                shown.append(f"{mix}: {' '.join(ratios)}")
            print(f"{name:>14} | {count:>20} | {'; '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()

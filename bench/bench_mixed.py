#!/usr/bin/env python3
"""What shares and limits cost: a drain with them against one without.

    bench/bench_shares.py [--runs N] [--jobs N] [--only TEXT] [--check]

Jobs are claimed and finished in batches of five by finish_and_fetch. Each side drains its own fresh
database: with 100,000 shares, one key with limit 20 (1 and 4 clients), 1,000 locks; and none of these.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from typing import LiteralString

from common import Bench, Case, alternate, arguments, bench, create_database

FILL: LiteralString = """
select count(*) from queue.defer_many((
  select jsonb_agg(jsonb_build_object('task', 'noop') || {more})
  from generate_series(%(first)s::int, %(last)s::int) n))
"""
KINDS: dict[str, LiteralString] = {
    "plain": "'{}'",
    "100,000 shares": "jsonb_build_object('options', jsonb_build_object('share', 's' || n %% 100000))",
    "a key with limit 20": "jsonb_build_object('concurrency_key', 'k', 'concurrency_limit', 20)",
    "half": "case when n %% 2 = 0 then jsonb_build_object('concurrency_key', 'k', 'concurrency_limit', 20) else '{}' end",
    "1,000 locks": "jsonb_build_object('lock', 'l' || n %% 1000)",
}
NEXT: LiteralString = """
select id, claim from queue.finish_and_fetch(%s, %s::jsonb, null, 5)
"""


def template(on: Bench, kind: str, jobs: int) -> str:
    """Return a database in which so many jobs of a kind are ready."""
    name = f"{'_'.join(kind.replace(',', '').split())}_{jobs}"
    with on.connect("postgres") as connection:
        if connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone():
            return name
    create_database(on.server, name, "ours")
    with on.connect(name) as connection:
        connection.execute("set synchronous_commit = off")
        statement = FILL.replace("{more}", KINDS[kind]).encode()
        for first in range(1, jobs + 1, 5000):
            connection.execute(statement, {"first": first, "last": min(first + 4999, jobs)})
        while connection.execute("select admitted from queue.tick()").fetchone() != (0,):
            pass
    on.settle(name)
    return name


def work(on: Bench, database: str, jobs: int) -> None:
    """Claim and finish so many jobs, five at a time."""
    done = 0
    outcomes = "[]"
    with on.connect(database) as connection:
        connection.execute("set synchronous_commit = off")
        row = connection.execute("select queue.register_worker('w')").fetchone()
        assert row is not None
        while done < jobs:
            rows = connection.execute(NEXT, [row[0], outcomes], prepare=True).fetchall()
            done += len(rows)
            outcomes = json.dumps(
                [{"id": id, "claim": claim, "outcome": "succeeded"} for id, claim in rows]
            )
        connection.execute("select count(*) from queue.finish_many(%s)", [outcomes])


def drain(on: Bench, database: str, jobs: int, clients: int) -> float:
    """Return the jobs per second of a drain by so many clients."""
    each = jobs // clients
    with on.fresh(database) as copy:
        threads = [threading.Thread(target=work, args=(on, copy, each)) for _ in range(clients)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return each * clients / (time.perf_counter() - begun)


@dataclasses.dataclass
class Drain:
    """A drain of some of the jobs that are ready, and the ratio that it must reach."""

    kind: str
    ready: int
    clients: int
    limit: float

    def case(self, on: Bench, jobs: int) -> Case:
        return Case(
            f"{self.kind}, {self.clients} client{'s' * (self.clients > 1)}",
            lambda: drain(on, template(on, self.kind, self.ready), jobs, self.clients),
            lambda: drain(on, template(on, "plain", self.ready), jobs, self.clients),
            self.limit,
        )


def main() -> None:
    parser = arguments(__doc__, runs=5)
    parser.add_argument("--jobs", type=int, default=5000, help="of each run (5,000)")
    options = parser.parse_args()
    with bench(options) as on:
        n = options.jobs
        drains = [
            Drain("100,000 shares", 100_000, 1, 1 / 1.2),
            Drain("a key with limit 20", 2 * n, 1, 0.6),
            Drain("a key with limit 20", 2 * n, 4, 0.6),
            Drain("half", 2 * n, 1, 0.65), Drain("half", 2 * n, 4, 0.65),
            Drain("1,000 locks", 2 * n, 1, 0.65),
            Drain("1,000 locks", 2 * n, 4, 0.65),
        ]
        cases = [each.case(on, n) for each in drains]
        alternate(cases, options, "with", "without")


if __name__ == "__main__":
    main()

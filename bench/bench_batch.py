#!/usr/bin/env python3
"""What batches are worth: a drain of no-op jobs, singly and in batches of 100, in turn.

    bench/bench_batch.py [--runs N] [--only TEXT] [--jobs N]

Prints the calls of the handler, the fetches that found jobs, the worker's CPU time a job, and jobs
per second with their ratio to the single run beside them: only ratios mean something on a machine
that is busy. `insert`: the handler writes a row for each job, with one statement a call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from typing import Any

from bench_prefetch import Counter
from common import Bench, arguments, bench, defer_noops
from psycopg_pool import AsyncConnectionPool

from pgdefer import App, BatchJob, Worker, current_job

KINDS = ("async", "sync", "insert")
INSERT = "insert into written (id) select unnest(%s::bigint[])"
Batch = list[BatchJob[Any]]


@dataclasses.dataclass
class Run:
    rate: float
    cpu: float
    fetches: int
    calls: int


class Handlers:
    """Handlers that count their calls."""

    def __init__(self, app: App, kind: str, size: int, pool: AsyncConnectionPool[Any]) -> None:
        self.calls = 0
        self._pool = pool
        options: dict[str, Any] = {"name": "noop"} | ({"batch": size} if size > 1 else {})
        functions = {
            "async": (self.single_async, self.batch_async),
            "sync": (self.single, self.batch),
            "insert": (self.insert_one, self.insert),
        }
        app.task(**options)(functions[kind][size > 1])

    def single(self, n: int) -> None:  # noqa: ARG002 (every job has an argument)
        self.calls += 1

    async def single_async(self, n: int) -> None:  # noqa: ARG002
        self.calls += 1

    async def insert_one(self, n: int) -> None:  # noqa: ARG002
        await self._insert([current_job().id])

    def batch(self, jobs: Batch) -> None:  # noqa: ARG002
        self.calls += 1

    async def batch_async(self, jobs: Batch) -> None:  # noqa: ARG002
        self.calls += 1

    async def insert(self, jobs: Batch) -> None:
        await self._insert([job.id for job in jobs])

    async def _insert(self, ids: list[int]) -> None:
        self.calls += 1
        async with self._pool.connection() as connection:
            await connection.execute(INSERT, [ids])


async def work(app: App, dsn: str, kind: str, size: int) -> int:
    """Run a worker until nothing is left; return how many calls there were."""
    async with AsyncConnectionPool(dsn, min_size=1, max_size=20, open=False) as pool:
        handlers = Handlers(app, kind, size, pool)
        await Worker(app, drain=True).run_async()
    return handlers.calls


def drain(on: Bench, counter: Counter, kind: str, size: int, jobs: int) -> Run:
    """Run a worker on a fresh database."""
    with on.fresh("ours") as database, on.connect(database) as connection:
        dsn = on.server.dsn(database)
        app = App(dsn)
        connection.execute("create table written (id bigint)")
        defer_noops(connection, jobs)
        on.settle(database)
        counter.fetches = 0
        cpu = time.process_time()
        calls = asyncio.run(work(app, dsn, kind, size))
        cpu = time.process_time() - cpu
        row = connection.execute(
            "select extract(epoch from max(f.finished_at) - min(f.started_at))::float8,"
            " count(*) filter (where f.state = 'succeeded') from queue.finished f"
        ).fetchone()
        app.close()
    assert row is not None
    assert row[1] == jobs, row
    return Run(jobs / row[0], cpu / jobs * 1e6, counter.fetches, calls)


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--jobs", type=int, default=20_000, help="in thousands")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if options.only in kind]
    counter = Counter()
    counter.install()
    found: dict[tuple[str, int], list[Run]] = {}
    with bench(options) as on:
        for _ in range(options.runs):
            for kind in kinds:
                for size in (1, 100):
                    run = drain(on, counter, kind, size, options.jobs)
                    found.setdefault((kind, size), []).append(run)
    print(f"{'handler':<20}{'calls':>8}{'fetches':>8}{'CPU µs':>8}  jobs/s (least - most)")
    for (kind, size), runs in found.items():
        rates = sorted(run.rate for run in runs)
        pairs = zip(runs, found[kind, 1], strict=True)
        ratios = sorted(run.rate / single.rate for run, single in pairs)
        print(
            f"{f'{kind}, {size}':<20}"
            f"{statistics.median(run.calls for run in runs):>8.0f}"
            f"{statistics.median(run.fetches for run in runs):>8.0f}"
            f"{statistics.median(run.cpu for run in runs):>8.1f}"
            f"  {statistics.median(rates):.0f} ({rates[0]:.0f} - {rates[-1]:.0f}), "
            f"{statistics.median(ratios):.2f} times ({ratios[0]:.2f} - {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()

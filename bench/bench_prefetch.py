#!/usr/bin/env python3
"""What claims ahead of need are worth: a drain of short jobs, with them and without, in turn.

    bench/bench_prefetch.py [--runs N] [--only TEXT] [--jobs N]

Prints the fetches that found jobs and the worker's CPU time, which a busy machine changes little,
and jobs per second, of which only the ratios of neighbouring runs mean something then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from typing import Any

from common import Bench, arguments, bench, defer_noops

from pgdefer import App, Worker
from pgdefer.database import sql
from pgdefer.database.connection import Connection

KINDS = ("async", "sync", "sleep 1 ms")
SETTINGS: tuple[dict[str, int], ...] = (
    {},
    {"prefetch": 0},
    {"concurrency": 200},
    {"concurrency": 200, "prefetch": 0},
)


@dataclasses.dataclass
class Run:
    rate: float
    cpu: float
    fetches: int
    released: int


class Counter:
    """Counts the fetches that found jobs."""

    def __init__(self) -> None:
        self.fetches = 0
        self._call = Connection.call

    def install(self) -> None:
        async def call(
            connection: Connection, statement: sql.Statement, **parameters: object
        ) -> list[tuple[Any, ...]]:
            rows = await self._call(connection, statement, **parameters)
            self.fetches += bool(rows) and "max_jobs" in parameters
            return rows

        Connection.call = call  # type: ignore[assignment, method-assign]


def define(app: App, kind: str) -> None:
    """Define the task."""
    if kind == "sync":

        @app.task(name="noop")
        def in_thread(n: int) -> None: ...

    else:

        @app.task(name="noop")
        async def in_loop(n: int) -> None:  # noqa: ARG001 (every job has an argument)
            if kind != "async":
                await asyncio.sleep(0.001)


def drain(on: Bench, counter: Counter, kind: str, options: dict[str, Any], jobs: int) -> Run:
    """Run a worker until nothing is left."""
    with on.fresh("ours") as database, on.connect(database) as connection:
        app = App(on.server.dsn(database))
        define(app, kind)
        defer_noops(connection, jobs)
        on.settle(database)
        counter.fetches = 0
        cpu = time.process_time()
        asyncio.run(Worker(app, drain=True, **options).run_async())
        cpu = time.process_time() - cpu
        row = connection.execute(
            "select extract(epoch from max(f.finished_at) - min(f.started_at))::float8,"
            " (select count(*) from queue.attempts) from queue.finished f"
        ).fetchone()
        app.close()
    assert row is not None
    return Run(jobs / row[0], cpu / jobs * 1e6, counter.fetches, row[1])


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
                for n, setting in enumerate(SETTINGS):
                    run = drain(on, counter, kind, setting, options.jobs)
                    found.setdefault((kind, n), []).append(run)
    print(f"{'handler, setting':<44}{'fetches':>8}{'CPU µs':>8}{'given back':>11}  jobs/s")
    for (kind, n), runs in found.items():
        said = ", ".join(f"{name}={value}" for name, value in SETTINGS[n].items()) or "default"
        rates = sorted(run.rate for run in runs)
        print(
            f"{f'{kind}, {said}':<44}"
            f"{statistics.median(run.fetches for run in runs):>8.0f}"
            f"{statistics.median(run.cpu for run in runs):>8.1f}"
            f"{statistics.median(run.released for run in runs):>11.0f}"
            f"  {statistics.median(rates):.0f} ({rates[0]:.0f} - {rates[-1]:.0f})"
        )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The time from defer to start on an idle worker.

    bench/bench_latency.py [--runs N] [--jobs N] [--rate N] [--pin] [--check]

One process defers through `task.defer`, at a steady rate, another is the worker. The time begins
before `defer` is called, its round trip and commit included, and ends in the handler.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from common import Bench, Report, arguments, bench, percentile

from pgdefer import App

WORKER = Path(__file__).resolve().parent / "workers" / "latency_pgdefer.py"
P50, P99 = 2.5, 8.0
WARM_UP = 10


def run(on: Bench, jobs: int, rate: float) -> list[float]:
    """Return how long each job waited, in milliseconds."""
    with on.fresh("ours") as database:
        dsn = on.server.dsn(database)
        command = [*on.client_prefix(), sys.executable, WORKER, dsn, str(jobs + WARM_UP)]
        app = App(dsn)

        @app.task(name="stamp")
        async def stamp(at: float) -> None:
            pass

        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker, app:
            wait_until_asleep(on, database)
            begun = time.perf_counter()
            for number in range(jobs + WARM_UP):
                time.sleep(max(0.0, begun + number / rate - time.perf_counter()))
                stamp.defer(at=time.time())
            output, _ = worker.communicate(timeout=60)
    if worker.returncode:
        sys.exit("the worker failed")
    return [1000 * wait for wait in json.loads(output)[WARM_UP:]]


def wait_until_asleep(on: Bench, database: str) -> None:
    """Wait until the worker holds the latch: it listens and has nothing to do."""
    with on.connect(database) as connection:
        for _ in range(3000):
            row = connection.execute(
                "select exists (select from pg_locks l join pg_database d on d.oid = l.database"
                " where l.locktype = 'advisory' and l.granted and d.datname = current_database())"
            ).fetchone()
            if row == (True,):
                return
            time.sleep(0.01)
    sys.exit("the worker did not go to sleep")


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--jobs", type=int, default=200, help="of each run (200)")
    parser.add_argument("--rate", type=float, default=20.0, help="jobs per second (20)")
    options = parser.parse_args()
    report = Report()
    waits: list[float] = []
    with bench(options) as on:
        for number in range(1, options.runs + 1):
            found = run(on, options.jobs, options.rate)
            waits += found
            print(f"run {number}: {describe(found)}", flush=True)
    print(f"all:   {describe(waits)}\n")
    report.below("from defer to start, p50", percentile(waits, 0.5), P50, "ms")
    report.below("from defer to start, p99", percentile(waits, 0.99), P99, "ms")
    report.end(options)


def describe(waits: list[float]) -> str:
    parts = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    return "  ".join(f"{name} {percentile(waits, part):6.2f} ms" for name, part in parts)


if __name__ == "__main__":
    main()

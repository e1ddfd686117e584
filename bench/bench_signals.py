#!/usr/bin/env python3
"""How soon a handler goes on after a signal, also while 100,000 jobs wait for theirs.

    bench/bench_signals.py [--runs N] [--waiting N] [--samples N] [--check]

One client, and one worker that sleeps: in turn, a waiting job is signalled, and a new job is deferred.
Each figure is from before the call to the handler: to its first line, or to the line after the wait.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from common import Bench, Report, arguments, bench, percentile

WORKER = Path(__file__).resolve().parent / "workers" / "signals_pgdefer.py"
# The signal's p50; and beside a new job where nothing waits.
LIMIT_MS, LIMIT = 5.0, 1.2
CALLS = {
    "signal": "select queue.signal(%s, 's', jsonb_build_object('at', %s::float8))",
    "defer": "select queue.defer('stamp', jsonb_build_object('at', %s::float8))",
}


def suspend(client: psycopg.Connection[tuple[object, ...]], waiting: int) -> None:
    """Make so many jobs wait for a signal."""
    for first in range(0, waiting, 1000):
        calls = json.dumps([{"task": "waits"}] * min(1000, waiting - first))
        client.execute("select count(*) from queue.defer_many(%s)", [calls])
    worker = client.execute("select queue.register_worker('suspends')").fetchone()
    wait = "select queue.wait(f.id, f.claim, 'w', 's') from queue.fetch(%s, null, 1000) f"
    while client.execute(wait, worker).fetchall():
        pass
    client.execute("select queue.deregister_worker(%s)", worker)
    client.execute("select queue.tick()")


def run(on: Bench, waiting: int, samples: int) -> dict[str, list[float]]:
    """Return the milliseconds of each kind of call."""
    found: dict[str, list[float]] = {kind: [] for kind in CALLS}
    with (
        on.fresh("ours") as database,
        on.connect(database) as client,
        tempfile.NamedTemporaryFile() as file,
    ):
        suspend(client, waiting + samples)
        on.settle(database)
        command = [sys.executable, WORKER, on.server.dsn(database), file.name]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as worker:
            while client.execute("select from queue.workers where name <> 'suspends'").rowcount < 1:
                time.sleep(0.1)
            time.sleep(2)
            for n in range(samples):
                for kind, call in CALLS.items():
                    time.sleep(0.01)
                    id = 1 + n * (1 + waiting // samples)
                    client.execute(
                        call.encode(), [id, time.time()] if kind == "signal" else [time.time()]
                    )
                    lines = sum(map(len, found.values())) + 1
                    while len(written := Path(file.name).read_text().splitlines()) < lines:
                        time.sleep(0.001)
                    found[kind].append(1000 * float(written[-1]))
            worker.terminate()
    return found


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--waiting", type=int, default=100_000, help="jobs (100000)")
    parser.add_argument("--samples", type=int, default=200, help="of each kind in a run (200)")
    options = parser.parse_args()
    found: dict[tuple[int, str], list[float]] = {}
    with bench(options) as on:
        for _ in range(options.runs):
            for waiting in (0, options.waiting):
                for kind, times in run(on, waiting, options.samples).items():
                    found.setdefault((waiting, kind), []).extend(times)
    for (waiting, kind), times in found.items():
        p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
        print(f"{kind:<8}{waiting:>8,} jobs wait    p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    print()
    report = Report()
    p50 = percentile(found[options.waiting, "signal"], 0.5)
    report.below("p50 from the signal", p50, LIMIT_MS, "ms")
    idle = percentile(found[0, "defer"], 0.5)
    report.below("that : p50 of a new job, none waits", p50 / idle, LIMIT, "times")
    report.end(options)


if __name__ == "__main__":
    main()

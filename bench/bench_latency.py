#!/usr/bin/env python3
"""Where the time from `defer` to the start goes, for single jobs and one idle worker.

    bench/bench_latency.py [--runs N] [--samples N]

Each moment is the time since the call began, in ms. Beside it, in turn: the same with nothing but an INSERT
and a NOTIFY in one transaction, and a listening session; and what calls take alone, in sessions that were idle
before: `select 1`, `defer` and `fetch`, also without waiting for the disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from common import Bench, arguments, bench, percentile

WORKER = Path(__file__).resolve().parent / "workers" / "latency_pgdefer.py"
BARE = (
    "with i as (insert into q (args) values ('{}') returning id) select pg_notify('q', '') from i"
)
PAUSE = 0.04  # s between jobs; the worker sleeps by then
Moments = dict[str, list[float]]
Client = psycopg.Connection[Any]


def note(found: Moments, begun: float, moments: dict[str, float]) -> None:
    """Add how long after `begun` each moment was, in ms."""
    for name, at in moments.items():
        found.setdefault(name, []).append((at - begun) * 1e3)


def timed(client: Client, call: str, *parameters: object) -> tuple[float, float]:
    """Make a call after a pause; return when it began and ended."""
    time.sleep(PAUSE)
    begun = time.time()
    client.execute(call.encode(), parameters or None, prepare=True)
    return begun, time.time()


def ours(on: Bench, found: Moments, samples: int) -> None:
    """Defer jobs, one at a time, and let a worker say when it did what."""
    with (
        on.fresh("ours") as database,
        on.connect(database) as client,
        tempfile.NamedTemporaryFile() as file,
    ):
        command = [sys.executable, WORKER, on.server.dsn(database), file.name]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as worker:
            while client.execute("select from queue.workers").rowcount < 1:
                time.sleep(0.1)
            written = Path(file.name)
            for n in range(samples + 20):
                begun, ended = timed(client, "select queue.defer('stamp')")
                while len(lines := written.read_text().splitlines()) <= n:
                    time.sleep(0.001)
                if n >= 20:  # the sessions' first calls compile and plan
                    note(found, begun, {"defer has returned": ended, **json.loads(lines[-1])})
            worker.terminate()


def bare(on: Bench, found: Moments, samples: int) -> None:
    """Insert rows, one at a time, and let a listener say when it heard of them."""
    listener = """
import json, psycopg, sys, time
with psycopg.connect(sys.argv[1], autocommit=True) as connection:
    connection.execute("listen q")
    print(flush=True)
    for _ in connection.notifies():
        print(time.time(), flush=True)
"""
    with on.fresh("bare") as database, on.connect(database) as client:
        command = [sys.executable, "-c", listener, on.server.dsn(database)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            for _ in range(samples):
                begun, ended = timed(client, BARE)
                heard = float(process.stdout.readline())
                note(found, begun, {"the INSERT has returned": ended, "heard": heard})
            process.terminate()


def calls(on: Bench, found: Moments, samples: int) -> None:
    """Make the two calls alone, with and without waiting for the disk."""
    with (
        on.fresh("ours") as database,
        on.connect(database) as client,
        on.connect(database) as other,
    ):
        row = client.execute("select queue.register_worker('w')").fetchone()
        assert row is not None
        for n in range(samples + 20):
            for sync, said in (("on", ""), ("off", ", no sync")):
                for session in (client, other):
                    session.execute(f"set synchronous_commit = {sync}".encode())
                moments = {
                    f"defer{said}": timed(other, "select queue.defer('stamp')"),
                    f"fetch{said}": timed(client, "select * from queue.fetch(%s)", *row),
                    "select 1": timed(client, "select 1"),
                }
                for name, (begun, ended) in moments.items():
                    if n >= 20:
                        note(found, begun, {name: ended})


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--samples", type=int, default=200, help="of each kind in a run (200)")
    options = parser.parse_args()
    kinds: dict[str, Callable[[Bench, Moments, int], None]] = {
        "pgdefer": ours,
        "bare": bare,
        "calls alone": calls,
    }
    found: dict[str, Moments] = {kind: {} for kind in kinds}
    with bench(options) as on:
        for _ in range(options.runs):
            for kind, run in kinds.items():
                run(on, found[kind], options.samples)
    for kind, moments in found.items():
        print(f"{kind:<26}  p50    p99 ms")
        for name, times in sorted(moments.items(), key=lambda each: percentile(each[1], 0.5)):
            print(f"  {name:<24}{percentile(times, 0.5):>5.2f}{percentile(times, 0.99):>7.2f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""One worker process for many databases, beside one for a single database with the same jobs.

    bench/bench_many.py [--runs N] [--databases N] [--jobs N] [--seconds N] [--pin] [--check]

Both workers serve all runs, with the default concurrency, on one server that syncs to disk; one of
them is idle while the other works. First each idles for --seconds. Then single jobs go to ten of
the many databases for --seconds, and again while another is stopped. Then both run no-op
coroutines in turn, spread evenly over the databases, which become due together: the time is from
the start of the first one to the end of the last in the databases. The first turn of each is left
out: the sessions load their catalogs and make their plans in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import Bench, Report, arguments, bench

WORKER = Path(__file__).resolve().parent / "workers" / "many_pgdefer.py"


class Side:
    """A worker process."""

    def __init__(self, on: Bench, dsns: list[str], options: argparse.Namespace) -> None:
        command = [sys.executable, str(WORKER), str(options.jobs), str(options.seconds)]
        self._process = subprocess.Popen(
            [*on.client_prefix(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.up = self.tell(json.dumps(dsns))["up"]
        self.idle = self.tell("idle")
        self.drains: list[dict[str, float]] = []

    def tell(self, line: str) -> Any:
        """Send a line, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit("the worker failed")
        return json.loads(answer)

    def drain(self) -> None:
        self.drains.append(self.tell("drain"))

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = arguments(__doc__, runs=5)
    parser.add_argument("--databases", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    # The databases' own pages fit, as those of the single one do.
    settings = {"max_connections": str(2 * options.databases + 50), "shared_buffers": "3GB"}
    with bench(options, settings) as on, contextlib.ExitStack() as stack:
        on.settle("ours")
        dsns = [
            on.server.dsn(stack.enter_context(on.fresh("ours")))
            for _ in range(options.databases + 1)
        ]
        many, one = Side(on, dsns[1:], options), Side(on, dsns[:1], options)
        singles = [many.tell("single") for _ in range(options.runs)]
        for _ in range(options.runs + 1):
            many.drain()
            one.drain()
        many.end()
        one.end()
    report = Report()
    report.heading(f"{options.databases} databases", "one")
    rates = [[found["rate"] for found in side.drains] for side in (many, one)]
    print(f"the first turn: {rates[0][0] / 1000:.1f}k/s and {rates[1][0] / 1000:.1f}k/s, left out")
    report.compare(f"{options.jobs:,} no-op jobs", rates[0][1:], rates[1][1:], 0.8)
    for name, side in (("many", many), ("one", one)):
        print(
            f"{name}: registered after {side.up:.1f} s, {side.idle['memory'] / 2**20:.0f} MB, "
            f"{100 * side.idle['idle']:.1f} % of a core idle"
        )
    report_latencies(report, singles)
    report.below("connections for each database, idle", many.idle["connections"], 1.0, "")
    busiest = max(found["connections"] for found in many.drains)
    report.below("connections for each database, busy", busiest, 1.5, "")
    report.below("idle, a core", 100 * many.idle["idle"], 5.0, "%")
    report.end(options)


def report_latencies(report: Report, runs: list[list[dict[str, float]]]) -> None:
    """Print the times from defer to start, with all databases, and with one stopped."""
    medians = []
    for number, name in enumerate(("all databases up", "one stopped")):
        parts = {
            part: statistics.median(found[number][part] for found in runs)
            for part in ("0.5", "0.95", "0.99")
        }
        medians.append(parts["0.5"])
        told = ", ".join(f"p{100 * float(part):.0f} {ms:.1f} ms" for part, ms in parts.items())
        print(f"single jobs, {name}: {told}")
    report.below("median with one stopped, of all up", medians[1] / medians[0], 1.25, "")


if __name__ == "__main__":
    main()

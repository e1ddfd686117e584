#!/usr/bin/env python3
"""One worker process for many databases, beside one for a single database with the same jobs.

    bench/bench_many.py [--runs N] [--databases N] [--jobs N] [--seconds N] [--pin] [--check]

Both sides run in turn on one server that syncs to disk, each run in a process of its own, with the
default concurrency. The many databases serve all runs; the single one is new in each. First the
workers idle for --seconds. Then single jobs go to ten of the many for --seconds, and again while
another is stopped. Last come the no-op coroutines, spread evenly, which become due together: the
time is from the start of the first one to the end of the last in the databases.
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


def run(on: Bench, dsns: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return what the worker prints, and its rate."""
    done = subprocess.run(
        [*on.client_prefix(), sys.executable, WORKER, str(options.jobs), str(options.seconds)],
        input="\n".join(dsns),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"the worker failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["rate"] = found["jobs"] / (found["ended"] - found["begun"])
    return found


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--databases", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=40_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    settings = {"max_connections": str(2 * options.databases + 50), "shared_buffers": "512MB"}
    many, one = [], []
    with bench(options, settings) as on, contextlib.ExitStack() as stack:
        on.settle("ours")
        dsns = [
            on.server.dsn(stack.enter_context(on.fresh("ours"))) for _ in range(options.databases)
        ]
        for _ in range(options.runs):
            many.append(run(on, dsns, options))
            with on.fresh("ours") as single:
                one.append(run(on, [on.server.dsn(single)], options))
    report = Report()
    report.heading(f"{options.databases} databases", "one")
    rates = [[found["rate"] for found in side] for side in (many, one)]
    report.compare(f"{options.jobs:,} no-op jobs", *rates, 0.8)
    for name, side in (("many", many), ("one", one)):
        middle = {
            key: statistics.median(found[key] for found in side)
            for key in ("up", "idle", "connections", "busy_connections", "memory")
        }
        print(
            f"{name}: registered after {middle['up']:.1f} s, {middle['connections']:.0f} connections "
            f"idle, {middle['busy_connections']:.0f} busy, {middle['memory'] / 2**20:.0f} MB, "
            f"{100 * middle['idle']:.1f} % of a core idle"
        )
    report_latencies(report, many)
    most = max(found["connections"] for found in many) / options.databases
    report.below("connections for each database, idle", most, 1.0, "")
    busiest = max(found["busy_connections"] for found in many) / options.databases
    report.below("connections for each database, busy", busiest, 1.5, "")
    report.below("idle, a core", max(100 * found["idle"] for found in many), 5.0, "%")
    report.end(options)


def report_latencies(report: Report, runs: list[dict[str, Any]]) -> None:
    """Print the times from defer to start, with all databases, and with one stopped."""
    medians = []
    for number, name in enumerate(("all databases up", "one stopped")):
        parts = {
            part: statistics.median(found["latencies"][number][part] for found in runs)
            for part in ("0.5", "0.95", "0.99")
        }
        medians.append(parts["0.5"])
        told = ", ".join(f"p{100 * float(part):.0f} {ms:.1f} ms" for part, ms in parts.items())
        print(f"single jobs, {name}: {told}")
    report.below("median with one stopped, of all up", medians[1] / medians[0], 1.25, "")


if __name__ == "__main__":
    main()

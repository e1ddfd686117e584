#!/usr/bin/env python3
"""What a job costs while many workers idle: commits, CPU, and from defer to start.

    bench/bench_light_load.py [--runs N] [--processes 1,8,24] [--rate N] [--seconds N] [--beside FOLDER]

One session defers async no-ops at a steady rate; rate 0: what idle workers cost. `--beside`: another
checkout, built, that is measured in turn with this one. Every figure but the ms is a count of the
server's, or CPU time, over the same seconds; the first seconds, while workers start, are not counted.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from common import ROOT, Bench, arguments, bench, cpu, percentile, processes_of

WORKERS = Path(__file__).resolve().parent / "workers"


@dataclasses.dataclass
class Run:
    """What a run has found, a second."""

    jobs: float
    commits: float
    server: float
    workers: float
    waits: list[float]


def run(on: Bench, tree: Path, processes: int, rate: float, seconds: float) -> Run:
    """Measure one tree's workers."""
    server = on.server.status().pid
    assert server is not None
    name = "run"
    with on.connect("postgres") as postgres:
        postgres.execute(f"create database {name}".encode())
    dsn = on.server.dsn(name)
    with (
        tempfile.NamedTemporaryFile() as file,
        psycopg.connect(dsn, autocommit=True) as client,
    ):
        client.execute((tree / "build" / "pgdefer.sql").read_bytes())
        client.execute("select queue.register_task('stamp', '{}')")
        command = [sys.executable, WORKERS / "idle_pgdefer.py", dsn, str(processes), file.name]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(tree / "python")},
        ) as launcher:
            assert launcher.stdout is not None
            workers = [int(pid) for pid in launcher.stdout.readline().split()]
            while client.execute("select count(*) from queue.workers").fetchone() != (processes,):
                time.sleep(0.2)
            time.sleep(2 + processes / 10)
            commits = "select xact_commit from pg_stat_database where datname = current_database()"

            def counted() -> tuple[int, float, float]:
                row = client.execute(commits).fetchone()
                assert row is not None
                return row[0], cpu(processes_of(server)), cpu(workers)

            produce(client, 2, rate)
            before, skip = counted(), Path(file.name).read_bytes().count(b"\n")
            begun = time.monotonic()
            jobs = produce(client, seconds, rate)
            after, took = counted(), time.monotonic() - begun
            launcher.communicate()
        waits = [1000 * float(line) for line in Path(file.name).read_text().split()][skip:]
    with on.connect("postgres") as postgres:
        postgres.execute(f"drop database {name} with (force)".encode())
    each = [(new - old) / took for new, old in zip(after, before, strict=True)]
    return Run(jobs / took, *each, waits)


def produce(client: psycopg.Connection[tuple[object, ...]], seconds: float, rate: float) -> int:
    """Defer at a steady rate; return how many."""
    begun, number = time.monotonic(), 0
    while time.monotonic() < begun + seconds:
        if rate:
            client.execute(
                "select queue.defer('stamp', jsonb_build_object('at', %s::float8))", (time.time(),)
            )
            number += 1
        time.sleep(max(0.0, begun + number / rate - time.monotonic()) if rate else seconds)
    return number


def main() -> None:
    parser = arguments(__doc__, runs=1)
    parser.add_argument("--processes", default="1,8,24")
    parser.add_argument("--rate", type=float, default=20.0, help="jobs per second (20)")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--beside", type=Path, help="the folder of another checkout, built")
    options = parser.parse_args()
    trees = [ROOT, *([options.beside] if options.beside else [])]
    with bench(options, {"max_connections": "400", "shared_buffers": "128MB"}) as on:
        for processes in map(int, options.processes.split(",")):
            found: dict[Path, list[Run]] = {tree: [] for tree in trees}
            for _ in range(options.runs):
                for tree, runs in found.items():
                    runs.append(run(on, tree, processes, options.rate, options.seconds))
            for tree, runs in found.items():
                print(f"{processes:>4} processes, {tree.name:<10} {describe(runs)}", flush=True)


def describe(runs: list[Run]) -> str:
    """Return the medians of some runs."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    commits = median([run.commits for run in runs])
    line = f"commits {commits:6.1f}/s"
    if runs[0].jobs:
        line += f", {median([run.commits / run.jobs for run in runs]):5.1f} a job"
    line += f"; server {median([run.server for run in runs]):6.1%}"
    line += f", workers {median([run.workers for run in runs]):6.1%}"
    if waits := [wait for run in runs for wait in run.waits]:
        line += f"; p50 {percentile(waits, 0.5):.1f}, p99 {percentile(waits, 0.99):.1f} ms"
    return line


if __name__ == "__main__":
    main()

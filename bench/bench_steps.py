#!/usr/bin/env python3
"""How many durable steps a second one process runs, beside DBOS and Absurd.

    bench/bench_steps.py [--runs N] [--only TEXT] [--jobs N] [--steps N] [--pin] [--check]

All run in turn on one server that syncs to disk, each run in a database and a process of its own: async
handlers, each with steps that return a number and are stored before the next one begins. The time
is from the start of the first handler to the end of the last. The others are installed in a virtual
environment of this benchmark, .tools/bench-steps-venv, in the versions of
workers/steps-requirements.txt.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys

from common import ROOT, Bench, Report, arguments, bench, spread
from peers import WORKERS, install_python

REQUIREMENTS = WORKERS / "steps-requirements.txt"
VENV = ROOT / ".tools" / "bench-steps-venv"
# Beside the best setting of the other.
LIMIT = 3.0


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a system, and how many jobs it runs at once."""

    system: str
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.system}, concurrency {self.concurrency}"


PROCESSES = [
    Process(system, concurrency)
    for system in ("pgdefer", "dbos", "absurd")
    for concurrency in (1, 10, 50)
]


def run(on: Bench, process: Process, jobs: int, steps: int) -> float:
    """Return steps per second."""
    ours = process.system == "pgdefer"
    with on.fresh("ours" if ours else "template1") as database:
        numbers = (jobs, steps, process.concurrency)
        done = subprocess.run(
            [
                *on.client_prefix(),
                sys.executable if ours else VENV / "bin" / "python",
                WORKERS / f"steps_{process.system}.py",
                *(on.server.dsn(database), *map(str, numbers)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{process.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return jobs * steps / float(found["ended"] - found["begun"])


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    processes = [process for process in PROCESSES if options.only in process.name]
    if any(process.system != "pgdefer" for process in processes):
        install_python(VENV, REQUIREMENTS)
    rates: dict[Process, list[float]] = {process: [] for process in processes}
    with bench(options) as on:
        for _ in range(options.runs):
            for process in processes:
                rates[process].append(run(on, process, options.jobs, options.steps))
    title = f"{options.jobs:,} jobs of {options.steps} steps"
    print(f"{title:<38}{'steps/s, median (min-max)':>26}")
    for process, found in rates.items():
        print(f"{process.name:<38}{spread(found):>26}")
    print()
    report = Report()
    report.heading("pgdefer", "the other")
    best = {
        system: max(found, key=lambda process: statistics.median(rates[process]))
        for system in ("pgdefer", "dbos", "absurd")
        if (found := [process for process in rates if process.system == system])
    }
    ours = best.pop("pgdefer", None)
    for other in best.values():
        if ours is not None:
            name = f"{ours.concurrency} : {other.name}"
            report.compare(name, rates[ours], rates[other], LIMIT)
    report.end(options)


if __name__ == "__main__":
    main()

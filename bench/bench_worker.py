#!/usr/bin/env python3
"""How fast one worker process drains no-op async jobs, beside Procrastinate and pgqueuer.

    bench/bench_worker.py [--runs N] [--only TEXT] [--jobs N] [--sweep] [--pin] [--check]

All run in turn on one server that syncs to disk, each run in a database and a process of its own. The
time is from the start of the first job to the end of the last in the database. The others are
installed in a virtual environment of this benchmark, .tools/bench-venv, in the versions of
workers/requirements.txt. --sweep also tries settings other than the best.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path

from common import ROOT, Bench, Report, arguments, bench, spread

WORKERS = Path(__file__).resolve().parent / "workers"
REQUIREMENTS = WORKERS / "requirements.txt"
VENV = ROOT / ".tools" / "bench-venv"


@dataclasses.dataclass(frozen=True)
class Worker:
    """A worker with one setting: its concurrency, or the size of its batches."""

    system: str
    setting: str

    @property
    def name(self) -> str:
        kind = "batches of" if self.system == "pgqueuer" else "concurrency"
        return f"{self.system}, {kind} {self.setting}"


OURS = [Worker("pgdefer", "default"), Worker("pgdefer", "200")]
THEIRS = [
    Worker("procrastinate", "10"),
    Worker("procrastinate", "20"),
    Worker("pgqueuer", "100"),
]
SWEEP = [
    *(Worker("pgdefer", setting) for setting in ("10", "50", "100", "400", "1000")),
    *(Worker("procrastinate", setting) for setting in ("1", "5", "50")),
    *(Worker("pgqueuer", setting) for setting in ("10", "50", "200", "1000")),
]
# The limit, beside the best setting of the other.
LIMITS = {"procrastinate": 15.0, "pgqueuer": 0.8}


def peers(requirements: Path = REQUIREMENTS, venv: Path = VENV) -> Path:
    """Return the Python of the others' virtual environment; create it if it is missing."""
    python = venv / "bin" / "python"
    stamp = venv / "requirements.txt"
    wanted = requirements.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"Installing {requirements.relative_to(ROOT)} into {venv.relative_to(ROOT)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "-r", requirements], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"pip failed:\n{done.stderr}")
        stamp.write_text(wanted)
    return python


def drain(on: Bench, worker: Worker, jobs: int) -> float:
    """Return jobs per second."""
    ours = worker.system == "pgdefer"
    with on.fresh("ours" if ours else "template1") as database:
        done = subprocess.run(
            [
                *on.client_prefix(),
                sys.executable if ours else peers(),
                WORKERS / f"drain_{worker.system}.py",
                *(on.server.dsn(database), str(jobs), worker.setting),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{worker.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return jobs / float(found["ended"] - found["begun"])


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--sweep", action="store_true", help="try more settings")
    options = parser.parse_args()
    workers = [
        worker for worker in OURS + THEIRS + SWEEP * options.sweep if options.only in worker.name
    ]
    if any(worker.system != "pgdefer" for worker in workers):
        peers()
    rates: dict[Worker, list[float]] = {worker: [] for worker in workers}
    with bench(options) as on:
        for _ in range(options.runs):
            for worker in workers:
                rates[worker].append(drain(on, worker, options.jobs))
    print(f"{f'{options.jobs:,} no-op jobs, one worker':<38}{'jobs/s, median (min-max)':>26}")
    for worker, found in rates.items():
        print(f"{worker.name:<38}{spread(found):>26}")
    print()
    report = Report()
    report.heading("pgdefer", "the other")
    for system, limit in LIMITS.items():
        others = [worker for worker in rates if worker.system == system]
        if others:
            best = max(others, key=lambda worker: statistics.median(rates[worker]))
            for ours in OURS:
                if ours in rates:
                    name = f"{ours.setting} : {best.name}"
                    report.compare(name, rates[ours], rates[best], limit)
    report.end(options)


if __name__ == "__main__":
    main()

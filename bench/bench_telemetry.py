#!/usr/bin/env python3
"""What telemetry costs a worker process: a drain of async jobs with it, beside the same without.

    bench/bench_telemetry.py [--runs N] [--only TEXT] [--jobs N] [--check]

Each run has a database and a process of its own. OpenTelemetry is its SDK with the defaults, which
samples all spans and exports them in batches, here to nobody; `1 in 10` is the sampler
ParentBased(TraceIdRatioBased(0.1)), `sample 0.01` the option of `instrument`. The microseconds are those of the worker's CPU.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path

from common import Bench, Report, arguments, bench

PROGRAM = Path(__file__).resolve().parent / "workers" / "drain_pgdefer.py"
# How long jobs compute in milliseconds, what is on, and the ratio to reach. Both kinds of metrics
# at once, and all spans, are what the limit is for.
CASES: dict[str, tuple[float, list[str], float | None]] = {
    "spans": (0, ["spans"], None),
    "spans, 1 in 10": (0, ["spans:0.1"], None),
    "spans, 1 in 100": (0, ["spans:0.01"], None),
    "sample 0.01": (0, ["sample:0.01"], 0.85),
    "metrics": (0, ["metrics"], None),
    "prometheus": (0, ["prometheus"], None),
    "spans, metrics, prometheus": (0, ["spans", "metrics", "prometheus"], 0.85),
    "1 in 10, metrics, prometheus": (0, ["spans:0.1", "metrics", "prometheus"], None),
    "1 in 10, prometheus": (0, ["spans:0.1", "prometheus"], None),
    "1 in 100, prometheus": (0, ["spans:0.01", "prometheus"], None),
    "sample 0.01, prometheus": (0, ["sample:0.01", "prometheus"], 0.85),
    "jobs of 0.5 ms: all": (0.5, ["spans", "metrics", "prometheus"], None),
    "jobs of 1 ms: all": (1, ["spans", "metrics", "prometheus"], 0.85),
    "jobs of 1 ms: 1 in 10, prometheus": (1, ["spans:0.1", "prometheus"], None),
}


@dataclasses.dataclass
class Drain:
    """Jobs per second, and microseconds of the worker's CPU per job."""

    rate: float
    cost: float


def drain(on: Bench, jobs: int, milliseconds: float, telemetry: list[str]) -> Drain:
    with on.fresh("ours") as database:
        command = [*on.client_prefix(), sys.executable, PROGRAM]
        given = [on.server.dsn(database), str(jobs), str(milliseconds), *telemetry]
        done = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the drain failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    took = found["ended"] - found["begun"]
    return Drain(jobs / took, found["cpu"] / jobs * 1e6)


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--jobs", type=int, default=20_000)
    options = parser.parse_args()
    report = Report()
    costs = []
    with bench(options) as on:
        report.heading("with it", "without")
        for name, (milliseconds, telemetry, limit) in CASES.items():
            if options.only not in name:
                continue
            jobs = options.jobs // 4 if milliseconds else options.jobs
            having, lacking = [], []
            for _ in range(options.runs):
                having.append(drain(on, jobs, milliseconds, telemetry))
                lacking.append(drain(on, jobs, milliseconds, []))
            rates = [one.rate for one in having], [one.rate for one in lacking]
            report.compare(name, *rates, limit)
            own, bare = (statistics.median(one.cost for one in some) for some in (having, lacking))
            costs.append(f"{name:<38}{own - bare:>8.1f} us a job, to {bare:.1f}")
    print("\nCPU of the worker's process:", *costs, sep="\n")
    report.end(options)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How fast one worker process drains no-op async jobs with telemetry on, beside the same without.

    bench/bench_telemetry.py [--runs N] [--only TEXT] [--jobs N] [--check]

Each run has a database and a process of its own. OpenTelemetry is its SDK, which samples all spans
and exports them in batches to nobody.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

from common import Bench, Case, alternate, arguments, bench

PROGRAM = Path(__file__).resolve().parent / "workers" / "drain_pgdefer.py"
# Both kinds at once are the usual case: the limit is theirs.
CASES = {
    "otel": (["otel"], None),
    "prometheus": (["prometheus"], None),
    "otel and prometheus": (["otel", "prometheus"], 0.85),
}


def drain(on: Bench, jobs: int, telemetry: list[str]) -> float:
    """Return jobs per second."""
    with on.fresh("ours") as database:
        command = [*on.client_prefix(), sys.executable, PROGRAM]
        given = [on.server.dsn(database), str(jobs), "default", *telemetry]
        done = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the drain failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return jobs / float(found["ended"] - found["begun"])


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--jobs", type=int, default=20_000)
    options = parser.parse_args()
    with bench(options) as on:
        run = functools.partial(drain, on, options.jobs)
        cases = [
            Case(name, functools.partial(run, telemetry), functools.partial(run, []), limit)
            for name, (telemetry, limit) in CASES.items()
        ]
        alternate(cases, options, "with it", "without")


if __name__ == "__main__":
    main()

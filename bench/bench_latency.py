#!/usr/bin/env python3
"""The time from defer to start on an idle worker, beside graphile-worker.

    bench/bench_latency.py [--runs N] [--only TEXT] [--jobs N] [--rate N] [--pin] [--check]

One process defers at a steady rate, another is the worker. The time begins before the call of
`task.defer` or `addJob`, so it includes the round trip and the commit, and ends in the handler. Both
run in turn on one server that syncs to disk, each run in a fresh database. npm installs
graphile-worker into .tools/bench-node, in the versions of workers/package-lock.json; without npm it
is left out.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, Bench, Report, arguments, bench, percentile

from pgdefer import App

WORKERS = Path(__file__).resolve().parent / "workers"
NODE = ROOT / ".tools" / "bench-node"
P50, P99 = 2.5, 8.0
# The limits, and the figures of graphile-worker where they were set.
TIMES_P50, TIMES_P99 = round(P50 / 1.7, 2), P99 / 5.0
WARM_UP = 10


def run_ours(on: Bench, jobs: int, rate: float) -> list[float]:
    """Return the waiting time of each job, in milliseconds."""
    with on.fresh("ours") as database:
        dsn = on.server.dsn(database)
        command = [sys.executable, WORKERS / "latency_pgdefer.py", dsn, str(jobs + WARM_UP)]
        app = App(dsn)

        @app.task(name="stamp")
        async def stamp(at: float) -> None:
            pass

        with started(on, command) as worker, app:
            wait_until_asleep(on, database)
            begun = time.perf_counter()
            for number in range(jobs + WARM_UP):
                time.sleep(max(0.0, begun + number / rate - time.perf_counter()))
                stamp.defer(at=time.time())
            return waits(worker)


def run_graphile(on: Bench, jobs: int, rate: float) -> list[float]:
    """As `run_ours`."""
    with on.fresh("template1") as database:
        dsn = f"postgresql://postgres@/{database}?host={on.server.socket_folder}"
        script = ["node", WORKERS / "latency_graphile.mjs"]
        subprocess.run([*script, "install", dsn], cwd=NODE, check=True, capture_output=True)
        with started(on, [*script, "work", dsn, str(jobs + WARM_UP)], NODE) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            produce = [*script, "produce", dsn, str(jobs + WARM_UP), str(rate)]
            subprocess.run(produce, cwd=NODE, check=True, capture_output=True)
            return waits(worker)


def started(
    on: Bench, command: list[str | Path], folder: Path | None = None
) -> subprocess.Popen[str]:
    """Start a worker."""
    return subprocess.Popen(
        [*on.client_prefix(), *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def waits(worker: subprocess.Popen[str]) -> list[float]:
    """Return the output of a worker, once it has ended."""
    output, _ = worker.communicate(timeout=60)
    if worker.returncode:
        sys.exit("the worker failed")
    return [1000 * wait for wait in json.loads(output)[WARM_UP:]]


def wait_until_asleep(on: Bench, database: str) -> None:
    """Wait until the worker holds the sleep lock: it listens and has nothing to do."""
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


def has_graphile() -> bool:
    """Install graphile-worker if it is missing; return whether it is installed."""
    npm = shutil.which("npm")
    if npm is None:
        print("npm is missing: graphile-worker is left out.\n")
        return False
    wanted = (WORKERS / "package-lock.json").read_text()
    stamp = NODE / "installed.json"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"Installing graphile-worker into {NODE.relative_to(ROOT)}")
        NODE.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(WORKERS / name, NODE)
        done = subprocess.run(
            [npm, "ci", "--silent"], cwd=NODE, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"npm failed:\n{done.stdout}{done.stderr}")
        stamp.write_text(wanted)
    return True


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--jobs", type=int, default=200, help="of each run (200)")
    parser.add_argument("--rate", type=float, default=20.0, help="jobs per second (20)")
    options = parser.parse_args()
    runs = {"pgdefer": run_ours}
    if options.only in "graphile-worker" and has_graphile():
        runs["graphile-worker"] = run_graphile
    found: dict[str, list[float]] = {name: [] for name in runs}
    with bench(options) as on:
        for number in range(1, options.runs + 1):
            for name, run in runs.items():
                came = run(on, options.jobs, options.rate)
                found[name] += came
                print(f"{name:<16} run {number}: {describe(came)}", flush=True)
    print()
    for name, all_waits in found.items():
        print(f"{name:<16} all:   {describe(all_waits)}")
    print()
    report = Report()
    for part, at, limit, times in (("p50", 0.5, P50, TIMES_P50), ("p99", 0.99, P99, TIMES_P99)):
        ours = percentile(found["pgdefer"], at)
        report.below(f"from defer to start, {part}", ours, limit, "ms")
        if other := found.get("graphile-worker"):
            name = f"beside graphile-worker, {part}"
            report.below(name, ours / percentile(other, at), times, "times")
    report.end(options)


def describe(waits: list[float]) -> str:
    parts = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    return "  ".join(f"{name} {percentile(waits, part):6.2f} ms" for name, part in parts)


if __name__ == "__main__":
    main()

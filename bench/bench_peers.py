#!/usr/bin/env python3
"""pgdefer beside other queues, each at the best settings of its own documentation, and a bare table.

    bench/bench_peers.py [--runs N] [--jobs N] [--only TEXT] [--systems TEXT] [--check]
                         [--markdown FILE] [--plot FILE]

All run in turn on one server that syncs to disk, each run in a fresh database and with processes of its own:
workers/peer_*. A run counts only if the system's own tables say that each job was done, and each handler
ran once. A drain lasts from the start of the first handler to the end of the last job. CPU time and WAL
are those of all the server, and of all the workers' or producers' processes, over the same time.

The others are installed into .tools/bench-venv and .tools/bench-node in pinned versions; Celery also needs
redis-server. --markdown puts the tables between the marks of a page, --plot draws them.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from common import Report, arguments, bench, percentile, short, spread
from peer_chart import draw, halves, write
from peer_runs import Found, Runner, bare
from peers import (
    BEST,
    CPU,
    DEFAULT,
    HALF,
    IDLE,
    MANY,
    ONE,
    OUTAGE,
    SCENARIOS,
    SLEEP,
    SYSTEMS,
    TEN,
    System,
    missing,
    redis_if_needed,
)

# of --jobs; a run of a system that is slow has as many as take it SECONDS
PARTS = {SLEEP: 0.4, CPU: 0.06, ONE: 0.06, IDLE: 0.0016, OUTAGE: 20}
SECONDS = 3.0
RATE = 25.0
Results = dict[str, dict[str, list[Found]]]


@dataclasses.dataclass
class Peers:
    """The runs, and what they have found: by scenario and name of system."""

    runner: Runner
    jobs: int
    found: Results = dataclasses.field(default_factory=dict)
    failed: list[str] = dataclasses.field(default_factory=list)

    def count(self, scenario: str, system: System) -> int:
        """Return the number of jobs of a run."""
        wanted = self.jobs * PARTS.get(scenario, 1.0)
        if scenario in system.paces and scenario != OUTAGE:
            wanted = min(wanted, system.paces[scenario] * SECONDS * self.jobs / 50_000)
        return max(round(wanted), 5 if system.paces.get(scenario, 1) < 1 else 20)

    def run(self, scenario: str, system: System) -> Found:
        """Return what one run has found."""
        jobs, runner = self.count(scenario, system), self.runner
        if system.driver == "bare" and scenario != IDLE:
            return bare(runner.on, scenario, jobs)
        setting = system.setting_for(scenario)
        match scenario:
            case "enqueue":
                return runner.produce(system, jobs, 0)
            case "enqueue many":
                return runner.produce(system, jobs, 1000)
            case "latency idle":
                return runner.latency(system, setting, jobs, RATE, 0)
            case "latency half load":
                return self.half_load(system, setting)
            case "after an outage":
                return runner.outage(system, setting, jobs)
        kind = {SLEEP: "sleep", CPU: "cpu"}.get(scenario, "noop")
        return runner.drain(system, setting, kind, jobs, 10 if scenario == TEN else 1)

    def half_load(self, system: System, setting: str) -> Found:
        """Send half as many jobs a second as it can both take and run."""
        drain = BEST if setting == "best" else DEFAULT
        send = ONE if MANY in system.without and ONE not in system.without else MANY
        # enqueueing does not depend on the worker's settings
        twin = next(other for other in SYSTEMS if other.driver == system.driver)
        both = 1 / self.rate(drain, system) + 1 / self.rate(send, twin)
        rate = 0.5 / both
        seconds = max(1.0, 3 * self.jobs / 50_000)
        size = 0 if send == ONE or rate < 200 else round(rate / 100)
        return self.runner.latency(system, setting, max(20, round(rate * seconds)), rate, size)

    def rate(self, scenario: str, system: System) -> float:
        """Return what was measured, or measure it."""
        found = self.found.get(scenario, {}).get(system.name)
        if not found:
            found = [self.run(scenario, system)]
            self.found.setdefault(scenario, {})[system.name] = found
        return statistics.median(run.rate for run in found)


def measure(peers: Peers, systems: list[System], only: str, runs: int) -> None:
    """Run every scenario, its systems in turn."""
    for scenario in SCENARIOS:
        if only not in scenario:
            continue
        there = [system for system in systems if scenario not in system.without]
        found: dict[str, list[Found]] = {system.name: [] for system in there}
        for number in range(1, runs + 1):
            for system in there:
                try:
                    found[system.name].append(peers.run(scenario, system))
                    made = str(found[system.name][-1])
                except (AssertionError, OSError, RuntimeError, psycopg.Error) as error:
                    made = f"FAILED: {error}"
                    peers.failed.append(f"{scenario}, {system.name}: {error}")
                print(f"{scenario:<18} run {number}  {system.name:<17} {made}", flush=True)
        peers.found[scenario] = {name: runs for name, runs in found.items() if runs}
        peers.runner.forget()
        for system in systems:
            if scenario in system.without:
                print(f"{scenario:<18} -      {system.name:<17} {system.without[scenario]}")
        print(flush=True)


# Limits

RATIOS = (
    (DEFAULT, "pgdefer, default", BEST, "graphile-worker", 1.0),
    (DEFAULT, "pgdefer, default", BEST, "pgqueuer", 2.0),
    (DEFAULT, "pgdefer, default", BEST, "awa-pg", 2.0),
    (DEFAULT, "pgdefer, default", BEST, "Procrastinate", 30.0),
    (BEST, "pgdefer, best", BEST, "graphile-worker", 1.2),
    *(
        (scenario, "pgdefer, best", scenario, system.name, 1.0)
        for scenario in (SLEEP, CPU)
        for system in SYSTEMS
        if system.driver not in {"pgdefer", "bare"}
    ),
)


def compare(found: Results, report: Report) -> None:
    """Print the ratios that count, and the latencies."""
    report.heading("pgdefer", "the other")
    for scenario, ours, other_scenario, other, limit in RATIOS:
        mine = found.get(scenario, {}).get(ours)
        others = found.get(other_scenario, {}).get(other)
        if mine and others:
            name = f"{scenario} : {other}"
            pairs = list(zip(mine, others, strict=False))  # as many as have not failed
            rates = ([one.rate for one, _ in pairs], [other.rate for _, other in pairs])
            report.compare(name, *rates, limit)
    for scenario, part, at, limit in (
        (IDLE, "p50", 0.5, 1.5),
        (IDLE, "p99", 0.99, 3),
        (HALF, "p99", 0.99, 10),
    ):
        if mine := found.get(scenario, {}).get("pgdefer, default"):
            waits = [wait for run in mine for wait in run.waits]
            report.below(f"{scenario}, {part}", 1000 * percentile(waits, at), limit, "ms")


def main() -> None:
    parser = arguments(__doc__, runs=5)
    parser.add_argument(
        "--jobs", type=int, default=50_000, help="of a drain by a fast system (50000)"
    )
    parser.add_argument(
        "--systems", default="", help="systems whose name contains one of these, by commas"
    )
    parser.add_argument("--markdown", type=Path, help="the page to put the tables into")
    parser.add_argument("--plot", type=Path, help="the SVG to draw")
    options = parser.parse_args()
    if options.markdown:
        halves(options.markdown)  # an error now, not after all runs
    systems, begun = [], time.monotonic()
    for system in SYSTEMS:
        if any(name in system.name for name in options.systems.split(",")):
            if why := missing(system):
                print(f"NOT MEASURED: {system.name}: {why}", file=sys.stderr, flush=True)
            else:
                systems.append(system)
    with redis_if_needed(systems) as redis, bench(options, {"max_connections": "400"}) as on:
        peers = Peers(Runner(on, redis), options.jobs)
        measure(peers, systems, options.only, options.runs)
        version = on.server.version
    names = [system.name for system in systems]
    for line in table(peers, systems):
        print(line)
    report = Report()
    print()
    compare(peers.found, report)
    print(f"\n{time.monotonic() - begun:.0f} seconds")
    if options.plot:
        draw(options.plot, peers.found, names)
    if options.markdown:
        heading = (
            f"PostgreSQL {version}, `bench_peers.py --runs {options.runs} --jobs {options.jobs}`"
        )
        write(options.markdown, [heading, "", *table(peers, systems)], options.plot)
    if peers.failed:
        sys.exit("\n".join(["", "Failed:", *peers.failed]))
    report.end(options)


def table(peers: Peers, systems: list[System]) -> list[str]:
    """Return the tables in Markdown: rates and latencies, then costs."""
    scenarios = [scenario for scenario in SCENARIOS if scenario in peers.found]
    head = ["| | " + " | ".join(scenarios) + " |", "|---" * (len(scenarios) + 1) + "|"]
    rates, costs = [*head], [*head]
    for system in systems:
        found = [peers.found[scenario].get(system.name) for scenario in scenarios]
        rates.append(
            f"| {system.name} | "
            + " | ".join((runs and cell(runs)) or "-" for runs in found)
            + " |"
        )
        costs.append(
            f"| {system.name} | "
            + " | ".join((runs and cost(runs)) or "-" for runs in found)
            + " |"
        )
    counts = []
    for system in systems:
        few = [
            f"{name} {peers.count(name, system):,}" for name in scenarios if name in system.paces
        ]
        if few:
            counts.append(f"{system.name}: {', '.join(few)}")
    lines = ["Jobs a second, median (least - most); latencies p50 / p99 in ms:", "", *rates, ""]
    lines += [
        "CPU time a job of the server / of the clients in µs; bytes of WAL a job:",
        "",
        *costs,
        "",
    ]
    return [*lines, f"Fewer jobs where a system is slow. {'; '.join(counts)}."] if counts else lines


def cell(runs: list[Found]) -> str:
    """Return the main figure of some runs."""
    if not runs[0].waits:
        return spread([run.rate for run in runs])
    if len(runs[0].waits) == 1:
        return spread([1000 * run.waits[0] for run in runs]) + " ms"
    waits = [1000 * wait for run in runs for wait in run.waits]
    text = f"{percentile(waits, 0.5):.1f} / {percentile(waits, 0.99):.1f}"
    return f"{text} at {short(runs[0].rate)}/s"


def cost(runs: list[Found]) -> str:
    """Return what a job has cost."""

    def median(figure: Callable[[Found], float | None]) -> str:
        values = [value for run in runs if (value := figure(run)) is not None]
        return f"{statistics.median(values):.0f}" if values else "-"

    if runs[0].server is None:
        return "-"
    return f"{median(lambda run: run.server)} / {median(lambda run: run.client)}; {median(lambda run: run.wal)}"


if __name__ == "__main__":
    main()

"""Code common to the benchmarks: a durable server, fresh databases, pgbench, tables."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, LiteralString

import psycopg

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from pgdefer.database.embedded import EmbeddedServer, temporary_server  # noqa: E402
from support import create_database, install, server_program  # noqa: E402

SETTINGS = {
    "shared_buffers": "1GB",
    "min_wal_size": "2GB",
    "max_wal_size": "4GB",
    "max_connections": "200",
}

BARE: LiteralString = """
create table q (
  id bigint generated always as identity primary key,
  state smallint not null default 0,
  args jsonb not null);
create index on q (id) where state = 0;
"""


def arguments(description: str | None, runs: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=runs, help=f"of each side ({runs})")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="backends on one core, clients on another, at real-time priority; for root on Linux",
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is missed")
    return parser


class Bench:
    """A server with the databases `ours` and `bare`, which each run copies."""

    def __init__(self, server: EmbeddedServer, *, pin: bool) -> None:
        self.server = server
        self.pin = pin
        self._made = 0
        program = server_program(server, "pgbench")
        if program is None:
            sys.exit("There is no pgbench: set PGDEFER_PG_BIN to binaries that have one.")
        self._pgbench = program
        create_database(server, "bare")
        with self.connect("bare") as connection:
            # Creates the WAL files, which later runs use again.
            connection.execute(
                "create table w as select repeat('x', 7000) from generate_series(1, 150000)"
            )
            connection.execute("drop table w")
            connection.execute(BARE)
        create_database(server, "ours")
        install(server, "ours")
        with self.connect("ours") as connection:
            connection.execute("select queue.register_task('noop', '{}')")

    def connect(self, database: str) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.server.dsn(database), autocommit=True)

    @contextlib.contextmanager
    def fresh(self, template: str) -> Iterator[str]:
        """Provide a copy of a database for one run."""
        self._made += 1
        name = f"{template}_{self._made}"
        create_database(self.server, name, template)
        try:
            yield name
        finally:
            with self.connect("postgres") as connection:
                connection.execute(f'drop database "{name}" with (force)'.encode())

    def settle(self, database: str) -> None:
        """Leave a run nothing to catch up with: statistics, visibility, dirty pages."""
        with self.connect(database) as connection:
            connection.execute("vacuum analyze")
            connection.execute("checkpoint")

    def pgbench(
        self,
        database: str,
        script: str,
        *,
        clients: int = 1,
        seconds: int | None = None,
        transactions: int | None = None,
        variables: Mapping[str, str] | None = None,
        options: str = "",
    ) -> float:
        """Return the transactions per second of a script, statements prepared."""
        length = ["-T", str(seconds)] if seconds else ["-t", str((transactions or 1) // clients)]
        given = [
            word for key, value in (variables or {}).items() for word in ("-D", f"{key}={value}")
        ]
        with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
            file.write(script)
            file.flush()
            done = subprocess.run(
                [
                    *self.client_prefix(),
                    *(self._pgbench, "-n", "-M", "prepared", "-f", file.name),
                    *("-c", str(clients), "-j", str(min(clients, 2)), *length, *given),
                    *("-d", self.server.dsn(database)),
                ],
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | {"PGOPTIONS": options},
            )
        found = re.search(r"^tps = ([0-9.]+)", done.stdout, re.MULTILINE)
        if done.returncode or not found or "aborted" in done.stderr:
            sys.exit(f"pgbench failed:\n{done.stdout}{done.stderr}")
        return float(found[1])

    def client_prefix(self) -> list[str]:
        """Return the beginning of a client's command."""
        return ["chrt", "-r", "10", "taskset", "-c", "0"] if self.pin else []


@contextlib.contextmanager
def bench(
    options: argparse.Namespace, settings: Mapping[str, str] | None = None
) -> Iterator[Bench]:
    """Run a temporary server that syncs to disk, and print its versions and machine."""
    with temporary_server(settings=SETTINGS | dict(settings or {}), durable=True) as server:
        _use_wal(server)
        if options.pin:
            _pin(server)
        made = Bench(server, pin=options.pin)
        print(
            f"PostgreSQL {server.version}, Python {platform.python_version()}, "
            f"{os.cpu_count()} cores, a sync takes {_sync_time(server.folder) * 1e6:.0f} us"
        )
        load = os.getloadavg()[0]
        if load > 0.7:
            print(f"NOTE: the machine is busy (load {load:.1f}): figures are low, ratios uncertain")
        print(flush=True)
        yield made


def _use_wal(server: EmbeddedServer) -> None:
    """Write 1 GB of WAL, whose segments the server uses again, as one does that has run for a while.

    A segment that is new must be filled with zeros first. Commits then wait for 10 to 20 ms, each 16 MB.
    """
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute(
            "select count(pg_logical_emit_message(false, 'bench', repeat('0', 1000000)))"
            " from generate_series(1, 1000)"
        )
        connection.execute("checkpoint")


def _pin(server: EmbeddedServer) -> None:
    """Make all future backends run on core 1, before other processes."""
    pid = server.status().pid
    assert pid is not None
    os.sched_setaffinity(pid, {1})
    os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(10))


def _sync_time(folder: Path) -> float:
    times = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for number in range(100):
            os.pwrite(file.fileno(), b"x" * 8192, number % 50 * 8192)
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begun)
    return statistics.median(times[50:])


# Comparing


@dataclasses.dataclass
class Case:
    """Two ways of doing the same, each returning its rate, and the ratio to reach."""

    name: str
    ours: Callable[[], float]
    bare: Callable[[], float]
    limit: float | None
    unit: str = "jobs/s"


@dataclasses.dataclass
class Report:
    """The lines of a table, and the missed limits."""

    missed: list[str] = dataclasses.field(default_factory=list)

    def heading(self, left: str, right: str) -> None:
        print(f"{'':<38}{left:>26}{right:>26}{'ratio':>7}  {'pairs':<13}{'limit':>6}")

    def compare(
        self, name: str, ours: Sequence[float], others: Sequence[float], limit: float | None
    ) -> None:
        """Print both figures, the ratio of their medians, the pairs' ratios, the limit."""
        ratio = statistics.median(ours) / statistics.median(others)
        pairs = [mine / other for mine, other in zip(ours, others, strict=True)]
        line = f"{name:<38}{spread(ours):>26}{spread(others):>26}{short(ratio):>7}"
        line += f"  {f'{short(min(pairs))}-{short(max(pairs))}':<13}"
        if limit is not None:
            line += f"{limit:>6.2f}"
            if ratio < limit:
                line += "  MISSED"
                self.missed.append(f"{name}: {ratio:.2f} of {limit}")
        print(line, flush=True)

    def below(self, name: str, value: float, limit: float, unit: str) -> None:
        """Print a figure that must not exceed its limit."""
        line = f"{name:<34}{value:>10.2f} {unit}, limit {limit:g} {unit}"
        if value > limit:
            line += "  MISSED"
            self.missed.append(f"{name}: {value:.2f} of at most {limit} {unit}")
        print(line, flush=True)

    def end(self, options: argparse.Namespace) -> None:
        """Exit as --check requires."""
        if self.missed and options.check:
            sys.exit("\n".join(["", "Missed:", *self.missed]))


def alternate(cases: Sequence[Case], options: argparse.Namespace, left: str, right: str) -> None:
    """Run every case, its sides in turn: ours, bare, ours, bare."""
    report = Report()
    report.heading(left, right)
    for case in cases:
        if options.only in case.name:
            ours, bare = [], []
            for _ in range(options.runs):
                ours.append(case.ours())
                bare.append(case.bare())
            report.compare(case.name, ours, bare, case.limit)
    print(
        "\nmedian (min-max) of each side; ratio of the medians; least and greatest ratio of a pair"
    )
    report.end(options)


def defer_noops(connection: psycopg.Connection[Any], jobs: int) -> None:
    """Defer jobs of the task noop, a multiple of 1,000."""
    for first in range(0, jobs, 1000):
        slice_ = [{"task": "noop", "args": {"n": n}} for n in range(first, first + 1000)]
        connection.execute("select count(*) from queue.defer_many(%s)", [json.dumps(slice_)])


def spread(values: Sequence[float]) -> str:
    """Return the median, the least and the greatest of some rates."""
    return f"{short(statistics.median(values))} ({short(min(values))}-{short(max(values))})"


def short(value: float) -> str:
    """Return a rate with few digits."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that a `part` of all, 0 to 1, does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]


# CPU time

TICK = os.sysconf("SC_CLK_TCK")


def cpu(pids: Sequence[int]) -> float:
    """Return the CPU seconds of these processes, with those of their children that have ended."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(field) for field in fields[11:15])
    return total / TICK


def processes_of(server: int) -> list[int]:
    """Return a server's process and its children."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [server, *map(int, children)]

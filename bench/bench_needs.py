#!/usr/bin/env python3
"""The cost of a job with needs, and whether it grows with the number of jobs.

    bench/bench_needs.py [--dsn DSN] [--jobs N ...] [--workers N] [--batch N] [--group N ...]

Graphs of 10 layers, each job needing 3 random jobs of the layers before it, are deferred and then
run by 4 workers that claim 50 at a time and do nothing. SQL only: a worker is a thread that calls
queue.finish_and_fetch. Then groups: N jobs and one that needs them all. Each runs in a database of
its own with fsync on. Afterwards a query checks that no job started before its needs had ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]

from pgdefer.database.embedded import temporary_server  # noqa: E402
from support import create_database, install  # noqa: E402

LAYERS = 10
NEEDS = 3
CHUNK = 1000

DEFER = "select id from queue.defer_many(%s) with ordinality d (id, n) order by n"
TURN = "select t.id, t.claim, t.error from queue.finish_and_fetch(%s, %s, max_jobs => %s) t"
EARLY = """
select count(*) from queue.need d
join queue.finished j on j.id = d.job_id join queue.finished n on n.id = d.need_id
where j.started_at < n.finished_at
"""


def defer_graph(connection: psycopg.Connection, total: int, seed: int) -> None:
    """Defer the layers one after the other, in transactions of 1,000 jobs."""
    generator = random.Random(seed)
    before: list[int] = []
    for _ in range(LAYERS):
        layer: list[int] = []
        size = total // LAYERS
        for start in range(0, size, CHUNK):
            jobs = [
                {
                    "task": "step",
                    **({"needs": generator.sample(before, NEEDS)} if before else {}),
                }
                for _ in range(min(CHUNK, size - start))
            ]
            rows = connection.execute(DEFER, [json.dumps(jobs)]).fetchall()
            layer += [row[0] for row in rows]
        before += layer


def work(dsn: str, name: str, batch: int, total: int, failures: list[str]) -> None:
    """Work until every job has ended."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        worker = connection.execute("select queue.register_worker(%s)", [name]).fetchone()[0]
        outcomes: list[dict] = []
        while True:
            rows = connection.execute(TURN, [worker, json.dumps(outcomes), batch]).fetchall()
            failures += [f"job {row[0]}: {row[2]}" for row in rows if row[2] is not None]
            outcomes = [
                {"id": row[0], "claim": row[1], "outcome": "succeeded"}
                for row in rows
                if row[2] is None
            ]
            if not outcomes:
                done = connection.execute("select count(*) from queue.finished").fetchone()[0]
                if done >= total:
                    return
                time.sleep(0.002)


def drain(dsn: str, workers: int, batch: int, total: int) -> float:
    failures: list[str] = []
    threads = [
        threading.Thread(target=work, args=(dsn, f"bench {n}", batch, total, failures))
        for n in range(workers)
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        sys.exit(f"refused outcomes: {failures[:5]}")
    return time.monotonic() - start


@contextmanager
def databases(dsn: str | None) -> Iterator[Callable[[], str]]:
    """Yield a function that makes a fresh database with pgdefer and returns its DSN."""
    numbers = itertools.count(1)
    with ExitStack() as stack:
        if dsn is None:
            settings = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
            server = stack.enter_context(temporary_server(settings=settings, durable=True))
            create_database(server, "base")
            install(server, "base")
            dsn = server.dsn("base")
        base = conninfo_to_dict(dsn)["dbname"]
        admin = stack.enter_context(
            psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True)
        )

        def fresh() -> str:
            name = f"bench_{next(numbers)}"
            admin.execute(f"drop database if exists {name}")
            admin.execute(f"create database {name} template {base}")
            return make_conninfo(dsn, dbname=name)

        yield fresh


def checked(connection: psycopg.Connection) -> None:
    early = connection.execute(EARLY).fetchone()[0]
    broken = connection.execute("select * from queue.check() limit 5").fetchall()
    if early or broken:
        sys.exit(f"{early} jobs started too early; queue.check(): {broken}")


def run_graph(dsn: str, size: int, seed: int, workers: int, batch: int) -> tuple[float, float]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        start = time.monotonic()
        defer_graph(connection, size, seed)
        deferring = time.monotonic() - start
        running = drain(dsn, workers, batch, size)
        checked(connection)
    return deferring, running


def run_group(dsn: str, size: int, _: int, workers: int, batch: int) -> tuple[float, float]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        start = time.monotonic()
        connection.execute(
            "select * from queue.defer_group(%s, %s)",
            [json.dumps([{"task": "part"}] * size), json.dumps({"task": "sum"})],
        ).fetchall()
        deferring = time.monotonic() - start
        running = drain(dsn, workers, batch, size + 1)
        checked(connection)
    return deferring, running


def report(name: str, jobs: int, deferring: float, running: float, first: float | None) -> float:
    """Print a line, and return the cost to which later lines are compared."""
    cost = (deferring + running) / jobs * 1e6
    ratio = "" if first is None else f"  {cost / first:5.2f} of the first"
    print(
        f"{name:<12} {jobs:>7} jobs: defer {deferring / jobs * 1e6:6.0f} us, "
        f"run {running / jobs * 1e6:6.0f} us, together {cost:6.0f} us a job{ratio}",
        flush=True,
    )
    return cost if first is None else first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--dsn", help="a database with pgdefer to copy, instead of a server of its own"
    )
    parser.add_argument("--jobs", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--group", type=int, nargs="*", default=[1000, 10_000, 100_000])
    options = parser.parse_args()
    with databases(options.dsn) as fresh:
        # in rounds, the best of which counts: other load of the machine affects all sizes alike
        for name, sizes, run in (
            ("10 layers", options.jobs, run_graph),
            ("group", options.group, run_group),
        ):
            best: dict[int, tuple[float, float]] = {}
            for seed in range(options.rounds):
                for size in sizes:
                    times = run(fresh(), size, seed, options.workers, options.batch)
                    best[size] = min(best.get(size, times), times, key=sum)
            first = None
            for size, (deferring, running) in best.items():
                first = report(name, size, deferring, running, first)


if __name__ == "__main__":
    main()

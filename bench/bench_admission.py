#!/usr/bin/env python3
"""Waiting jobs cost nothing: fetch beside large backlogs; the cost of locks, keys and a held xmin.

    bench/bench_admission.py [--runs N] [--only TEXT] [--waiting N] [--drained N] [--pin] [--check]

1. The time of a fetch of one free job, with a million others blocked behind one lock, behind 10,000
   locks or due in the future, or after 100,000 (queue, priority) pairs have been emptied; beside an
   empty queue. The databases are measured in turn, over one connection each.
2. Jobs per second in batches, if all jobs have locks, or one key with a limit; beside plain jobs.
3. The last 10,000 of 200,000 jobs beside the first, while another session holds a snapshot that
   prevents vacuuming: with locks, keys and schedules, deferred all before or in the course of the run.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from typing import Any

import psycopg
from common import Bench, Case, Report, alternate, arguments, bench

SETTINGS = {"shared_buffers": "512MB"}
FETCHES = 300
PAIRS = "100,000 pairs emptied"
OUTCOMES = """
select '[' || coalesce(string_agg('{"id":' || id || ',"claim":' || claim
                                  || ',"outcome":"succeeded"}', ','), '') || ']' as outcomes
"""
ONE_CALL = f"""{OUTCOMES}
from queue.finish_and_fetch(:worker, :outcomes::jsonb, null, :batch, null) \\gset
"""
# One SELECT defers them one by one: (number of the job) -> arguments of queue.defer.
FILLS = {
    "one lock": "'t', lock => 'one'",
    "10,000 locks": "'t', lock => 'lock ' || n % 10000",
    "in the future": "'t', scheduled_at => '2999-01-01Z'::timestamptz + n * interval '1 s'",
}
MIX = """
  case n % 4
    when 0 then queue.defer('t', lock => 'lock ' || n / 4 % 1000)
    when 1 then queue.defer('t', concurrency_key => 'key ' || n / 4 % 20, concurrency_limit => 20)
    when 2 then queue.defer('t', scheduled_at => clock_timestamp() + n % 7 * interval '10 ms')
    else queue.defer('t')
  end
"""


def admit(connection: psycopg.Connection[Any]) -> None:
    """Admit all deferred jobs, as workers would."""
    while True:
        connection.execute("select * from queue.tick()")
        row = connection.execute(
            "select has_backlog from queue.cursor order by tick desc limit 1"
        ).fetchone()
        if row == (False,):
            return


def worker(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute(
        "select queue.register_worker('bench', null, '{\"dead_after\": \"1 day\"}')"
    ).fetchone()
    assert row is not None
    return int(row[0])


# 1. Backlogs


def fill(on: Bench, database: str, what: str, waiting: int) -> None:
    with on.connect(database) as connection:
        if what == PAIRS:
            for first in range(0, 100_000, 10_000):
                jobs = [
                    {"task": "t", "queue": f"queue {n // 10}", "priority": n % 10}
                    for n in range(first, first + 10_000)
                ]
                connection.execute("select count(*) from queue.defer_many(%s)", [json.dumps(jobs)])
            admit(connection)
            drain(connection, worker(connection), 100_000, 1000)
            for _ in range(30):
                connection.execute("select * from queue.tick()")
        elif what != "an empty queue":
            connection.execute(
                f"select count(queue.defer({FILLS[what]})) from generate_series(1, {waiting}) n".encode()
            )
            admit(connection)
            # the job at the head of each lock runs
            while connection.execute(
                "select count(*) from queue.fetch(%s, null, 1000)", [worker(connection)]
            ).fetchone() != (0,):
                pass
    on.settle(database)


def fetch_times(connection: psycopg.Connection[Any], worker: int, n: int) -> list[float]:
    times = []
    for _ in range(n):
        connection.execute("select queue.defer('free')")
        begun = time.perf_counter()
        row = connection.execute(
            "select id, claim, task from queue.fetch(%s, null, 1)", [worker], prepare=True
        ).fetchone()
        times.append(time.perf_counter() - begun)
        assert row is not None
        assert row[2] == "free"
        connection.execute("select queue.succeed(%s, %s)", row[:2])
    return times


def backlogs(on: Bench, options: argparse.Namespace, report: Report) -> None:
    names = ["an empty queue", *FILLS, PAIRS]
    names = [name for name in names if name == names[0] or options.only in name]
    if len(names) < 2:
        return
    print(f"Fetch of a free job, us, with {options.waiting:,} jobs waiting")
    opened = []
    for number, name in enumerate(names):
        database = f"backlog_{number}"
        with on.connect("postgres") as connection:
            connection.execute(f"create database {database} template ours".encode())
        fill(on, database, name, options.waiting)
        connection = on.connect(database)
        opened.append((connection, worker(connection)))
        fetch_times(connection, opened[-1][1], 50)
    medians: list[list[float]] = [[] for _ in names]
    for _ in range(options.runs):
        for number, (connection, id) in enumerate(opened):
            medians[number].append(statistics.median(fetch_times(connection, id, FETCHES)) * 1e6)
    for number, name in enumerate(names):
        value = statistics.median(medians[number])
        print(f"{name:<34}{value:>10.0f}  ({min(medians[number]):.0f}-{max(medians[number]):.0f})")
        if number:
            times = statistics.median(
                mine / other for mine, other in zip(medians[number], medians[0], strict=True)
            )
            report.below(f"  beside {names[0]}", times, 1.2, "times")
    for connection, _ in opened:
        connection.close()
    print(flush=True)


# 2. Locks and keys


def drained(
    on: Bench, arguments: str, batch: int, options: argparse.Namespace, clients: int
) -> float:
    """Return jobs per second, admission included, of jobs that were deferred just before."""
    count = options.drained * batch // 50
    with on.fresh("ours") as database:
        with on.connect(database) as connection:
            connection.execute(
                f"select count(queue.defer({arguments})) from generate_series(1, {count + 200}) n".encode()
            )
            id = worker(connection)
        on.settle(database)
        rate = on.pgbench(
            database,
            ONE_CALL,
            clients=clients,
            transactions=count // batch,
            variables={"worker": str(id), "outcomes": "[]", "batch": str(batch)},
        )
        with on.connect(database) as connection:
            done = connection.execute("select count(*) from queue.finished").fetchone()
            assert done is not None
            broken = connection.execute("select * from queue.check() limit 5").fetchall()
            assert not broken, broken
        return rate * batch * done[0] / (count - clients * batch)


def gates(on: Bench, options: argparse.Namespace) -> list[Case]:
    run = functools.partial(drained, on, options=options)
    return [
        Case(
            f"{name}, {clients} client{'s' if clients > 1 else ''}",
            functools.partial(run, arguments, batch, clients=clients),
            functools.partial(run, "'t'", batch, clients=clients),
            # several clients share the admission lock, which one client has to itself
            limit if clients == 1 else None,
        )
        for name, arguments, batch, limit in (
            ("1,000 locks, batches of 50", "'t', lock => 'lock ' || n % 1000", 50, 0.45),
            (
                "key, limit 20, batches of 5",
                "'t', concurrency_key => 'k', concurrency_limit => 20",
                5,
                0.45,
            ),
        )
        for clients in (1, 4)
    ]


# 3. A held xmin


def drain(connection: psycopg.Connection[Any], id: int, jobs: int, batch: int) -> None:
    """Claim and finish this many jobs, in batches."""
    outcomes = "[]"
    left = jobs
    while left > 0 or outcomes != "[]":
        rows = connection.execute(
            "select id, claim from queue.finish_and_fetch(%s, %s, null, %s)",
            [id, outcomes, min(batch, left) or 1],
            prepare=True,
        ).fetchall()
        left -= len(rows)
        outcomes = json.dumps([{"id": id, "claim": n, "outcome": "succeeded"} for id, n in rows])
        if left == 0 and rows:
            connection.execute("select * from queue.finish_many(%s)", [outcomes])
            return


def held(on: Bench, options: argparse.Namespace, report: Report) -> None:
    total, part = options.held, options.held // 20
    for name in ("held xmin, deferred before", "held xmin, deferred on the way"):
        if options.only not in name:
            continue
        ratios = []
        for _ in range(options.runs):
            with on.fresh("ours") as database, on.connect(database) as connection:
                id = worker(connection)
                with on.connect(database) as other, other.transaction():
                    other.execute("set transaction isolation level repeatable read")
                    other.execute("select count(*) from queue.job")
                    rates = []
                    if name.endswith("before"):
                        connection.execute(
                            f"select count({MIX}) from generate_series(1, {total}) n".encode()
                        )
                    for first in range(0, total, part):
                        spent = 0.0
                        for begin in range(first, first + part, 500):
                            if name.endswith("way"):
                                connection.execute(
                                    f"select count({MIX}) from generate_series({begin + 1}, {begin + 500}) n".encode()
                                )
                            begun = time.perf_counter()
                            drain(connection, id, 500, 50)
                            spent += time.perf_counter() - begun
                        rates.append(part / spent)
                broken = connection.execute("select * from queue.check() limit 5").fetchall()
                assert not broken, broken
            # if all are deferred before, the first ones pay for the admission of most others
            ratios.append(rates[-1] / max(rates[:2]))
            print(f"{name}: jobs/s by {part:,}:", " ".join(f"{rate / 1000:.1f}k" for rate in rates))
        ratio = statistics.median(ratios)
        line = f"  last {part:,} of {total:,} beside the first: {ratio:.2f}, limit 0.80"
        if ratio < 0.8:
            line += "  MISSED"
            report.missed.append(f"{name}: {ratio:.2f} of 0.8")
        print(line, flush=True)


def main() -> None:
    parser = arguments(__doc__, runs=5)
    parser.add_argument(
        "--waiting", type=int, default=1_000_000, help="jobs in the way (1,000,000)"
    )
    parser.add_argument(
        "--drained", type=int, default=50_000, help="jobs of a run that drains (50,000)"
    )
    parser.add_argument(
        "--held", type=int, default=200_000, help="jobs under a held xmin (200,000)"
    )
    options = parser.parse_args()
    report = Report()
    with bench(options, SETTINGS) as on:
        backlogs(on, options, report)
        held(on, options, report)
        alternate(gates(on, options), options, "with", "without")
    report.end(options)


if __name__ == "__main__":
    main()

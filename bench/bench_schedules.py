#!/usr/bin/env python3
"""Recurring runs: how soon after its second a job starts, and 10,000 schedules due in one second.

    bench/bench_schedules.py [--runs N] [--schedules N] [--seconds N] [--pin] [--check]

SQL only: a worker is a thread that follows the protocol of queue.before_sleep, and its jobs do
nothing. Times are the database's. The schedules have 60 expressions in 40 time zones, one in ten
has a lock of its own.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from common import Bench, Report, arguments, bench, percentile

LIMIT_DEFERRED = 2.0
LIMIT_START = 100.0

SCHEDULE = """
    with zone as materialized (
      select row_number() over (order by z.name) - 1 as n, z.name,
        %(at)s::timestamptz at time zone z.name as local
      from pg_timezone_names z where z.name ~ '^(Europe|America|Asia)/[A-Z]' limit 40)
    select count(queue.schedule(
      'schedule ' || i, to_char(z.local, case i %% 3 when 0 then 'SS MI * * * *'
        when 1 then 'SS MI FMHH24 * * *' else 'SS MI,' || i %% 60 || ' * * * *' end),
      'task ' || i %% 100, jsonb_build_object('customer', i), z.name,
      case when i %% 10 = 0 then jsonb_build_object('lock', 'customer ' || i) end))
    from generate_series(1, %(n)s) i join zone z on z.n = i %% 40
"""


class Worker(threading.Thread):
    """Runs jobs that do nothing, as fast as it can, and sleeps when there are none."""

    def __init__(self, dsn: str, batch: int) -> None:
        super().__init__(daemon=True)
        self._dsn = dsn
        self._batch = batch
        self.is_stopping = False
        self.is_asleep = False
        self.jobs = 0

    def run(self) -> None:
        with (
            psycopg.connect(self._dsn, autocommit=True) as main,
            psycopg.connect(self._dsn, autocommit=True) as listener,
        ):
            worker = _value(main, "select * from queue.register_worker('w')")
            listener.execute("listen pgdefer")
            outcomes: list[dict[str, Any]] = []
            is_latched = False
            while not self.is_stopping:
                outcomes = self._turn(main, worker, outcomes)
                if outcomes:
                    if is_latched:
                        listener.execute("select * from queue.after_sleep(%s)", (worker,))
                        is_latched = False
                    continue
                row = listener.execute(
                    "select may_sleep, wait_for from queue.before_sleep(%s)", (worker,)
                ).fetchone()
                assert row is not None
                is_latched = True
                outcomes = self._turn(main, worker, [])
                if not outcomes:
                    seconds = row[1].total_seconds()
                    self.is_asleep = True
                    if row[0]:
                        list(listener.notifies(timeout=seconds, stop_after=1))
                    else:
                        time.sleep(seconds)
                    self.is_asleep = False

    def _turn(
        self, main: psycopg.Connection[Any], worker: int, outcomes: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        rows = main.execute(
            "select id, claim from queue.finish_and_fetch(%s, %s, null, %s)",
            (worker, json.dumps(outcomes), self._batch),
        ).fetchall()
        self.jobs += len(rows)
        return [{"id": id, "claim": claim, "outcome": "succeeded"} for id, claim in rows]


@contextlib.contextmanager
def idle_workers(dsn: str, n: int, batch: int) -> Iterator[list[Worker]]:
    workers = [Worker(dsn, batch) for _ in range(n)]
    for worker in workers:
        worker.start()
    while not all(worker.is_asleep for worker in workers):
        time.sleep(0.01)
    try:
        yield workers
    finally:
        for worker in workers:
            worker.is_stopping = True
    for worker in workers:
        worker.join(10)


def _value(conn: psycopg.Connection[Any], query: str, *values: Any) -> Any:
    row = conn.execute(query.encode(), values).fetchone()
    assert row is not None
    return row[0]


def start_latency(on: Bench, seconds: int) -> list[float]:
    """Return how many milliseconds after its second each job of an every-second schedule began."""
    with on.fresh("ours") as database, on.connect(database) as conn:
        with idle_workers(on.server.dsn(database), 1, 10):
            conn.execute("select queue.schedule('s', 'every 1 second', 'noop')")
            time.sleep(seconds + 1)
        rows = conn.execute(
            "select extract(epoch from started_at - (args ->> 'scheduled_for')::timestamptz)::float"
            " from queue.jobs where started_at is not null order by id"
        ).fetchall()
    return [1000 * row[0] for row in rows]


def rush(on: Bench, n: int) -> tuple[float, float, float]:
    """Let n schedules be due in one second, with two idle workers.

    Return how long registering them took, and how long after that second all jobs were deferred,
    and done.
    """
    with on.fresh("ours") as database, on.connect(database) as conn:
        with idle_workers(on.server.dsn(database), 2, 100) as workers:
            begun = time.monotonic()
            at = _value(conn, "select date_trunc('second', now()) + interval '45 s'")
            made = conn.execute(SCHEDULE.encode(), {"n": n, "at": at}).fetchone()
            assert made == (n,)
            registering = time.monotonic() - begun
            due = _value(conn, "select count(*) from queue.schedules where next_run_at = %s", at)
            if due != n:
                sys.exit(f"{due} schedules of {n} are due at {at}: registering took too long")
            while sum(worker.jobs for worker in workers) < n:
                time.sleep(0.05)
                if time.monotonic() > begun + 120:
                    sys.exit("not all jobs came")
            time.sleep(0.5)
        deferred, done, jobs = conn.execute(
            "select extract(epoch from max(r.decided_at) - %s)::float,"
            " extract(epoch from max(j.finished_at) - %s)::float, count(*)"
            " from queue.jobs j join queue.schedule_runs r on r.job_id = j.id"
            " where (j.args ->> 'scheduled_for')::timestamptz = %s",
            (at, at, at),
        ).fetchone() or (0, 0, 0)
        broken = conn.execute("select * from queue.check()").fetchall()
        if jobs != n or broken:
            sys.exit(f"{jobs} jobs instead of {n}; queue.check(): {broken}")
        return registering, deferred, done


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--schedules", type=int, default=10_000, help="due at once (10,000)")
    parser.add_argument("--seconds", type=int, default=15, help="of the start latency's run (15)")
    options = parser.parse_args()
    report = Report()
    with bench(options) as on:
        if options.only in "start":
            delays = [d for _ in range(options.runs) for d in start_latency(on, options.seconds)]
            for name, part in (("p50", 0.5), ("p90", 0.9), ("max", 1.0)):
                print(f"start after the second, {name:<10}{percentile(delays, part):>10.2f} ms")
            report.below("start after the second, p50", percentile(delays, 0.5), LIMIT_START, "ms")
        if options.only in "rush":
            runs = [rush(on, options.schedules) for _ in range(options.runs)]
            for registering, deferred, done in runs:
                print(
                    f"{options.schedules} schedules: registered in {registering:.1f} s, due in one "
                    f"second, deferred after {deferred:.2f} s, done after {done:.2f} s"
                )
            median = statistics.median(deferred for _, deferred, _ in runs)
            report.below("all deferred after", median, LIMIT_DEFERRED, "s")
    report.end(options)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The cost of an operator's calls with a million jobs: the time, and the number of rows read.

    bench/bench_operations.py [--jobs N] [--only TEXT] [--check]

Databases with N jobs that have ended, are ready, wait for their time, or wait behind 10,000 locks;
and with N/50 that have a share and two keys, where only changes are measured.
The rows are counted by the tables' statistics of the transaction: they don't depend on the machine.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, LiteralString

import psycopg
from common import Bench, Report, arguments, bench

DEFER: LiteralString = """
select count(*) from queue.defer_many((
  select jsonb_agg(jsonb_build_object('task', 'task ' || n %% 5, 'queue', 'q' || n %% 3,
    'args', jsonb_build_object('n', n, 'name', md5(n::text))) || {more})
  from generate_series(%(first)s::int, %(last)s::int) n))
"""
# Their ends are spread over the last two hours; a few failed, a few were cancelled.
FINISH: LiteralString = """
with gone as (delete from queue.active_job returning id)
insert into queue.finished (id, finished_at, started_at, worker_id, attempts, state)
select g.id, now() - (%(jobs)s - g.id) * (interval '2 hours' / %(jobs)s),
  now() - (%(jobs)s - g.id) * (interval '2 hours' / %(jobs)s) - interval '20 ms', 1, 1,
  case when g.id %% 5000 = 0 then 'failed' when g.id %% 7001 = 0 then 'cancelled'
    else 'succeeded' end
from gone g order by g.id
"""
ROWS: LiteralString = """
select coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)
from pg_stat_xact_user_tables where schemaname = 'queue'
"""
LIST: LiteralString = """
select id, queue, task, state, reason, priority, attempts, created_at, description
from queue.jobs where id < %(middle)s order by id desc limit 50
"""
# The query of `pgdefer job tail`.
TAIL: LiteralString = """
select id, task, queue, state, finished_at from queue.jobs
where finished_at > now() - interval '10 minutes' order by finished_at desc limit 10
"""

FILLS: dict[str, LiteralString] = {
    "finished": "'{}'",
    "ready": "'{}'",
    "scheduled": """'{"scheduled_at": "2999-01-01T00:00:00Z"}'""",
    "locked": "jsonb_build_object('lock', 'lock ' || n %% 10000)",
    "keyed": """jsonb_build_object('share', 'share ' || n %% 20, 'concurrency',
      '[{"key": "a", "limit": 50, "weight": 3}, {"key": "b", "limit": 7, "weight": 2}]'::jsonb)""",
}


@dataclasses.dataclass
class Call:
    """A statement, and the most time that it may take."""

    name: str
    statement: LiteralString
    milliseconds: float
    rows: float


def pages(state: str) -> list[Call]:
    """Return the calls that list jobs, if most jobs are in one state."""
    calls = [
        Call("job ls", LIST, 200, 3000),
        Call("job ls, from the middle", LIST, 200, 3000),
        Call("get", "select * from queue.jobs where id = %(middle)s", 50, 100),
        Call("why", "select queue.why(%(middle)s)", 50, 100),
        Call("peek 50", "select * from queue.peek(n => 50)", 200, 3000),
        Call("search, a page", "select * from queue.search(max_jobs => 50)", 200, 3000),
        Call("search a text", "select * from queue.search('name', max_jobs => 50)", 200, 3000),
        Call(
            "search in vain, 1 MB",
            "select * from queue.search('nowhere', max_bytes => 1000000)",
            400,
            60000,
        ),
        Call(
            "search a queue in vain, 2 MB",
            "select * from queue.search(queue => 'nowhere', max_bytes => 2000000)",
            400,
            120000,
        ),
        Call("tail", TAIL, 400, 3e5),
        Call("health", "select * from queue.health()", 500, 150000),
    ]
    calls += [
        Call(f"search {each}", f"select * from queue.search(state => '{each}')", limit, rows)
        for each, limit, rows in (
            *([(state, 200, 3000)] if state != "blocked" else []),
            ("failed", 200, 3000),
            ("cancelled", 200, 3000),
            ("held", 200, 3000),
            ("upstream_failed", 200, 3000),
            ("waiting", 200, 3000),
            # the search reads the newest 20,000, or all that have not ended
            ("blocked", 400, 1e5),
            ("running", 1000, 1.1e6),
        )
    ]
    return calls


# They read jobs that have not ended, or ended within the hour: N rows of some tables.
FIGURES = [
    Call("queue ls", "select * from queue.queues", 2000, 2.1e6),
    Call("worker ls", "select * from queue.workers", 1000, 1.1e6),
    Call("stats", "select * from queue.stats()", 8000, 1e7),
    Call("metrics", "select * from queue.metrics", 8000, 1e7),
    Call("autoscale_hint", "select * from queue.autoscale_hint()", 8000, 1e7),
]
# Each on 1,000 jobs that have not ended.
CHANGES = [
    Call("move 1,000", "select * from queue.move(%(ids)s, 'other')", 3000, 2e5),
    Call("set_priority 1,000", "select * from queue.set_priority(%(ids)s, 5)", 3000, 2e5),
    Call("fail_jobs 1,000", "select * from queue.fail_jobs(%(ids)s)", 3000, 2e5),
    Call("retry 1,000", "select * from queue.retry(%(ids)s)", 3000, 2e5),
    Call("done 1,000", "select * from queue.done(%(ids)s)", 3000, 2e5),
    Call("delete 1,000", "select * from queue.delete(%(ids)s)", 3000, 2e5),
]


def fill(connection: psycopg.Connection[Any], kind: str, jobs: int) -> None:
    """Defer N jobs and admit them; with locks, 10,000 of them."""
    step = 10000
    for first in range(1, jobs + 1, step):
        last = min(first + step - 1, jobs)
        statement = DEFER.replace("{more}", FILLS[kind])
        connection.execute(statement, {"first": first, "last": last})
    while connection.execute("select admitted from queue.tick()").fetchone() != (0,):
        pass
    if kind == "finished":
        connection.execute(FINISH, {"jobs": jobs})
    connection.execute("vacuum analyze")


def measure(
    connection: psycopg.Connection[Any], call: Call, values: dict[str, Any], runs: int
) -> tuple[float, float]:
    """Return the median of the milliseconds, and the rows that one run reads."""
    times, rows = [], 0.0
    for _ in range(runs):
        with connection.transaction():
            before = connection.execute(ROWS).fetchone()
            begun = time.perf_counter()
            connection.execute(call.statement, values).fetchall()
            times.append(1000 * (time.perf_counter() - begun))
            after = connection.execute(ROWS).fetchone()
            assert before
            assert after
            rows = float(after[0] - before[0])
    return statistics.median(times), rows


def scenario(
    on: Bench, kind: str, jobs: int, report: Report, wanted: Callable[[str], bool]
) -> None:
    with on.fresh("ours") as database, on.connect(database) as connection:
        begun = time.perf_counter()
        fill(connection, kind, jobs)
        print(f"\n{jobs} jobs {kind}, made in {time.perf_counter() - begun:.0f} s", flush=True)
        states = {"finished": "succeeded", "locked": "blocked"}
        calls = [] if kind == "keyed" else [*pages(states.get(kind, kind)), *FIGURES]
        calls += [] if kind == "finished" else CHANGES
        values = {"middle": jobs // 2, "ids": list(range(1000, 3000, 2))}
        for call in calls:
            if wanted(call.name):
                runs = 1 if call in CHANGES else 3
                milliseconds, rows = measure(connection, call, values, runs)
                report.below(call.name, milliseconds, call.milliseconds, "ms")
                report.below("", rows, call.rows, "rows")
        broken = connection.execute("select * from queue.check() limit 5").fetchall()
        if broken:
            report.missed.append(f"{kind}: queue.check() says {broken}")
            print(report.missed[-1])


def main() -> None:
    parser = arguments(__doc__, runs=1)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="in each database (1,000,000)")
    options = parser.parse_args()
    report = Report()
    with bench(options) as on:
        for kind in FILLS:
            jobs = options.jobs // 50 if kind == "keyed" else options.jobs
            scenario(on, kind, jobs, report, lambda name: options.only in name)
    report.end(options)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The server's CPU time to defer a job, by the options of the job; for Linux.

    bench/bench_defer.py [--runs N] [--only TEXT] [--calls N]

One session defers one job after the other, without waiting for the disk, or a thousand in one call;
the CPU time is that of its server process, so that neither the client nor other processes count.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from common import arguments, bench

Connection = psycopg.Connection[Any]

# The registered defaults of each task; a job of the task `plain` has no others.
TASKS = {"plain": {}, "locked": {"lock": "a:{n}"}, "urgent": {"deadline": "1 hour"}}
# A job with each set of options, as defer_many takes it.
KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a queue and a priority": {"queue": "q", "priority": 1},
    "a lock": {"lock": "a"},
    "its task's lock, a:{n}": {"task": "locked"},
    "its task's deadline": {"task": "urgent"},
    "scheduled_at": {"scheduled_at": "2100-01-01T00:00:00Z"},
    "a concurrency key": {"concurrency_key": "k", "concurrency_limit": 2},
    "a need": {"needs": [0]},
    "headers": {"options": {"headers": {"trace": "x"}}},
    "a retry policy of its own": {"options": {"retry": {"max_attempts": 3}}},
}
DEFER: LiteralString = """
select queue.defer(j.task, j.args, j.queue, j.priority, j.lock, null, j.scheduled_at, null,
                   j.needs, j.concurrency_key, j.concurrency_limit, j.options)
from (select * from jsonb_to_record(%s) j (
  task text, args jsonb, queue text, priority integer, lock text, scheduled_at timestamptz,
  needs bigint[], concurrency_key text, concurrency_limit integer, options jsonb) offset 0) j
"""
NOTHING: LiteralString = DEFER.replace("queue.defer(", "num_nulls(")
MANY: LiteralString = "select count(*) from queue.defer_many(%s)"
TRIGGER: LiteralString = "insert into traced (n) select generate_series(1, 1000)"


def cpu(connection: Connection) -> float:
    """Return the CPU time of a session's server process, in microseconds."""
    text = Path(f"/proc/{connection.info.backend_pid}/schedstat").read_text("ascii")
    return int(text.split()[0]) / 1000


def measured(connection: Connection, statement: LiteralString, given: str | None, n: int) -> float:
    """Return the CPU time of one of n calls, once the session has its plans."""
    parameters = None if given is None else [given]
    for _ in range(min(n, 20)):
        connection.execute(statement, parameters, prepare=True)
    before = cpu(connection)
    for _ in range(n):
        connection.execute(statement, parameters, prepare=True)
    return (cpu(connection) - before) / n


def show(connection: Connection, name: str, more: dict[str, Any], runs: int, calls: int) -> None:
    """Print the cost of a job that has `more`."""
    job = {"task": "plain", "args": {"n": 1}, **more}
    single, empty, many = [], [], []
    for _ in range(runs):
        given = json.dumps(job)
        empty.append(measured(connection, NOTHING, given, calls))
        single.append(measured(connection, DEFER, given, calls))
        many.append(measured(connection, MANY, json.dumps([job] * 1000), 3) / 1000)
    of_one = statistics.median(single) - statistics.median(empty)
    print(f"{name:<30}{of_one:>8.0f}{statistics.median(many):>26.1f}", flush=True)


def main() -> None:
    parser = arguments(__doc__, runs=5)
    parser.add_argument("--calls", type=int, default=1000, help="of each run (1,000)")
    options = parser.parse_args()
    with bench(options) as on, on.fresh("ours") as database, on.connect(database) as connection:
        connection.execute("set synchronous_commit = off")
        for task, defaults in TASKS.items():
            connection.execute("select queue.register_task(%s, %s)", [task, json.dumps(defaults)])
        connection.execute("insert into queue.log (id, task) values (0, 'needed')")
        connection.execute("create table traced (n integer)")
        connection.execute(
            "create trigger d after insert on traced for each row"
            " execute function queue.defer_trigger('plain')"
        )
        print(f"{'us of CPU for a job with':<30}{'defer':>8}{'of 1,000 in defer_many':>26}")
        for kind, more in KINDS.items():
            if options.only in kind:
                show(connection, kind, more, options.runs, options.calls)
        rows = statistics.median(
            measured(connection, TRIGGER, None, 3) / 1000 for _ in range(options.runs)
        )
        print(f"{'a row of a trigger, of 1,000':<30}{rows:>34.1f}")
        if options.only in (kind := "nothing, by a limited role"):
            connection.execute("create role bench_limited")
            connection.execute(
                "select queue.grant_access('bench_limited', 'producer', '{default}')"
            )
            connection.execute("set session authorization bench_limited")
            show(connection, kind, {}, options.runs, options.calls)
        print("\nmedians; of defer less what the same statement costs without it")


if __name__ == "__main__":
    main()

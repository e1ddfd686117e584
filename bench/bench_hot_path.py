#!/usr/bin/env python3
"""The calls that every job goes through, beside the same work on a bare table.

    bench/bench_hot_path.py [--runs N] [--only TEXT] [--seconds N] [--slower-sync US] [--pin] [--check]

Both sides run under pgbench with prepared statements, on one server that syncs to disk, in turn,
each run in a fresh copy of its database. The task is registered, as those of workers are. The jobs
to drain were deferred just before and are not admitted yet, so admission is part of the figures. No
task has defaults unless the case says so; then `defer` looks for those of its task. The bare table
has a key, a state with a partial index, and args. SKIP LOCKED prevents claiming a row twice, and
finishing deletes the row.
"""

from __future__ import annotations

import functools
import json

from common import Bench, Case, alternate, arguments, bench

JOBS = 1000
BATCH = 50

RANDOM = "\\set n random(1, 1000000)\n"

BARE_INSERT = f"{RANDOM}insert into q (args) values (jsonb_build_object('n', :n::int));\n"
BARE_INSERT_MANY = f"""
insert into q (args) select jsonb_build_object('n', g) from generate_series(1, {JOBS}) g;
"""
BARE_CLAIM_DELETE = f"""
delete from q
using (select id from q where state = 0 order by id for update skip locked limit {BATCH}) c
where q.id = c.id returning q.id;
"""
BARE_CYCLE = f"""{BARE_INSERT}
update q set state = 1
from (select id from q where state = 0 order by id for update skip locked limit 1) c
where q.id = c.id returning q.id \\gset
delete from q where id = :id;
"""

DEFER = f"{RANDOM}select queue.defer('noop', jsonb_build_object('n', :n::int));\n"
DEFER_MANY = "select * from queue.defer_many(:jobs::jsonb);\n"
# pgbench has no loops: the server assembles the outcomes of the fetched jobs.
OUTCOMES = """
select '[' || coalesce(string_agg('{"id":' || id || ',"claim":' || claim
                                  || ',"outcome":"succeeded"}', ','), '') || ']' as outcomes
"""
TWO_CALLS = f"""{OUTCOMES} from queue.fetch(:worker, null, {BATCH}) \\gset
select count(*) from queue.finish_many(:outcomes::jsonb);
"""
ONE_CALL = f"""{OUTCOMES}
from queue.finish_and_fetch(:worker, :outcomes::jsonb, null, {BATCH}, null) \\gset
"""
CYCLE = f"""{DEFER}
select id, claim from queue.fetch(:worker, null, 1) \\gset
select queue.succeed(:id, :claim);
"""


def jobs(n: int) -> str:
    return json.dumps([{"task": "noop", "args": {"n": i}} for i in range(n)], separators=(",", ":"))


def fill_bare(on: Bench, database: str, n: int) -> None:
    with on.connect(database) as connection:
        connection.execute(
            "insert into q (args) select jsonb_build_object('n', g) from generate_series(1, %s) g",
            [n],
        )
    on.settle(database)


def fill_ours(on: Bench, database: str, n: int) -> str:
    """Defer n jobs; return the id of a worker."""
    with on.connect(database) as connection:
        for _ in range(n // JOBS):
            connection.execute("select count(*) from queue.defer_many(%s)", [jobs(JOBS)])
        row = connection.execute("select queue.register_worker('bench')").fetchone()
    on.settle(database)
    assert row is not None
    return str(row[0])


def run_bare(
    on: Bench,
    script: str,
    *,
    per_transaction: int = 1,
    filled: int = 0,
    clients: int = 1,
    seconds: int | None = None,
    transactions: int | None = None,
) -> float:
    with on.fresh("bare") as database:
        fill_bare(on, database, filled)
        return per_transaction * on.pgbench(
            database, script, clients=clients, seconds=seconds, transactions=transactions
        )


def run_ours(
    on: Bench,
    script: str,
    *,
    per_transaction: int = 1,
    filled: int = 0,
    clients: int = 1,
    seconds: int | None = None,
    transactions: int | None = None,
    finished: int | None = None,
    many: int = 0,
    defaults: str = "{}",
) -> float:
    """Return jobs per second.

    `finished`: how many must have ended by then; `defaults`: those of another task.
    """
    with on.fresh("ours") as database:
        with on.connect(database) as connection:
            connection.execute("select queue.register_task('other', %s)", [defaults])
        worker = fill_ours(on, database, filled)
        variables = {"worker": worker, "outcomes": "[]"}
        if many:
            variables["jobs"] = jobs(many)
        rate = on.pgbench(
            database,
            script,
            clients=clients,
            seconds=seconds,
            transactions=transactions,
            variables=variables,
        )
        with on.connect(database) as connection:
            if finished is not None:
                done = connection.execute("select count(*) from queue.finished").fetchone()
                assert done == (finished,), f"{done} have ended, not {finished}"
            broken = connection.execute("select * from queue.check() limit 5").fetchall()
            assert not broken, broken
        return per_transaction * rate


def cases(on: Bench, seconds: int, drained: int) -> list[Case]:
    ours = functools.partial(run_ours, on)
    bare = functools.partial(run_bare, on)
    found = [
        Case(
            f"defer, {clients} client{'s' if clients > 1 else ''}",
            functools.partial(ours, DEFER, clients=clients, seconds=seconds),
            functools.partial(bare, BARE_INSERT, clients=clients, seconds=seconds),
            limit,
        )
        for clients, limit in ((1, 0.75), (8, 0.80))
    ]
    found += [
        Case(
            "defer, 8 clients, others have defaults",
            functools.partial(ours, DEFER, clients=8, seconds=seconds, defaults='{"queue": "q"}'),
            functools.partial(bare, BARE_INSERT, clients=8, seconds=seconds),
            None,
        ),
        Case(
            f"defer_many of {JOBS:,}",
            functools.partial(ours, DEFER_MANY, per_transaction=JOBS, seconds=seconds, many=JOBS),
            functools.partial(bare, BARE_INSERT_MANY, per_transaction=JOBS, seconds=seconds),
            0.35,
        ),
    ]
    drain = {
        "per_transaction": BATCH,
        "filled": drained + JOBS,
        "transactions": drained // BATCH,
    }
    claim_delete = functools.partial(bare, BARE_CLAIM_DELETE, **drain)
    found += [
        Case(
            f"fetch {BATCH}, finish {BATCH}: two calls",
            functools.partial(ours, TWO_CALLS, finished=drained, **drain),
            claim_delete,
            0.33,
        ),
        Case(
            f"fetch {BATCH}, finish {BATCH}: one call",
            functools.partial(ours, ONE_CALL, finished=drained - BATCH, **drain),
            claim_delete,
            0.45,
        ),
    ]
    found += [
        Case(
            f"defer, claim, finish; {filled:,} before",
            functools.partial(ours, CYCLE, filled=filled, seconds=seconds),
            functools.partial(bare, BARE_CYCLE, filled=filled, seconds=seconds),
            0.6,
        )
        for filled in (0, 1000)
    ]
    return found


def main() -> None:
    parser = arguments(__doc__, runs=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each run (3)")
    parser.add_argument(
        "--drained", type=int, default=200_000, help="jobs of each run that drains (200,000)"
    )
    parser.add_argument(
        "--slower-sync",
        type=int,
        default=0,
        metavar="US",
        help="make each commit wait this many microseconds longer, as on a slower disk",
    )
    options = parser.parse_args()
    # With commit_siblings = 0, commit_delay makes every commit wait.
    slow = {"commit_delay": str(options.slower_sync), "commit_siblings": "0"}
    with bench(options, slow if options.slower_sync else None) as on:
        if options.slower_sync:
            print(f"Each commit waits {options.slower_sync} us more.\n")
        alternate(cases(on, options.seconds, options.drained), options, "pgdefer", "bare table")


if __name__ == "__main__":
    main()

"""Lists are paged: what a page reads does not grow with the number of jobs.

bench/bench_operations.py measures the same, and more, with a million jobs.
"""

from __future__ import annotations

import time

import pytest

from pgdefer.database.source import PsycopgConnection

pytestmark = pytest.mark.client

JOBS = 20_000
SOAK = 1_000_000
STEP = 20_000
ROWS = """
    select coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)
    from pg_stat_xact_user_tables where schemaname = 'queue'
"""
LIST = "select * from queue.jobs where id < 15000 order by id desc limit 50"
# States with few or no jobs; running jobs are searched among all unfinished ones.
STATES = "scheduled waiting upstream_failed ready held failed cancelled".split()
# The query of `pgdefer job tail`.
TAIL = """
    select id, state from queue.jobs
    where finished_at > now() - interval '1 second' order by finished_at desc limit 10
"""
CALLS = [
    LIST,
    "select id, state from queue.jobs order by id desc limit 50",
    "select * from queue.jobs where id = 10000",
    "select queue.why(10000)",
    "select * from queue.peek(n => 50)",
    "select * from queue.search(max_jobs => 50)",
    "select * from queue.search('name', max_jobs => 50)",
    "select * from queue.search(state => 'STATE', max_jobs => 50)",
    "select * from queue.search(state => 'failed', max_jobs => 50)",
    "select * from queue.search('nowhere', max_bytes => 50000)",
    "select * from queue.search(queue => 'nowhere', max_bytes => 50000)",
    "select * from queue.attempts where job_id = 10000",
    "select * from queue.graph(10000)",
    *(f"select * from queue.search(state => '{each}', max_jobs => 50)" for each in STATES),
]
# This searches the newest 20,000.
AMONG_MANY = ["select * from queue.search(state => 'blocked', max_jobs => 50)"]


@pytest.mark.long
@pytest.mark.parametrize("state", ["succeeded", "ready", "scheduled", "blocked"])
@pytest.mark.parametrize("is_analyzed", [True, False])
@pytest.mark.parametrize("jobs", [JOBS, pytest.param(SOAK, marks=pytest.mark.soak)])
def test_pages_read_few_rows(
    conn: PsycopgConnection, state: str, is_analyzed: bool, jobs: int
) -> None:
    more = {
        "scheduled": """'{"scheduled_at": "2999-01-01"}'""",
        "blocked": """jsonb_build_object('lock', 'l' || n % 100)""",
    }.get(state, "'{}'")
    for first in range(1, jobs, STEP):
        conn.execute(f"""
            select count(*) from queue.defer_many((
              select jsonb_agg(
                jsonb_build_object('task', 't', 'args', jsonb_build_object('name', n)) || {more})
              from generate_series({first}, {first + STEP - 1}) n))
        """)
    while conn.execute("select admitted from queue.tick()").fetchone() != (0,):
        pass
    if state == "succeeded":
        conn.execute("""
            with gone as (delete from queue.active_job returning id)
            insert into queue.finished (id, finished_at, attempts, state)
            select id, now() - interval '1 hour', 1,
              case when id % 1000 = 0 then 'failed' else 'succeeded' end
            from gone order by id
        """)
    if is_analyzed:
        conn.execute("vacuum analyze")
    # a vacuum makes the ranges of finished_at known
    calls = CALLS + ([TAIL] if is_analyzed else []) + (AMONG_MANY if jobs == SOAK else [])
    for call in calls:
        with conn.transaction():
            (before,) = conn.execute(ROWS).fetchone() or (0,)
            begun = time.monotonic()
            conn.execute(call.replace("STATE", state))
            took = time.monotonic() - begun
            (after,) = conn.execute(ROWS).fetchone() or (0,)
        assert after - before < jobs / 5, call
        assert took < (2 if jobs == JOBS else 5), call

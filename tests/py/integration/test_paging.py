"""Lists are paged: what a page reads does not grow with the number of jobs.

bench/bench_operations.py measures the same, and more, with a million jobs.
"""

from __future__ import annotations

import pytest

from pgdefer._connect import Connection

JOBS = 20_000
ROWS = """
    select coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)
    from pg_stat_xact_user_tables where schemaname = 'queue'
"""
LIST = "select * from queue.jobs where id < 15000 order by id desc limit 50"
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
]


@pytest.mark.parametrize("state", ["succeeded", "ready", "scheduled", "blocked"])
@pytest.mark.parametrize("is_analyzed", [True, False])
def test_pages_read_few_rows(conn: Connection, state: str, is_analyzed: bool) -> None:
    more = {
        "scheduled": """'{"scheduled_at": "2999-01-01"}'""",
        "blocked": """jsonb_build_object('lock', 'l' || n % 100)""",
    }.get(state, "'{}'")
    conn.execute(f"""
        select count(*) from queue.defer_many((
          select jsonb_agg(
            jsonb_build_object('task', 't', 'args', jsonb_build_object('name', n)) || {more})
          from generate_series(1, {JOBS}) n))
    """)
    while conn.execute("select admitted from queue.tick()").fetchone() != (0,):
        pass
    if state == "succeeded":
        conn.execute("""
            with gone as (delete from queue.live returning id)
            insert into queue.finished (id, finished_at, attempts, state)
            select id, now(), 1, case when id % 1000 = 0 then 'failed' else 'succeeded' end
            from gone order by id
        """)
    if is_analyzed:
        conn.execute("vacuum analyze")
    for call in CALLS:
        with conn.transaction():
            (before,) = conn.execute(ROWS).fetchone() or (0,)
            conn.execute(call.replace("STATE", state))
            (after,) = conn.execute(ROWS).fetchone() or (0,)
        assert after - before < JOBS / 5, call

"""What many sleeping, waiting and awaited jobs cost a call: in pages that it reads, not in time."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from pgdefer import App, current_job
from pgdefer.worker.worker import Worker

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
FAR = "2999-01-01T00:00:00Z"
many = pytest.mark.parametrize("n", [1_000, pytest.param(100_000, marks=pytest.mark.soak)])


def cost(conn: Connection, query: str) -> int:
    """Keep the rows of a query in the table answer; return how many pages it has touched."""
    conn.execute("drop table if exists answer")
    explain = "explain (analyze, buffers, format json, timing off) create temp table answer as "
    ((((plan),),),) = conn.execute((explain + query).encode()).fetchall()
    return int(plan["Plan"]["Shared Hit Blocks"]) + int(plan["Plan"]["Shared Read Blocks"])


def answer(conn: Connection) -> list[tuple[Any, ...]]:
    return conn.execute("select * from answer").fetchall()


def register(conn: Connection) -> int:
    query = "select queue.register_worker('w', null, '{\"dead_after\": \"1 day\"}')"
    ((worker,),) = conn.execute(query).fetchall()
    return int(worker)


def defer(conn: Connection, n: int) -> None:
    for first in range(0, n, 1_000):
        query = "select queue.defer('t') from generate_series(1, %s)"
        conn.execute(query, [min(1_000, n - first)])


def suspend_all(conn: Connection, worker: int, call: str) -> None:
    """Claim all jobs, and let each make a call that ends its claim."""
    query = f"select queue.{call} from queue.fetch(%s, null, 1000) f"
    while conn.execute(query.encode(), [worker]).fetchall():
        pass
    conn.execute("select queue.tick()")
    conn.execute("vacuum analyze")


def cost_of_a_job(conn: Connection, worker: int) -> int:
    """The least pages that the fetch of a new job touches."""
    costs = []
    for _ in range(8):
        conn.execute("select queue.defer('t')")
        costs.append(cost(conn, f"select id, claim from queue.fetch({worker})"))
        ((id, claim),) = answer(conn)
        conn.execute("select queue.succeed(%s, %s)", [id, claim])
    return min(costs)


@many
def test_sleepers_cost_a_fetch_nothing(conn: Connection, n: int) -> None:
    worker = register(conn)
    conn.execute("vacuum analyze")
    before = cost_of_a_job(conn, worker)
    defer(conn, n)
    suspend_all(conn, worker, f"sleep(f.id, f.claim, 's', '{FAR}')")
    assert cost_of_a_job(conn, worker) <= before * 1.2 + 10


def cost_of_a_signal(conn: Connection, worker: int) -> int:
    """The least pages that the fetch of a job touches whose signal has just come."""
    costs = []
    for n in range(8):
        query = "select min(id) from queue.jobs where state = 'waiting'"
        ((waits,),) = conn.execute(query).fetchall()
        conn.execute("select queue.signal(%s, 's', %s)", [waits, str(n)])
        costs.append(cost(conn, f"select id, claim, steps from queue.fetch({worker})"))
        ((id, claim, steps),) = answer(conn)
        assert (id, steps[f"w{'' if n == 0 else n}"]) == (waits, n)
        conn.execute(f"select queue.wait(%s, %s, 'w{n + 1}', 's')".encode(), [id, claim])
        conn.execute("select queue.tick()")
    return min(costs)


@many
def test_one_of_many_waits_ends(conn: Connection, n: int) -> None:
    worker = register(conn)
    defer(conn, 1)
    suspend_all(conn, worker, "wait(f.id, f.claim, 'w', 's')")
    before = cost_of_a_signal(conn, worker)
    conn.execute("select queue.delete(array(select id from queue.jobs))")
    defer(conn, n)
    suspend_all(conn, worker, "wait(f.id, f.claim, 'w', 's')")
    assert cost_of_a_signal(conn, worker) <= before * 1.2 + 10


def cost_of_children(conn: Connection, worker: int, n: int) -> float:
    """The pages that a child's defer, claim and end touch; the parent then continues."""
    conn.execute("select queue.defer('parent')")
    ((parent, claim),) = conn.execute(
        "select id, claim from queue.fetch(%s, null, 1)", [worker]
    ).fetchall()
    total = 0
    for first in range(0, n, 500):
        rows = f"generate_series(1, {min(500, n - first)})"
        total += cost(conn, f"select queue.defer('child') as id from {rows}")
    query = "select array_agg(id) from queue.jobs where task = 'child' and state = 'ready'"
    ((ids,),) = conn.execute(query).fetchall()
    assert len(ids) == n
    conn.execute("select queue.await_jobs(%s, %s, 'all', %s)", [parent, claim, ids])
    left = n
    while left:
        total += cost(conn, f"select id, claim from queue.fetch({worker}, null, 50)")
        rows = answer(conn)
        assert parent not in [id for id, _ in rows]
        ends = (
            "select * from queue.finish_many((select jsonb_agg(jsonb_build_object('id', id,"
            " 'claim', claim, 'outcome', 'succeeded')) from kept))"
        )
        conn.execute("drop table if exists kept")
        conn.execute("create temp table kept as select * from answer")
        total += cost(conn, ends)
        left -= len(rows)
    ((id, claim),) = conn.execute("select id, claim from queue.fetch(%s)", [worker]).fetchall()
    assert id == parent
    conn.execute("select queue.succeed(%s, %s)", [id, claim])
    return total / n


@pytest.mark.parametrize("n", [1_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_child_of_many_costs_what_one_of_few_does(conn: Connection, n: int) -> None:
    worker = register(conn)
    cost_of_children(conn, worker, 50)
    few = cost_of_children(conn, worker, 50)
    assert cost_of_children(conn, worker, n) <= few * 1.5


@pytest.mark.parametrize("n", [100, pytest.param(1_000, marks=pytest.mark.soak)])
async def test_a_worker_with_one_slot_runs_a_parent_and_its_children(dsn: str, n: int) -> None:
    app = App(dsn)

    @app.task(name="child")
    async def child(i: int) -> int:
        return i

    @app.task(name="parent")
    async def parent() -> int:
        return sum(await current_job().gather_async([child.prepare(i) for i in range(n)]))

    job = parent.defer()
    await Worker(app, drain=True, concurrency=1).run_async()
    assert await job.result_async(60) == n * (n - 1) // 2
    await app.close_async()


def test_a_step_writes_few_bytes_of_wal(conn: Connection) -> None:
    """At most 300, and its value."""
    worker = register(conn)
    defer(conn, 1)
    ((id, claim),) = conn.execute("select id, claim from queue.fetch(%s)", [worker]).fetchall()
    written = []
    for n in range(20):
        call = f"select queue.finish_step({id}, {claim}, 'charge#{n + 1}', '12345678')"
        explain = f"explain (analyze, wal, format json, timing off) {call}"
        ((((plan),),),) = conn.execute(explain.encode()).fetchall()
        written.append(int(plan["Plan"]["WAL Bytes"]))
    ((value,),) = conn.execute("select pg_column_size('12345678'::jsonb)").fetchall()
    assert min(written) <= 300 + value, written

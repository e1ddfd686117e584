"""Clients that freeze at the worst moment keep nobody else from fetching."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from workers import wait_for

Connection = psycopg.Connection[Any]

BLOCKED = """
select a.wait_event from pg_stat_activity a where a.pid = %s and a.state = 'active'
"""


def fetch(connection: Connection, worker: int, max_jobs: int = 20) -> list[Any]:
    return connection.execute(
        "select id, claim, task from queue.fetch(%s, max_jobs => %s)", [worker, max_jobs]
    ).fetchall()


def register(connection: Connection, dead_after: str = "1 day") -> int:
    info = json.dumps({"dead_after": dead_after})
    row = connection.execute("select queue.register_worker('w', info => %s)", [info]).fetchone()
    assert row is not None
    return int(row[0])


def has_claims(connection: Connection, worker: int) -> bool:
    """Whether a fetch whose answer nobody reads has committed its claims."""
    row = connection.execute(
        "select count(*) > 0 from queue.jobs where worker_id = %s", [worker]
    ).fetchone()
    return row == (True,)


@pytest.mark.long
@pytest.mark.parametrize(("bytes_each", "jobs"), [(300_000, 20), (1_900, 500), (10_000_000, 5)])
def test_a_worker_that_freezes_while_it_receives_a_fetch(
    connect: Callable[..., Connection], bytes_each: int, jobs: int
) -> None:
    conn, other, frozen = connect(), connect(), connect()
    for _ in range(jobs):
        conn.execute(
            "select queue.defer('large', jsonb_build_object('data', repeat('x', %s)))", [bytes_each]
        )
    freezes, works = register(frozen, "1 s"), register(other)
    # it sends its calls, one after the other, and reads no answer to its end
    for _ in range(2):
        frozen.pgconn.send_query(
            f"select * from queue.fetch({freezes}, max_jobs => {jobs})".encode()
        )
        wait_for(lambda: has_claims(conn, freezes))
        frozen.pgconn.consume_input()
        if frozen.pgconn.is_busy():
            break
        while frozen.pgconn.get_result() is not None:
            pass
    # others continue at once, also with new jobs
    other.execute("set statement_timeout = '60 s'")
    conn.execute("select queue.defer('small', priority => 1)")
    ((id, claim, task),) = wait_for(lambda: fetch(other, works, 1))
    assert task == "small"
    other.execute("select queue.succeed(%s, %s)", [id, claim])
    # and once the frozen worker is declared dead others get its jobs
    wait_for(
        lambda: other.execute("select sum(reaped) > 0 from queue.tick()").fetchone() == (True,)
    )
    found: set[int] = set()

    def all_found() -> bool:
        other.execute("select from queue.tick()")
        found.update(row[0] for row in fetch(other, works, jobs))
        # claims that were handed out count as crashed, and go to a worker that runs nothing beside them
        alone = "select id from queue.fetch(queue.register_worker('alone'))"
        found.update(row[0] for row in other.execute(alone).fetchall())
        return len(found) == jobs

    wait_for(all_found)
    frozen.close()


@pytest.mark.parametrize("call", ["fail_jobs(%s)", "retry(%s)", "delete(%s)", "move(%s, 'to')"])
def test_an_operator_that_freezes_while_it_receives_an_answer(
    connect: Callable[..., Connection], call: str
) -> None:
    conn, frozen = connect(), connect()
    conn.execute(
        'select count(*) from queue.defer_many((select jsonb_agg(\'{"task": "t"}\'::jsonb)'
        " from generate_series(1, 1000)))"
    )
    # the longest possible answer
    conn.execute("update queue.log set id = id + 8000000000000000000")
    worker = register(conn)
    ids = "array(select id from queue.jobs order by id)"
    frozen.pgconn.send_query(f"select * from queue.{call % ids}".encode())
    conn.execute("select queue.defer('first', priority => 1)")
    conn.execute("set statement_timeout = '60 s'")
    # it waits for the call, but not for its client
    assert conn.execute("select task from queue.fetch(%s)", [worker]).fetchone() == ("first",)
    wait_for(
        lambda: (
            conn.execute(
                "select state from pg_stat_activity where pid = %s", [frozen.info.backend_pid]
            ).fetchone()
            == ("idle",)
        )
    )
    frozen.close()


def test_who_idles_with_the_admission_lock_is_ended(connect: Callable[..., Connection]) -> None:
    conn, other = connect(), connect()
    idle = connect(autocommit=False)
    worker = register(conn)
    conn.execute("select queue.defer('t')")
    idle.execute("select * from queue.tick()")
    other.execute("set statement_timeout = '60 s'")
    assert fetch(other, worker)
    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        idle.execute("select 1")


def look_often(conn: Connection, every: str = "100ms") -> None:
    """Have those that wait for the admission lock look at its holder so often."""
    conn.execute(f"select test.change('queue._lock_admission', '(''2s'')', '(''{every}'')')")


def send(connection: Connection, query: str) -> None:
    """Send a query in a pipeline that stays open, and read nothing."""
    if connection.pgconn.pipeline_status == psycopg.pq.PipelineStatus.OFF:
        connection.pgconn.enter_pipeline_mode()
    connection.pgconn.send_query_params(query.encode(), None)
    connection.pgconn.send_flush_request()
    connection.pgconn.flush()


def waits_in(conn: Connection, connection: Connection, *events: str) -> None:
    pid = [connection.info.backend_pid]
    wait_for(lambda: (row := conn.execute(BLOCKED, pid).fetchone()) and row[0] in events)


@pytest.mark.parametrize("has_waited", [False, True])
@pytest.mark.parametrize(
    ("answer", "event"),
    [("from", "ClientRead"), ("repeat('x', 10000) from generate_series(1, 20000),", "ClientWrite")],
)
def test_who_stops_in_a_pipeline_with_the_admission_lock_is_ended(
    connect: Callable[..., Connection], answer: str, event: str, has_waited: bool
) -> None:
    """The server does not count such a session as idle, so the next that waits ends it."""
    conn, other, frozen = connect(), connect(), connect()
    before = connect(autocommit=False)
    freezes = register(conn)
    conn.execute("select queue.defer('t') from generate_series(1, 2)")
    look_often(conn)
    if has_waited:
        before.execute("select * from queue.pause('other')")
    send(frozen, f"select {answer} queue.fetch({freezes}, max_jobs => 1)")
    if has_waited:
        waits_in(conn, frozen, "transactionid", "tuple")
        before.commit()
    waits_in(conn, frozen, event)
    other.execute("set statement_timeout = '60 s'")
    other.execute("select queue.resume('other')")
    left = "select count(*) from pg_stat_activity where pid = %s"
    wait_for(lambda: conn.execute(left, [frozen.info.backend_pid]).fetchone() == (0,))
    frozen.close()


@pytest.mark.parametrize(
    "queries",
    [
        ["select queue.heartbeat({worker})"],
        ["begin", "savepoint s", "select queue.pause('other')", "release s", "select 1"],
        ["select test.pauses()"],
    ],
)
def test_who_stops_after_it_took_the_lock_in_a_savepoint_is_ended(
    connect: Callable[..., Connection], queries: list[str]
) -> None:
    """The lock's row names a savepoint that is over: not its transaction."""
    conn, other, frozen = connect(), connect(), connect()
    conn.execute(
        """
        create function test.pauses() returns void language plpgsql as $$
        begin
          perform queue.pause('other');
        exception when division_by_zero then null;
        end $$
        """
    )
    worker = register(conn)
    conn.execute("select queue.defer('t')")
    look_often(conn)
    for query in queries:
        send(frozen, query.format(worker=worker))
    waits_in(conn, frozen, "ClientRead")
    assert conn.execute("select pid from queue._admission_holder()").fetchone() == (
        frozen.info.backend_pid,
    )
    other.execute("set statement_timeout = '60 s'")
    other.execute("select queue.resume('other')")
    left = "select count(*) from pg_stat_activity where pid = %s"
    wait_for(lambda: conn.execute(left, [frozen.info.backend_pid]).fetchone() == (0,))
    frozen.close()


def test_an_operator_who_idles_after_unblock_is_ended(connect: Callable[..., Connection]) -> None:
    conn, other = connect(), connect()
    idle = connect(autocommit=False)
    worker = register(conn)
    conn.execute("select queue.defer('t')")
    assert idle.execute("select queue.unblock()").fetchone() == (None,)
    other.execute("set statement_timeout = '60 s'")
    assert fetch(other, worker)
    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        idle.execute("select 1")


@pytest.mark.long
def test_who_works_with_the_admission_lock_is_not_ended(
    connect: Callable[..., Connection],
) -> None:
    """Its client sends one statement after the other, so it waits for that again and again."""
    conn, other, holder = connect(), connect(), connect()
    look_often(conn, "1s")
    send(holder, "select queue.pause('other')")
    waits_in(conn, holder, "ClientRead")
    other.pgconn.send_query(b"select queue.resume('other')")
    waits_in(conn, other, "transactionid", "tuple")
    # longer than five looks take, which may last twice as long
    for _ in range(200):
        send(holder, "select 1")
        conn.execute("select pg_sleep(0.05)")
    holder.pgconn.pipeline_sync()
    holder.pgconn.flush()
    results = []
    while not results or results[-1].status != psycopg.pq.ExecStatus.PIPELINE_SYNC:
        if (result := holder.pgconn.get_result()) is not None:
            results.append(result)
    assert [bytes(r.error_message) for r in results if r.error_message] == []
    assert len(results) == 202
    holder.close()


def test_the_holder_of_the_admission_lock_is_named_and_ended(
    connect: Callable[..., Connection],
) -> None:
    conn = connect()
    holder = connect(autocommit=False)
    worker = register(conn)
    conn.execute("select queue.defer('t')")
    assert conn.execute("select queue.unblock()").fetchone() == (None,)
    holder.execute("select * from queue.tick()")
    holder.execute("set local idle_in_transaction_session_timeout = 0")  # in bad faith
    pid = holder.info.backend_pid

    def named() -> bool:
        row = conn.execute(
            "select status, detail, fix from queue.health() where name = 'admission'"
        ).fetchone()
        assert row is not None
        return row[0] != "ok" and f"process {pid} " in row[1] and "queue.unblock()" in row[2]

    wait_for(named)
    assert conn.execute("select queue.unblock()").fetchone() == (pid,)
    conn.execute("set statement_timeout = '60 s'")
    assert fetch(conn, worker)
    with pytest.raises(psycopg.OperationalError):
        holder.execute("select 1")


def test_who_took_the_admission_lock_in_a_savepoint_is_named(
    connect: Callable[..., Connection],
) -> None:
    """Not those that have tried in vain, before and after, and keep their transactions open."""
    conn, before, holder, after = (connect() for _ in range(4))
    conn.execute("select queue.defer('t'), queue.tick()")
    tries = "select from queue.admission for update skip locked"
    before.execute("begin; select pg_current_xact_id()")
    holder.execute("begin; savepoint s; select queue.hold(1); release s")
    after.execute("begin; select pg_current_xact_id()")
    for other in (before, after):
        assert other.execute(tries).fetchall() == []
    named = conn.execute("select pid, state from queue._admission_holder()").fetchone()
    assert named == (holder.info.backend_pid, "idle in transaction")


def test_who_waits_for_a_transaction_does_not_look_again_and_again(
    connect: Callable[..., Connection],
) -> None:
    conn, other = connect(), connect()
    handler = connect(autocommit=False)
    worker = register(conn)
    conn.execute("select queue.defer('need')")
    ((need, claim, _),) = fetch(conn, worker)
    handler.execute("select queue.succeed(%s, %s)", [need, claim])
    # its end was not to be settled when it was deleted: nothing shows its commit
    conn.execute("select queue.defer('dependent', needs => array[%s]::bigint[])", [need])
    conn.execute("select from queue.tick()")
    handed = conn.execute("select xid::text, seq from queue.pending_settlement").fetchall()
    assert len(handed) == 1
    before = other.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
    for _ in range(5):
        conn.execute("select from queue.tick()")
        row = conn.execute(
            "select wait_for >= '50 ms' from queue.before_sleep(%s)", [worker]
        ).fetchone()
        assert row == (True,), "nobody looks 100 times a second"
        conn.execute("select queue.after_sleep(%s)", [worker])
    assert conn.execute("select xid::text, seq from queue.pending_settlement").fetchall() == handed
    after = other.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
    assert before is not None
    assert after is not None
    assert int(after[0]) - int(before[0]) <= 10, "a look takes one transaction id"
    handler.commit()
    assert [task for _, _, task in wait_for(lambda: fetch(conn, worker))] == ["dependent"]


def test_a_multixact_is_not_taken_for_a_transaction(connect: Callable[..., Connection]) -> None:
    conn = connect()
    long, makes = connect(autocommit=False), connect(autocommit=False)

    def until_of(xid: str) -> str:
        row = conn.execute(
            "select case queue._row_locker(cast(%s as xid)) when pg_current_xact_id() then 'own'"
            " else queue._row_locker(cast(%s as xid))::xid::text end",
            [xid, xid],
        ).fetchone()
        assert row is not None
        return str(row[0])

    row = long.execute("select pg_current_xact_id()::xid::text").fetchone()
    assert row is not None
    (xid,) = row
    conn.execute("select pg_current_xact_id()")  # so that a snapshot names the previous one
    assert until_of(xid) == xid
    assert until_of("2") == "own", "one that has ended"
    # up to the multixact of this very number, whose members are under way: each row is locked, then deleted in a savepoint
    makes.execute("create temp table t as select from generate_series(1, 100)")
    makes.commit()

    def is_made() -> bool:
        row = makes.execute("select mxid_age(cast(%s as xid)) > 0", [xid]).fetchone()
        return row == (True,)

    while not is_made():
        makes.commit()
        makes.execute(
            """
            do $$
            declare
              r record;
            begin
              for r in select t.ctid from t for update loop
                begin
                  delete from t where t.ctid = r.ctid;
                  raise division_by_zero;
                exception when division_by_zero then null;
                end;
              end loop;
            end $$
            """
        )
    assert until_of(xid) == "own", "it may be the multixact that is meant"
    makes.rollback()
    assert until_of(xid) == xid, "that has ended"
    long.rollback()

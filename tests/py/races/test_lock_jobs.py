"""A call on many jobs beside clients that hold their rows: it ends, and keeps no others waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from workers import wait_for

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]


def claims(connection: Connection, tasks: list[str]) -> list[tuple[int, int]]:
    """Defer a job of each task, and claim them; return (id, claim)."""
    connection.execute("select queue.register_worker('w', info => '{\"dead_after\": \"1 day\"}')")
    for task in tasks:
        connection.execute("select queue.defer(%s)", [task])
    return connection.execute(
        "select id, claim from queue.fetch(1, max_jobs => 10) order by id"
    ).fetchall()


def is_waiting(connection: Connection, other: Connection) -> bool:
    """Whether the other connection's session waits for a lock."""
    row = connection.execute(
        "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s",
        [other.info.backend_pid],
    ).fetchone()
    return row == (True,)


def test_a_row_that_is_taken_after_it_was_waited_for(connect: Connect) -> None:
    """The call gives up what it has, so that the other job's worker can report."""
    conn, holder, frozen, worker, operator = (connect() for _ in range(5))
    first, second = claims(conn, ["a", "b"])
    with holder.transaction(force_rollback=True), ThreadPoolExecutor(1) as pool:
        holder.execute("select from queue.admission for update")
        ids = [first[0], second[0]]
        call = "select outcome, current_setting('lock_timeout') from queue.set_priority(%s, 5)"
        changed = pool.submit(operator.execute, call, [ids])
        wait_for(lambda: is_waiting(conn, operator))
        frozen.execute("begin")
        frozen.execute("select queue.succeed(%s, %s)", second)
        holder.execute("rollback")
        holder.execute("begin")
        wait_for(lambda: is_waiting(conn, operator))
        worker.execute("select queue.succeed(%s, %s)", first)
        assert not changed.done()
        frozen.execute("commit")
        # its limit of half a second is over, and that of the admission lock is on
        assert changed.result(60).fetchall() == [("succeeded", "10s")] * 2


def test_rows_of_which_one_is_always_held(connect: Connect) -> None:
    """Each of two workers commits only when the other one has begun to end its job."""
    conn, operator = connect(), connect()
    (first, second) = claims(conn, ["a", "b"])
    conn.execute("select queue.release(%s, %s), queue.release(%s, %s)", [*first, *second])
    is_over = threading.Event()
    changed = threading.Condition()
    ends = [0, 0]

    def work(connection: Connection, number: int) -> None:
        fetch = "select id, claim from queue.fetch(1, options => %s)"
        task = f'{{"tasks": ["{"ab"[number]}"]}}'
        while not is_over.is_set():
            for id, claim in connection.execute(fetch, [task]).fetchall():
                with connection.transaction(), changed:
                    connection.execute("select queue.release(%s, %s)", [id, claim])
                    ends[number] += 1
                    seen = ends[1 - number]
                    changed.notify_all()
                    while ends[1 - number] == seen and not is_over.is_set():
                        changed.wait(30)

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, connect(), number) for number in range(2)]
        try:
            wait_for(lambda: min(ends) > 2)
            operator.execute("set statement_timeout = '60 s'")
            rows = operator.execute("select * from queue.set_priority(array[1, 2], 5)").fetchall()
        finally:
            is_over.set()
            with changed:
                changed.notify_all()
        for worker in workers:
            worker.result(60)
    assert len(rows) == 2


def test_the_wait_for_the_admission_lock_ends_with_lock_timeout(connect: Connect) -> None:
    """Although it is a wait in parts of 2 s."""
    holder, operator = connect(), connect()
    operator.execute("select queue.defer('t')")
    holder.execute("begin; select from queue.admission for update")
    operator.execute("set lock_timeout = '2100 ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        operator.execute("select queue.hold(1)")
    holder.execute("rollback")

"""The admission lock, when its holder rolls back to a savepoint and then idles."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from .conftest import until

Connection = psycopg.Connection[Any]


@pytest.mark.parametrize(
    "call",
    [
        "select queue.set_priority(array[1, 2], 5)",
        "savepoint inner_one; select queue.hold(1); release inner_one",
    ],
)
def test_a_savepoint_that_is_rolled_back_frees_it(
    connect: Callable[..., Connection], call: str
) -> None:
    """PostgreSQL lets a session that already waits wait for the end of the transaction."""
    conn, idle, operator, worker = (connect() for _ in range(4))
    conn.execute("select queue.defer('t', lock => 'l') from generate_series(1, 2)")
    conn.execute("select queue.tick(), queue.register_worker('w')")
    for other in (operator, worker):
        other.execute("set statement_timeout = '120 s'")
    idle.execute("begin; savepoint outer_one")
    idle.execute(call.encode())
    waits = (
        "select count(*) from pg_stat_activity where pid = any (%s) and wait_event_type = 'Lock'"
    )
    pids = [operator.info.backend_pid, worker.info.backend_pid]
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(operator.execute, "select queue.hold(2)")
        fetched = pool.submit(worker.execute, "select queue.pause('other')")
        until(lambda: conn.execute(waits, [pids]).fetchone() == (2,))
        idle.execute("rollback to outer_one")
        held.result()
        fetched.result()
    assert idle.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    assert conn.execute("select id from queue.fetch(1)").fetchall() == [(1,)]


def test_a_wait_ends_with_lock_timeout(connect: Callable[..., Connection]) -> None:
    """Although it is a wait in parts."""
    holder, operator = connect(), connect()
    operator.execute("select queue.defer('t')")
    holder.execute("begin; select from queue.admission for update")
    operator.execute("set lock_timeout = '2100 ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        operator.execute("select queue.hold(1)")
    holder.execute("rollback")

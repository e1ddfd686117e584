"""Installing and uninstalling while sessions work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

pytestmark = pytest.mark.client

Connect = Callable[..., psycopg.Connection[Any]]

WORK = """
with done as (
  select jsonb_agg(jsonb_build_object('id', v.id, 'claim', v.claim, 'outcome', 'succeeded')) as outcomes
  from (select v.id, v.claim from queue.jobs v where v.state = 'running' and v.worker_id = %(w)s limit 5) v)
select count(*) from done d, queue.finish_and_fetch(%(w)s, coalesce(d.outcomes, '[]'), null, 5)
"""  # fmt: skip


def work(dsn: str, until: threading.Event, errors: list[str]) -> None:
    """Defer, fetch, finish and tick; begin again after an error, as a client does after QJ090."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not until.is_set():
            try:
                row = connection.execute("select queue.register_worker('w')").fetchone()
                assert row
                while not until.is_set():
                    connection.execute(
                        "select queue.defer('t', lock => 'l' || n % 3, concurrency_key => 'k',"
                        " concurrency_limit => 3) from generate_series(1, 5) n"
                    )
                    connection.execute(WORK, {"w": row[0]})
                    connection.execute("select queue.tick()")
            except psycopg.Error as error:
                errors.append(f"{error.sqlstate} {error}")


@pytest.mark.long
@pytest.mark.unchecked("uninstalls under sessions at work")
def test_uninstall_beside_sessions_at_work(dsn: str) -> None:
    """No session dies of a deadlock, and later ones get a clear error."""
    over = threading.Event()
    errors: list[str] = []
    workers = [threading.Thread(target=work, args=(dsn, over, errors)) for _ in range(3)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        for each in workers:
            each.start()
        try:
            for _ in range(5):
                while not connection.execute("select from queue.finished limit 1").rowcount:
                    pass
                connection.execute("select queue.uninstall(force => true)")
                seen = len(errors)
                while not any(error.startswith("QJ090") for error in errors[seen:]):
                    pass
                connection.execute("select queue.install()")
        finally:
            over.set()
            for each in workers:
                each.join()
    # a session inside a function when the tables were dropped finds them missing
    assert {error[:5] for error in errors} <= {"QJ090", "42P01"}, sorted(set(errors))


@pytest.mark.unchecked("uninstalls")
def test_uninstall_gives_up_on_a_transaction_that_stays_open(
    conn: psycopg.Connection[Any], connect: Connect
) -> None:
    other = connect()
    other.execute("begin")
    other.execute("select queue.defer('t')")
    with pytest.raises(psycopg.errors.LockNotAvailable) as refused:
        conn.execute("select queue.uninstall(force => true)")
    assert "open for long" in (refused.value.diag.message_hint or "")
    # nobody waits behind it, and nothing is gone
    other.execute("commit")
    assert conn.execute("select count(*) from queue.jobs").fetchone() == (1,)
    conn.execute("select queue.uninstall(force => true)")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_install_at_once(conn: psycopg.Connection[Any], connect: Connect, end: str) -> None:
    """The second waits for the first, and finds its tables; or creates them, if there are none."""
    conn.execute("select queue.uninstall(force => true)")
    first, second = connect(), connect()
    first.execute("begin")
    first.execute("select queue.install()")
    found: list[Any] = []
    waiter = threading.Thread(
        target=lambda: found.extend(second.execute("select queue.install()").fetchall())
    )
    waiter.start()
    waits = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    while not conn.execute(waits, [second.info.backend_pid]).rowcount:
        assert waiter.is_alive(), "it waits for the first"
    first.execute(end)
    waiter.join()
    assert found == conn.execute("select tables from queue.version()").fetchall()
    assert conn.execute("select queue.defer('t')").fetchone() == (1,)

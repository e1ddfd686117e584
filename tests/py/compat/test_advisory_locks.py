"""A role without any right in the queue holds every advisory lock for which the queue has a name.

No decision depends on one. The sleep locks (1885824102, 1 and 2) are hints: a role that holds one
in bad faith causes notifications, or makes workers poll. No job is lost, and none starts later than
5 s. The third names who holds the admission lock: whoever takes it in bad faith can only keep one
from being ended who has taken that lock in a savepoint, and has stopped.
"""

from __future__ import annotations

import datetime as dt
import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from support import ROOT

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]

KEY = 1885824102
FIRST, SECOND = f"({KEY}, 1)", f"({KEY}, 2)"
HOLD = ["", "_shared"]


@pytest.fixture
def hostile(conn: Connection, dsn: str) -> Iterator[Connection]:
    """A session of a role that may only connect."""
    conn.execute("create role hostile_holder login")
    try:
        with psycopg.connect(make_conninfo(dsn, user="hostile_holder"), autocommit=True) as session:
            yield session
    finally:
        conn.execute("drop role hostile_holder")


@pytest.fixture
def roles(conn: Connection) -> Iterator[None]:
    conn.execute("create role advisory_one; create role advisory_two")
    yield
    conn.execute("drop owned by advisory_one, advisory_two cascade")
    conn.execute("drop role advisory_one, advisory_two")


@pytest.mark.usefixtures("roles")
@pytest.mark.unchecked("installs anew")
def test_no_decision_hangs_on_one(conn: Connection, hostile: Connection) -> None:
    hostile.execute("select pg_advisory_lock(%s, n) from generate_series(0, 200) n", [KEY])
    conn.execute("set statement_timeout = '20 s'")
    for call in (
        "select queue.register_task('t', '{\"queue\": \"a\"}')",
        "select queue.register_task('t')",
        "select queue.grant_access('advisory_one', 'producer')",
        "select queue.grant_access('advisory_two', 'operator', '{a*}')",
        "select queue.revoke_access('advisory_two')",
        "select queue.revoke_access('advisory_one')",
        "select queue.migrate()",
        "select queue.install()",
        "select queue.register_worker('w')",
        "select queue.defer('t')",
        "select queue.fetch((select max(w.id) from queue.workers w))",
        "select queue.tick()",
        "select queue.schedule('s', '@hourly', 't')",
        "select queue.pause('a'), queue.resume('a')",
        "select queue.uninstall(true)",
        "select queue.install()",
    ):
        conn.execute(call.encode())


def test_the_code_names_no_other() -> None:
    """The sleep locks and that of the holder are the queue's only advisory locks."""
    found = subprocess.run(
        ["grep", "-rhoE", r"pg_(try_)?advisory\w*\([^)]*\)", ROOT / "build" / "pgdefer.sql"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    calls = {re.sub(r"/\*.*?\*/", "", call.split("(")[1]) for call in found if call}
    assert calls == {f"{KEY}, {n})" for n in (1, 2, 3)}


# The sleep locks that are held, and how: each alone, and both.
HELD = [
    *([f"pg_advisory_lock{how}{FIRST}"] for how in HOLD),
    *([f"pg_advisory_lock{how}{SECOND}"] for how in HOLD),
    *(
        [f"pg_advisory_lock{one}{FIRST}", f"pg_advisory_lock{two}{SECOND}"]
        for one, two in itertools.product(HOLD, HOLD)
    ),
]


@pytest.mark.parametrize("held", HELD, ids=" ".join)
def test_the_sleep_lock_survives_who_holds_it(
    conn: Connection, connect: Connect, hostile: Connection, held: list[str]
) -> None:
    """Two workers go to sleep. Then a job comes: one is notified, or fetches within a second."""
    workers = [connect(), connect()]
    ids = []
    for lock in held:
        hostile.execute(f"select {lock}".encode())
    for worker in workers:
        ids += worker.execute("select queue.register_worker('w')").fetchone() or ()
        worker.execute("listen pgdefer")
    # it may become busy and sleep again, so that the first does both
    waits = [sleep(workers[0], ids[0], 8), sleep(workers[1], ids[1], 8)]
    workers[0].execute("select queue.after_sleep(%s)", [ids[0]])
    waits[0] = sleep(workers[0], ids[0], 8)
    conn.execute("select queue.defer('t')")
    heard = [hears(worker) for worker in workers]
    latest = min(
        dt.timedelta(0) if has_heard else wait for has_heard, wait in zip(heard, waits, strict=True)
    )
    assert latest <= dt.timedelta(seconds=1)
    assert max(waits) <= dt.timedelta(seconds=5)
    found = workers[0].execute("select task from queue.fetch(%s)", [ids[0]]).fetchall()
    assert found == [("t",)]


def test_the_sleep_lock_survives_who_takes_it_and_goes(
    conn: Connection, connect: Connect, hostile: Connection
) -> None:
    """The worst attack: a role takes the lead sleeper's lock, and disappears.

    Nobody is notified then, and sleeping workers fetch again after 5 s.
    """
    worker = connect()
    row = worker.execute("select queue.register_worker('w')").fetchone()
    assert row
    worker.execute("listen pgdefer")
    hostile.execute(f"select pg_advisory_lock{FIRST}".encode())
    assert sleep(worker, row[0]) <= dt.timedelta(seconds=5)
    hostile.execute("select pg_advisory_unlock_all()")
    conn.execute("select queue.defer('t')")
    assert not hears(worker)
    # which is what it would do after that time
    assert worker.execute("select task from queue.fetch(%s)", row).fetchall() == [("t",)]
    # and from the next call on everything is as before
    assert sleep(worker, row[0]) <= dt.timedelta(seconds=5)
    conn.execute("select queue.defer('t')")
    assert hears(worker)


def hears(worker: Connection) -> bool:
    """Whether the worker's session has received a notification since it last listened."""
    heard: list[Any] = []
    worker.add_notify_handler(heard.append)
    worker.execute("select")
    worker.remove_notify_handler(heard.append)
    return bool(heard)


def sleep(worker: Connection, id_: int, times: int = 1) -> dt.timedelta:
    """Go to sleep as a worker does, at most this many times until it may; return the time."""
    while True:
        row = worker.execute(
            "select may_sleep, wait_for from queue.before_sleep(%s)", [id_]
        ).fetchone()
        assert row
        times -= 1
        if row[0] or times <= 0:
            wait: dt.timedelta = row[1]
            return wait

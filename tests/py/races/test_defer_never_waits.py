"""Deferring only inserts: it neither waits nor deadlocks, whatever other sessions hold.

The exceptions: two transactions with the same queueing_lock, or the same idempotency_key of a task.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import errors

from workers import CheckedThread, beside, wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]

# Long in comparison with a defer; transactions that are held open end after it.
LOCK_TIMEOUT = "10s"


@pytest.fixture
def application(connect: Connect) -> Callable[[], Connection]:
    """Open a connection in which waiting for a lock is an error."""

    def open_one() -> Connection:
        conn = connect()
        conn.execute(f"set lock_timeout = '{LOCK_TIMEOUT}'")
        conn.autocommit = False
        return conn

    return open_one


@pytest.fixture
def needed(conn: Connection) -> int:
    row = conn.execute("select queue.defer('needed', options => '{\"held\": true}')").fetchone()
    assert row is not None
    return int(row[0])


unique = (f"unique {n}" for n in itertools.count())


def defer_everything(conn: Connection, needed: int) -> None:
    """Defer with everything that needs agreement, except a queueing lock that others have."""
    conn.execute("select queue.defer('plain')")
    conn.execute("select queue.defer('locked', lock => 'l')")
    conn.execute(
        """select queue.defer('mutex', lock => 'm', options => '{"lock_mode": "mutex"}')"""
    )
    conn.execute("select queue.defer('keyed', concurrency_key => 'k', concurrency_limit => 1)")
    conn.execute("select queue.defer('dependent', needs => array[%s]::bigint[])", (needed,))
    conn.execute("select queue.defer('child', options => %s)", (json.dumps({"parent": needed}),))
    conn.execute("select queue.defer('later', scheduled_at => now() + interval '1 hour')")
    conn.execute("select queue.defer('unique', queueing_lock => %s)", (next(unique),))
    options = json.dumps({"idempotency_key": next(unique)})
    conn.execute("select queue.defer('once', options => %s)", (options,))
    conn.execute("select queue.defer('once', options => %s)", (options,))
    conn.execute(
        "select queue.defer_many(%s)",
        (json.dumps([{"task": "many"}] * 100 + [{"task": "many", "lock": "l"}] * 5),),
    )
    conn.execute("insert into thing values (1)")


@pytest.fixture(autouse=True)
def _thing(conn: Connection) -> None:
    conn.execute("create table thing (id integer)")
    conn.execute("""
        create trigger t after insert on thing for each row
        execute function queue.defer_trigger('by trigger', '{"lock": "l", "priority": 3}')
    """)


def worker(conn: Connection, name: str = "w") -> int:
    row = conn.execute("select queue.register_worker(%s)", (name,)).fetchone()
    assert row is not None
    return int(row[0])


def test_beside_other_producers(
    application: Callable[[], Connection], conn: Connection, needed: int
) -> None:
    first, second = application(), application()
    defer_everything(first, needed)
    defer_everything(second, needed)
    defer_everything(first, needed)
    # Each blocks the other, if anything does.
    defer_everything(second, needed)
    held = conn.execute(
        """
        select distinct locktype, mode from pg_locks
        where pid = any (%s) and not (locktype = 'relation' and mode = 'AccessShareLock')
          and locktype <> 'virtualxid' order by 1, 2
        """,
        ([first.info.backend_pid, second.info.backend_pid],),
    ).fetchall()
    # A row lock does not show, except by the mode of its table's lock; only unique keys have any.
    assert set(held) - {("relation", "RowShareLock")} == {
        ("advisory", "ShareLock"),
        ("relation", "RowExclusiveLock"),
        ("transactionid", "ExclusiveLock"),
    }
    second.commit()
    first.rollback()


HOLDERS = {
    "the admitter": "select from queue.admission for update",
    "an admission": "select queue._lock_admission(true), queue._admit(1000)",
    "a fetch": "select queue.fetch(%(worker)s, null, 100)",
    "a fetch with options": 'select queue.fetch(%(worker)s, options => \'{"order": "listed"}\')',
    "a tick": "select queue.tick()",
    "a pause": "select queue.pause()",
    "a queue's limits": """select queue.configure_queue('default', '{"max_running": 1}')""",
    "a task's defaults": """select queue.register_task('plain', '{"queue": "other"}')""",
    "a cancellation": "select queue.cancel(%(needed)s)",
    "a prune": "select queue.prune()",
    "a sleeper": "select queue.before_sleep(%(worker)s)",
    "a heartbeat": "select queue.heartbeat(%(worker)s)",
    "a reader": "select count(*) from queue.jobs, queue.check()",
    "rows locked by hand": "select from queue.active_job for update",
    "old rows locked by hand": "select from queue.job for update",
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_beside_an_open_transaction(
    application: Callable[[], Connection],
    connect: Connect,
    conn: Connection,
    needed: int,
    holder: str,
) -> None:
    with conn.transaction():
        defer_everything(conn, needed)
    arguments = {"worker": worker(conn), "needed": needed}
    other = connect(autocommit=False)
    other.execute(HOLDERS[holder], arguments if "%" in HOLDERS[holder] else None)
    producer = application()
    for how in (producer.commit, producer.rollback, producer.commit):
        defer_everything(producer, needed)
        how()
    other.rollback()


def test_only_the_same_queueing_lock_waits(
    application: Callable[[], Connection], conn: Connection
) -> None:
    first, second = application(), application()
    first.execute("select queue.defer('t', queueing_lock => 'a')")
    second.execute("select queue.defer('t', queueing_lock => 'b')")
    second.commit()
    second.execute("set lock_timeout = '100ms'")
    second.commit()
    for on_conflict in ("raise", "ignore", "replace"):
        options = json.dumps({"on_conflict": on_conflict})
        with pytest.raises(errors.LockNotAvailable):
            second.execute(
                "select queue.defer('t', queueing_lock => 'a', options => %s)", (options,)
            )
        second.rollback()
    second.execute(f"set lock_timeout = '{LOCK_TIMEOUT}'")
    second.commit()
    # It waits for that long, and gets the lock if the other transaction is rolled back.
    conn.execute("set lock_timeout = 0")
    taken: list[int] = []

    def take() -> None:
        row = conn.execute("select queue.defer('t', queueing_lock => 'a')").fetchone()
        assert row is not None
        taken.append(row[0])

    thread = threading.Thread(target=take)
    thread.start()
    time.sleep(0.05)
    assert not taken
    first.rollback()
    thread.join(300)
    assert taken
    # If an existing job holds it, nobody waits.
    for on_conflict, expected in (("ignore", taken[0]), ("replace", taken[0])):
        options = json.dumps({"on_conflict": on_conflict})
        row = second.execute(
            "select queue.defer('t', queueing_lock => 'a', options => %s)", (options,)
        ).fetchone()
        assert row == (expected,)
        second.commit()
    with pytest.raises(psycopg.Error) as raised:
        second.execute("select queue.defer('t', queueing_lock => 'a')")
    assert raised.value.sqlstate == "QJ004"
    second.rollback()


class Repeater(CheckedThread):
    """Repeats a call."""

    def __init__(self, conn: Connection, one: Callable[[Connection, random.Random], None]) -> None:
        super().__init__()
        self._conn = conn
        self._one = one
        self.count = 0

    def work(self) -> None:
        dice = random.Random(self.name)
        while not self.is_over.is_set():
            self._one(self._conn, dice)
            self.count += 1


def some_job(dice: random.Random, needed: int) -> dict[str, Any]:
    job: dict[str, Any] = {"task": "t", "priority": dice.randint(-1, 1)}
    if dice.random() < 0.6:
        job["lock"] = dice.choice("abc")
    if dice.random() < 0.3:
        job["options"] = {"lock_mode": "mutex"}
    if dice.random() < 0.4:
        job |= {"concurrency_key": dice.choice("xyz"), "concurrency_limit": 2}
    if dice.random() < 0.2:
        job["needs"] = [needed]
    return job


def test_in_a_storm(connect: Connect, conn: Connection, needed: int) -> None:
    def produce(conn: Connection, dice: random.Random) -> None:
        conn.execute(f"set local lock_timeout = '{LOCK_TIMEOUT}'")
        for _ in range(dice.randint(1, 6)):
            jobs = json.dumps([some_job(dice, needed)] * dice.randint(1, 3))
            conn.execute("select queue.defer_many(%s)", (jobs,))
            if dice.random() < 0.2:
                conn.execute("insert into thing values (1)")
            time.sleep(dice.choice([0, 0, 0.002, 0.03]) * dice.random())
        if dice.random() < 0.1:
            conn.rollback()
        else:
            conn.commit()

    workers = [worker(conn) for _ in range(3)]

    def run(conn: Connection, dice: random.Random) -> None:
        mine = dice.choice(workers)
        rows = conn.execute(
            "select id, claim from queue.fetch(%s, null, %s)", (mine, dice.randint(1, 20))
        ).fetchall()
        outcomes = [
            {"id": id, "claim": claim, "outcome": dice.choice(["succeeded"] * 9 + ["released"])}
            for id, claim in rows
        ]
        rows = conn.execute(
            "select id, claim from queue.finish_and_fetch(%s, %s, null, 5) where error is null",
            (mine, json.dumps(outcomes)),
        ).fetchall()
        for id, claim in rows:
            conn.execute("select queue.succeed(%s, %s)", (id, claim))

    def operate(conn: Connection, _: random.Random) -> None:
        conn.execute("select queue.tick()")
        conn.execute("select queue.pause('nothing'), queue.resume('nothing')")
        time.sleep(0.02)

    producers = [Repeater(connect(autocommit=False), produce) for _ in range(4)]
    others = [Repeater(connect(), one) for one in (run, run, run, operate)]
    everybody = producers + others
    end = time.monotonic() + 3  # on a busy machine later: each side has worked for 10 turns

    def have_met() -> bool:
        turns = (sum(each.count for each in side) for side in (producers, others))
        return any(each.error for each in everybody) or (time.monotonic() > end and min(turns) > 10)

    with beside(*everybody):
        wait_for(have_met)

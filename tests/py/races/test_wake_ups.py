"""No wake-up is lost, and no unnecessary wake-up is sent.

A lost one shows as a job that waits for the next poll, up to 5 s.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgdefer.database.embedded import EmbeddedServer
from support import install, quick_server, refused
from workers import wait_for

from .conftest import Sleeper

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]
StartSleepers = Callable[..., list[Sleeper]]

SLEEP_LOCK = """
    select pid from pg_locks
    where locktype = 'advisory' and classid = 1885824102 and objid = 1 and mode = 'ExclusiveLock'
      and granted and database = (select oid from pg_database where datname = current_database())
"""
# The delay that a busy machine may add.
SLACK = 0.9


class Producer:
    """Defers in transactions that wait before they commit, or are rolled back."""

    def __init__(self, conn: Connection, seed: int) -> None:
        self._conn = conn
        self._random = random.Random(seed)
        self.rolled_back = 0

    def __call__(self) -> tuple[int, float] | None:
        """Defer one job; return its id and when it was committed."""
        time.sleep(self._random.choice([0, 0.001, 0.005, 0.02]) * self._random.random())
        row = self._conn.execute("select * from queue.defer('t')").fetchone()
        assert row is not None
        time.sleep(self._random.choice([0, 0.001, 0.005, 0.05]) * self._random.random())
        if self._random.random() < 0.2:
            self._conn.rollback()
            self.rolled_back += 1
            return None
        self._conn.commit()
        return row[0], time.monotonic()


@pytest.mark.parametrize("in_line", [False, True])
def test_no_wake_up_is_lost(in_line: bool, connect: Connect, start_sleepers: StartSleepers) -> None:
    """Bursts of overlapping transactions, each followed by silence in which no job may wait."""
    sleepers = start_sleepers(4, in_line=in_line)
    producers = [Producer(connect(autocommit=False), seed) for seed in range(3)]
    committed: dict[int, float] = {}
    begun = time.monotonic()

    def is_enough() -> bool:
        rolled_back = sum(p.rolled_back for p in producers)
        # Polling alone does not find them.
        notified = sum(c.after == "notified" for s in sleepers for c in list(s.claimed))
        took = time.monotonic() - begun
        assert took < 60, f"{rolled_back} rolled back, {notified} notified"
        return took > 4 and rolled_back > 10 and notified > 20

    with ThreadPoolExecutor(len(producers)) as pool:
        while not is_enough():
            jobs = [job for job in pool.map(lambda produce: produce(), producers) if job]
            committed |= dict(jobs)
            for job in jobs:
                assert latency(sleepers, job) < 1 + SLACK
    claimed = [claim for s in sleepers for claim in s.claimed]
    assert sorted(c.id for c in claimed) == sorted(committed)
    latencies = sorted(c.at - committed[c.id] for c in claimed)
    p50, p99 = (latencies[int(len(latencies) * part)] * 1e3 for part in (0.5, 0.99))
    print(f"{len(claimed)} jobs: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {latencies[-1] * 1e3:.0f}")


SENTINEL = """
import sys, psycopg
main = psycopg.connect(sys.argv[1], autocommit=True)
listener = psycopg.connect(sys.argv[1], autocommit=True)
worker = main.execute("select * from queue.register_worker('lead')").fetchone()[0]
options = '{"in_line": true}' if sys.argv[2:] else None
listener.execute("select * from queue.before_sleep(%s, null, %s)", (worker, options))
listener.execute("listen pgdefer")
print(listener.info.backend_pid, flush=True)
for _ in listener.notifies():
    pass
"""


@pytest.fixture
def lead(
    dsn: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    """A separate process that holds the sleep lock; with a parameter, it is first in the line."""
    program = tmp_path / "lead.py"
    program.write_text(SENTINEL)
    with subprocess.Popen(
        [sys.executable, str(program), dsn, *getattr(request, "param", ())],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        yield process
        process.kill()


def defer_one(conn: Connection) -> tuple[int, float]:
    row = conn.execute("select * from queue.defer('t')").fetchone()
    assert row is not None
    return row[0], time.monotonic()


def latency(sleepers: list[Sleeper], job: tuple[int, float], seconds: float = 10) -> float:
    def claim() -> float | None:
        return next((c.at for s in sleepers for c in list(s.claimed) if c.id == job[0]), None)

    at: float = wait_for(claim, seconds)
    return at - job[1]


def test_a_frozen_lead_stops_nobody_from_being_woken(
    conn: Connection, lead: subprocess.Popen[str], start_sleepers: StartSleepers
) -> None:
    assert len(conn.execute(SLEEP_LOCK).fetchall()) == 1
    os.kill(lead.pid, signal.SIGSTOP)
    sleepers = start_sleepers(3)
    for _ in range(20):
        wait_for(lambda: all(s.is_asleep for s in sleepers))
        assert latency(sleepers, defer_one(conn)) < SLACK
    assert {c.after for s in sleepers for c in s.claimed} <= {"notified", "busy"}
    assert [p for s in sleepers for p in s.polls] == []
    # If it is killed, nobody has the sleep lock until another worker tries again, within 5 s.
    wait_for(lambda: all(s.is_asleep for s in sleepers))
    lead.kill()
    wait_for(lambda: not conn.execute(SLEEP_LOCK).fetchall())
    assert latency(sleepers, defer_one(conn)) < 5 + SLACK
    wait_for(lambda: all(s.is_asleep for s in sleepers))
    assert len(conn.execute(SLEEP_LOCK).fetchall()) == 1
    assert latency(sleepers, defer_one(conn)) < SLACK


IN_LINE = """
    select w.name from queue.sleeper s join queue.worker w on w.id = s.worker_id
    order by s.is_busy, s.place
"""


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("lead", [["in line"]], indirect=True)
def test_the_deputy_finds_what_the_first_leaves(
    end: signal.Signals,
    conn: Connection,
    lead: subprocess.Popen[str],
    start_sleepers: StartSleepers,
) -> None:
    """The first in the line is frozen or killed: the deputy, and those behind it, lose no time."""
    sleepers = start_sleepers(4, in_line=True)
    wait_for(lambda: len(conn.execute(IN_LINE).fetchall()) == 5)
    assert conn.execute(IN_LINE).fetchall()[0] == ("lead",)
    os.kill(lead.pid, end)

    def is_passed_over() -> bool:
        assert latency(sleepers, defer_one(conn)) < 1 + SLACK
        return ("lead",) not in conn.execute(IN_LINE).fetchall()

    wait_for(is_passed_over)


def test_a_long_producer_makes_sleepers_poll_ever_less(
    conn: Connection, connect: Connect, start_sleepers: StartSleepers
) -> None:
    long = connect(autocommit=False)
    held = long.execute("select * from queue.defer('held up')").fetchone()
    assert held is not None
    sleepers = start_sleepers(3)
    wait_for(lambda: all(1.0 in s.polls for s in sleepers))
    latencies = [latency(sleepers, defer_one(conn)) for _ in range(4)]
    assert max(latencies) < 1 + SLACK
    for sleeper in sleepers:
        assert sleeper.polls[:10] == [*(0.002 * 2**n for n in range(9)), 1.0]
        # Not more often than necessary: the backoff starts again only after some work.
        assert sleeper.sleeps == []
    long.commit()
    assert latency(sleepers, (held[0], time.monotonic())) < 1 + SLACK
    wait_for(lambda: all(s.is_asleep for s in sleepers))
    assert latency(sleepers, defer_one(conn)) < SLACK
    print("beside a long producer:", ", ".join(f"{s * 1e3:.0f} ms" for s in latencies))


def test_rolled_back_defers_notify_nobody(
    conn: Connection, connect: Connect, lead: subprocess.Popen[str]
) -> None:
    listener, producer = connect(), connect(autocommit=False)
    listener.execute("listen pgdefer")
    for _ in range(20):
        producer.execute("select * from queue.defer('t')")
        producer.execute('select * from queue.defer_many(\'[{"task": "t"}]\')')
        producer.rollback()
    producer.execute("savepoint s")
    producer.execute("select * from queue.defer('t')")
    producer.execute("rollback to s")
    producer.commit()
    # The first notification is for commits after that.
    conn.execute("notify pgdefer, 'after all of them'")
    first = next(listener.notifies(timeout=5))
    assert first.payload == "after all of them"
    producer.execute("select * from queue.defer('t')")
    producer.commit()
    assert len(list(listener.notifies(timeout=5, stop_after=1))) == 1


WAKING = {
    "defer_many": ("", 'queue.defer_many(\'[{{"task": "t"}}]\')'),
    "a trigger": ("", ""),
    "retry": ("queue.cancel({id})", "queue.retry(array[{id}])"),
    "hold, of a need that need not succeed": (
        "queue.defer('t', needs => array[{id}], options => '{{\"on_need_failure\": \"proceed\"}}')",
        "queue.hold({id})",
    ),
    "unhold": ("queue.hold({id})", "queue.unhold({id})"),
    "resume": ("queue.pause()", "queue.resume()"),
    "move": ("queue.tick()", "queue.move(array[{id}], 'elsewhere')"),
    "copy": ("queue.tick()", "queue.copy({id})"),
    "reschedule": ("queue.reschedule({id}, '2999-01-01Z')", "queue.reschedule({id}, null)"),
    "set_priority": ("queue.tick()", "queue.set_priority(array[{id}], 5)"),
    "set_args": ("queue.tick()", "queue.set_args({id}, '{{}}')"),
    "configure_queue": (
        "queue.pause('default')",
        "queue.configure_queue('default', '{{\"paused\": false}}')",
    ),
    "done, of a need": ("queue.defer('t', needs => array[{id}])", "queue.done(array[{id}])"),
}


@pytest.mark.parametrize("case", WAKING)
def test_whatever_makes_a_job_ready_wakes(
    case: str, conn: Connection, connect: Connect, lead: subprocess.Popen[str]
) -> None:
    before, call = WAKING[case]
    job, _ = defer_one(conn)
    if before:
        conn.execute(f"select * from {before.format(id=job)}".encode())
    conn.execute("create table thing (n int)")
    conn.execute(
        "create trigger t after insert on thing"
        " for each row execute function queue.defer_trigger('t')"
    )
    listener = connect()
    listener.execute("listen pgdefer")
    if call:
        conn.execute(f"select * from {call.format(id=job)}".encode())
    else:
        conn.execute("insert into thing values (1)")
    assert len(list(listener.notifies(timeout=5, stop_after=1))) == 1


def test_nobody_pays_while_nobody_sleeps(conn: Connection, connect: Connect) -> None:
    listener = connect()
    listener.execute("listen pgdefer")
    for _ in range(20):
        defer_one(conn)
    conn.execute("notify pgdefer, 'after all of them'")
    assert next(listener.notifies(timeout=5)).payload == "after all of them"


def test_notifications_switched_off(
    dsn: str, conn: Connection, connect: Connect, start_sleepers: StartSleepers
) -> None:
    """Off for the whole database, as two-phase commit requires: polling finds everything."""
    conn.execute(
        sql.SQL("alter database {} set pgdefer.notify = off").format(
            sql.Identifier(conn.info.dbname)
        )
    )
    listener, producer = connect(), connect()
    listener.execute("listen pgdefer")
    sleepers = start_sleepers(2)
    wait_for(lambda: sum(len(s.sleeps) for s in sleepers) >= 2)
    for _ in range(2):
        assert latency(sleepers, defer_one(producer)) < 1 + SLACK
    xid = producer.xid(1, "sleep lock", "a")
    producer.autocommit = False
    producer.tpc_begin(xid)
    job, _ = defer_one(producer)
    producer.tpc_prepare()
    assert latency(sleepers, defer_one(connect())) < 1 + SLACK
    producer.tpc_commit()
    assert latency(sleepers, (job, time.monotonic())) < 1 + SLACK
    assert list(listener.notifies(timeout=0)) == []


def test_sleepers_that_do_not_listen(conn: Connection, start_sleepers: StartSleepers) -> None:
    sleepers = start_sleepers(2, listen=False)
    wait_for(lambda: all(s.is_asleep for s in sleepers))
    assert conn.execute(SLEEP_LOCK).fetchall() == []
    for _ in range(2):
        assert latency(sleepers, defer_one(conn)) < 1 + SLACK


def test_a_due_schedule_is_met_by_sleepers(conn: Connection, start_sleepers: StartSleepers) -> None:
    sleepers = start_sleepers(3)
    wait_for(lambda: all(s.is_asleep for s in sleepers))
    for delay in (0.3, 0.7, 1.3):
        begun = time.monotonic()
        row = conn.execute(
            "select * from queue.defer('t', options => jsonb_build_object('delay', %s::float))",
            (delay,),
        ).fetchone()
        assert row is not None
        late = latency(sleepers, (row[0], begun + delay))
        assert -0.05 < late < SLACK


def test_a_full_queue_of_notifications_stops_nobody(server: EmbeddedServer) -> None:
    """It fills up behind a listener that stays in its transaction, and then no COMMIT may notify."""
    if server.major < 17:
        pytest.skip("the queue holds 8 GB")
    with quick_server({"max_notify_queue_pages": "64"}) as small:
        dsn = small.dsn("postgres")
        install(small, "postgres")
        with (
            psycopg.connect(dsn, autocommit=True) as conn,
            psycopg.connect(dsn, autocommit=True) as sleeper,
            psycopg.connect(dsn) as stuck,
        ):
            stuck.execute("listen x")
            stuck.commit()
            stuck.execute("select")
            ((worker,),) = conn.execute("select queue.register_worker('w')").fetchall()
            sleeper.execute("listen pgdefer")
            ask = "select wait_for from queue.before_sleep(%s)"
            sleeper.execute(ask, [worker])
            fill = "select pg_notify('x', repeat('y', 7900))"
            wait_for(lambda: refused(conn, fill) == "54000", 30)
            ((job,),) = conn.execute("select queue.defer('t')").fetchall()
            fetched = conn.execute("select id from queue.fetch(%s)", [worker]).fetchall()
            assert fetched == [(job,)]
            assert sleeper.execute(ask, [worker]).fetchall()[0][0].total_seconds() <= 1
            stuck.close()

            def is_notified() -> bool:
                conn.execute("select queue.defer('t')")
                return bool(list(sleeper.notifies(timeout=0.1, stop_after=1)))

            wait_for(is_notified, 30)

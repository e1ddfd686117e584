"""Waiting for results: a waiting client is notified at once, and no other is."""

from __future__ import annotations

import json
import random
import threading
import time

import psycopg
import pytest
from psycopg import sql

pytestmark = pytest.mark.client

FINAL = {"succeeded", "failed", "cancelled"}
AT_ONCE = 4.0  # seconds: less than the polling interval of 5


class Waiter:
    """A client that waits as await_result's comment says; `polls` counts waits that timed out."""

    def __init__(self, dsn):
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.polls = 0

    def ask(self, number):
        return self.connection.execute(
            "select state, result, error, channel, extract(epoch from wait_for)::float"
            " from queue.await_result(%s)",
            [number],
        ).fetchone()

    def wait(self, number, started=None):
        state, result, error, channel, wait_for = self.ask(number)
        if channel:
            self.connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
            state, result, error, _, wait_for = self.ask(number)
        if started:
            started.set()
        while state not in FINAL:
            told = list(self.connection.notifies(timeout=wait_for, stop_after=1))
            self.polls += not told
            state, result, error, _, wait_for = self.ask(number)
        if channel:
            self.connection.execute(sql.SQL("unlisten {}").format(sql.Identifier(channel)))
        return state, result, error


@pytest.fixture
def waiter(dsn):
    made = Waiter(dsn)
    yield made
    made.connection.close()


def waiting(waiter, number):
    """Wait in a thread; return the box for its result and time, and the thread."""
    box = []
    started = threading.Event()

    def run():
        said = waiter.wait(number, started)
        box.append((said, time.monotonic()))

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(300)
    return box, thread


def one(connection, text, *values):
    return connection.execute(text, values).fetchone()[0]


def claim(connection, count=1):
    worker = one(connection, "select queue.register_worker('w')")
    return connection.execute(
        "select id, claim from queue.fetch(%s, max_jobs => %s)", [worker, count]
    ).fetchall()


@pytest.mark.parametrize("how", ["succeed", "finish_many", "fail", "own transaction"])
def test_a_running_job_tells(conn, waiter, how):
    number = one(conn, "select queue.defer('t')")
    [(_, token)] = claim(conn)
    box, thread = waiting(waiter, number)
    ended = time.monotonic()
    if how == "succeed":
        conn.execute("select queue.succeed(%s, %s, '[1]')", [number, token])
    elif how == "finish_many":
        outcome = {"id": number, "claim": token, "outcome": "succeeded", "result": [1]}
        conn.execute("select * from queue.finish_many(%s)", [json.dumps([outcome])])
    elif how == "fail":
        conn.execute("select queue.fail(%s, %s, 'no luck')", [number, token])
    else:
        with conn.transaction():
            conn.execute("select queue.succeed(%s, %s, '[1]')", [number, token])
            assert not box
    thread.join()
    expected = ("failed", None, "no luck") if how == "fail" else ("succeeded", [1], None)
    assert box[0][0] == expected
    assert box[0][1] - ended < AT_ONCE


def test_a_job_in_a_gate_tells(conn, waiter):
    first = one(conn, "select queue.defer('t')")
    number = one(conn, "select queue.defer('t', needs => array[%s::bigint])", first)
    conn.execute("select * from queue.tick()")
    box, thread = waiting(waiter, number)
    [(_, token)] = claim(conn)
    conn.execute("select queue.succeed(%s, %s)", [first, token])
    [(again, token)] = claim(conn)
    assert again == number
    ended = time.monotonic()
    conn.execute("select queue.succeed(%s, %s)", [number, token])
    thread.join()
    assert box[0][0] == ("succeeded", None, None)
    assert box[0][1] - ended < AT_ONCE


def test_a_cancel_tells(conn, waiter):
    number = one(conn, "select queue.defer('t')")
    conn.execute("select * from queue.tick()")
    box, thread = waiting(waiter, number)
    ended = time.monotonic()
    conn.execute("select queue.cancel(%s)", [number])
    thread.join()
    assert box[0][0] == ("cancelled", None, None)
    assert box[0][1] - ended < AT_ONCE


def test_nobody_else_is_told(conn, connect):
    """The end of a job that nobody waits for sends nothing, and does not read queue.awaited."""
    listener = connect()
    first, other, awaited, last = (one(conn, "select queue.defer('t')") for _ in range(4))
    tokens = dict(claim(conn, 4))
    for number in (first, other, awaited, last):
        listener.execute(f"listen pgdefer_result_{number}")
    scans = "select pg_stat_get_xact_numscans('queue.awaited_pkey'::regclass)"

    def looks(number):
        with conn.transaction():
            before = one(conn, scans)
            conn.execute("select queue.succeed(%s, %s)", [number, tokens[number]])
            return one(conn, scans) - before

    assert looks(first) == 0
    conn.execute("select * from queue.await_result(%s)", [awaited])
    assert looks(last) == 0
    assert looks(other) > 0
    assert looks(awaited) > 0
    told = list(listener.notifies(timeout=AT_ONCE, stop_after=1))
    assert [note.channel for note in told] == [f"pgdefer_result_{awaited}"]
    assert not list(listener.notifies(timeout=0.1))


def test_a_client_that_waits_in_a_transaction_holds_nobody_up(conn, connect):
    """It appends a row. Neither it nor the session that ends the job waits for the other."""
    number = one(conn, "select queue.defer('t')")
    [(_, token)] = claim(conn)
    first, second = connect(), connect()
    with first.transaction(), second.transaction():
        for client in (first, second):
            client.execute("set local lock_timeout = '60 s'")
            client.execute("select * from queue.await_result(%s)", [number])
        conn.execute("set lock_timeout = '60 s'")
        conn.execute("select queue.succeed(%s, %s)", [number, token])
        for client in (first, second):
            assert one(client, "select state from queue.await_result(%s)", number) == "succeeded"


def test_many_wait_for_many(dsn, conn, connect):
    """Waiters, workers and producers at once: every wait ends, and hardly any by polling."""
    jobs = 150
    over = threading.Event()

    def work(number):
        generator = random.Random(number)
        connection = connect()
        worker = one(connection, "select queue.register_worker('w')")
        outcomes = []
        while outcomes or not over.is_set():
            rows = connection.execute(
                "select id, claim from queue.finish_and_fetch(%s, %s, max_jobs => 3)",
                [worker, json.dumps(outcomes)],
            ).fetchall()
            outcomes = [
                {"id": row[0], "claim": row[1], "outcome": "succeeded", "result": row[0]}
                for row in rows
            ]
            over.wait(generator.random() * 0.01)

    polls, slow = [], []

    def wait(number):
        generator = random.Random(number)
        waiter = Waiter(dsn)
        with waiter.connection:
            for _ in range(jobs // 3):
                target = one(waiter.connection, "select queue.defer('t')")
                if generator.random() < 0.3:
                    time.sleep(generator.random() * 0.01)
                begun = time.monotonic()
                assert waiter.wait(target) == ("succeeded", target, None)
                if time.monotonic() - begun > AT_ONCE:
                    slow.append(target)
        polls.append(waiter.polls)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    waiters = [threading.Thread(target=wait, args=(n,)) for n in range(3)]
    for thread in workers + waiters:
        thread.start()
    for thread in waiters:
        thread.join()
    over.set()
    for thread in workers:
        thread.join()
    assert len(polls) == 3
    assert len(slow) <= jobs // 50, (slow, polls)

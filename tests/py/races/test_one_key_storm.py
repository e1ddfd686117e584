"""Eight clients on one concurrency key, which fetch, finish, roll back and are killed in the middle."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from workers import wait_for

from .conftest import Sleeper

CLIENTS = 8
SETTINGS = [
    "enable_nestloop = off",
    "enable_hashjoin = off",
    "enable_indexscan = off",
    "plan_cache_mode = force_custom_plan",
    "plan_cache_mode = force_generic_plan",
    "work_mem = '64kB'",
    "jit = on; set jit_above_cost = 0",
    "default_transaction_deferrable = on",
]
CLAIMED = "select count(*) from queue.active_job where claim is not null"


class Storm:
    """The clients, and who watches and kills them."""

    def __init__(self, dsn: str, seconds: float) -> None:
        self.dsn = dsn
        self._until = time.monotonic() + seconds
        self.errors: list[str] = []
        self.pids: dict[int, int] = {}
        self.kills = self.finished = self.most = 0

    def is_over(self) -> bool:
        """Whether the time is over, and enough has happened, however slow the machine is."""
        is_enough = self.most and self.finished > 20 and self.kills > 2
        return bool(self.errors or (time.monotonic() > self._until and is_enough))

    def client(self, number: int) -> None:
        rng = random.Random(number)
        try:
            with psycopg.connect(self.dsn, autocommit=True) as own:
                while not self.is_over():
                    worker = register(own)
                    try:
                        with psycopg.connect(self.dsn, autocommit=True) as conn:
                            conn.execute(f"set {SETTINGS[number]}".encode())
                            self.pids[number] = conn.info.backend_pid
                            self.work(conn, worker, rng)
                    except psycopg.errors.AdminShutdown:
                        pass
                    except psycopg.OperationalError as error:
                        if error.sqlstate is not None:
                            raise
                    own.execute("select queue.worker_died(%s)", [worker])
        except BaseException as error:
            self.errors.append(f"client {number}: {error!r}")

    def work(self, conn: psycopg.Connection[Any], worker: int, rng: random.Random) -> None:
        """Claim and end jobs, mostly in both orders of transactions, until the time is over."""
        while not self.is_over():
            n = rng.randint(1, 5)
            rows = []
            conn.execute("begin")
            query = "select id, claim from queue.fetch(%s, null, %s)"
            found = conn.execute(query, [worker, n]).fetchall()
            if rng.random() < 0.2:
                conn.execute("rollback")
            else:
                conn.execute("commit")
                rows = found
            while rows:
                some, rest = rows[:n], rows[n:]
                kinds = ["succeeded"] * 8 + ["released", "retry_later"]
                outcomes = json.dumps(
                    [{"id": i, "claim": c, "outcome": rng.choice(kinds)} for i, c in some]
                )
                way = rng.random()
                if way < 0.3:
                    conn.execute("begin")
                    conn.execute("select from queue.finish_many(%s)", [outcomes])
                    conn.execute("rollback")
                elif way < 0.5:
                    conn.execute("begin; savepoint a")
                    conn.execute("select from queue.finish_many(%s)", [outcomes])
                    conn.execute("rollback to a")
                    conn.execute("select from queue.finish_many(%s)", [outcomes])
                    conn.execute("commit")
                    rows = rest
                elif way < 0.6:
                    conn.execute("select from queue.finish_many(%s)", [outcomes])
                    rows = rest
                else:
                    rows = (
                        conn.execute(
                            "select id, claim from queue.finish_and_fetch(%s, %s, null, %s)",
                            [worker, outcomes, n],
                        ).fetchall()
                        + rest
                    )
                self.finished += 1

    def watch(self) -> None:
        try:
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                while not self.is_over():
                    n = conn.execute(CLAIMED.encode()).fetchone()
                    assert n is not None
                    self.most = max(self.most, n[0])
        except BaseException as error:
            self.errors.append(f"watch: {error!r}")

    def kill(self) -> None:
        rng = random.Random(99)
        try:
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                while not self.is_over():
                    pid = self.pids.get(rng.randrange(CLIENTS))
                    # in a statement, or between those of a transaction
                    killed = conn.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity"
                        " where pid = %s and state <> 'idle'",
                        [pid],
                    )
                    self.kills += killed.rowcount
                    threading.Event().wait(rng.random() / 5)
        except BaseException as error:
            self.errors.append(f"kill: {error!r}")

    def run(self) -> None:
        threads = [threading.Thread(target=self.client, args=[n]) for n in range(CLIENTS)]
        threads += [threading.Thread(target=work) for work in (self.watch, self.kill)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive(), f"{thread.name} hangs"
        assert self.errors == []


def register(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("select queue.register_worker('w')").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("limit", [3, 20])
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_no_client_breaks_the_limit_of_a_key(
    dsn: str,
    connect: Callable[..., psycopg.Connection[Any]],
    start_sleepers: Callable[..., list[Sleeper]],
    limit: int,
    seconds: float,
) -> None:
    conn = connect()
    options = '{"max_progress": null, "retry": {"max_crashes": 1000, "base": 0}}'
    defer = (
        "select queue.defer('t', concurrency_key => 'k', concurrency_limit => %s, options => %s)"
        " from generate_series(1, %s)"
    )
    n = int(150 * seconds)
    conn.execute(defer, [limit, options, n])
    start_sleepers(1)
    storm = Storm(dsn, seconds)
    storm.run()
    assert storm.most <= limit
    # what the killed clients held goes to the one that is left, which nobody helps
    conn.execute(defer, [limit, options, 10])
    open_jobs = "select count(*) from queue.jobs where finished_at is null"
    wait_for(lambda: conn.execute(open_jobs.encode()).fetchone() == (0,))
    ended = conn.execute(
        "select count(*) filter (where state = 'succeeded'), count(*) from queue.jobs"
    ).fetchone()
    assert ended == (n + 10, n + 10)


def test_slots_that_are_passed_on_wake_a_worker(
    connect: Callable[..., psycopg.Connection[Any]],
) -> None:
    conn, sleeping = connect(), connect()
    worker = register(conn)
    defer = "select queue.defer('t', concurrency_key => 'k', concurrency_limit => 1)"
    conn.execute(f"{defer} from generate_series(1, 2)".encode())
    fetch = "select id, claim from queue.fetch(%s, null, 2)"
    ((id, claim),) = conn.execute(fetch, [worker]).fetchall()
    row = sleeping.execute(
        "select may_sleep, channels from queue.before_sleep(%s)", [register(sleeping)]
    ).fetchone()
    assert row is not None
    assert row[0]
    for channel in row[1]:
        sleeping.execute(f'listen "{channel}"'.encode())
    outcomes = json.dumps([{"id": id, "claim": claim, "outcome": "succeeded"}])
    conn.execute("select from queue.finish_many(%s)", [outcomes])
    assert list(sleeping.notifies(timeout=300, stop_after=1))
    assert len(conn.execute(fetch, [worker]).fetchall()) == 1

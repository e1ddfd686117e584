"""Moving a slot: nothing lost or doubled, each lock in its order, whatever dies and when."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from bouncer import PROGRAM, bouncing
from pgdefer import App
from pgdefer.contrib.cluster import Cluster, SlotBusy, move_slot, shard_of, sql
from pgdefer.contrib.cluster.shards import part_of
from pgdefer.database.install import install
from workers import wait_for

from .conftest import NAMES, keys, rows

SLOT = 5  # of shard a
UNFINISHED = "select id from queue.jobs where finished_at is null order by id"


class Workers:
    """Workers of all shards, by hand; the ledger of what they ran is outside of the queue."""

    def __init__(self, dsns: dict[str, str]) -> None:
        self.ran: list[tuple[str, int]] = []  # key, number: appended while the claim is held
        self.running: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self.threads = [
            threading.Thread(target=self._work, args=(name, dsns[name])) for name in NAMES
        ]

    def _work(self, name: str, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            row = connection.execute("select queue.register_worker(%s)", [name]).fetchone()
            assert row is not None
            while not self._stop.is_set():
                fetched = connection.execute(
                    "select id, claim, args from queue.fetch(%s, max_jobs => 5)", [row[0]]
                ).fetchall()
                for _, _, args in fetched:
                    with self._mutex:
                        if self.running[args["key"]]:
                            self.faults.append(f"two at once: {args}")
                        self.running[args["key"]] += 1
                for id, claim, args in fetched:
                    with self._mutex:
                        self.ran.append((args["key"], args["n"]))
                        self.running[args["key"]] -= 1
                    connection.execute("select queue.succeed(%s, %s)", [id, claim])
                if not fetched:
                    connection.execute("select queue.heartbeat(%s)", [row[0]])
                    time.sleep(0.01)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        for thread in self.threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self.threads:
                thread.join()


def judge(workers: Workers, deferred: list[tuple[str, int]]) -> None:
    """Every deferred job ran once, and those of a lock in their order."""
    assert not workers.faults
    assert collections.Counter(workers.ran) == collections.Counter(deferred)
    order: dict[str, list[int]] = {}
    for key, number in workers.ran:
        order.setdefault(key, []).append(number)
    assert {key: numbers for key, numbers in order.items() if numbers != sorted(numbers)} == {}


def defer_all(cluster: Cluster, names: list[str], count: int) -> list[tuple[str, int]]:
    """Defer jobs to and fro between these keys, each with its key as lock."""
    app = cluster.app
    deferred = [(names[n % len(names)], n) for n in range(count)]
    cluster.defer_many(
        (key, app.prepare("work", {"key": key, "n": n}, lock=key)) for key, n in deferred
    )
    return deferred


def set_piece(dsns: dict[str, str], size: int) -> None:
    """Let a part with more jobs than this move in pieces."""
    for dsn in dsns.values():
        rows(
            dsn,
            "create or replace function queue._shard_piece() returns integer language sql"
            f" as 'select {size}'",
        )


def move_under_load(
    cluster: Cluster, dsns: dict[str, str], count: int, names: list[str], patience: float = 5
) -> float:
    """Move a slot with `count` jobs to another shard while its jobs run and more come."""
    deferred = defer_all(cluster, names, count)
    workers = Workers(dsns)
    stop = threading.Event()
    slowest = 0.0

    def produce() -> None:
        nonlocal slowest
        mine = Cluster(App(), *dsns.values(), patience=300)
        number = count
        while not stop.is_set():
            key = names[number % len(names)]
            began = time.monotonic()
            mine.defer("work", {"key": key, "n": number}, lock=key)
            slowest = max(slowest, time.monotonic() - began)
            deferred.append((key, number))
            number += 1
            time.sleep(0.005)
        mine.close()

    producer = threading.Thread(target=produce)
    with workers.working():
        producer.start()
        # On a busy machine it may take seconds to connect.
        wait_for(lambda: len(deferred) > count or not producer.is_alive(), seconds=60)
        done = cluster.move(SLOT, "c", patience=patience)
        stop.set()
        producer.join()
        assert done.is_done, done
        cluster.refresh()
        assert cluster.map.slots[SLOT] == ("c", 2)
        wait_for(lambda: not any(rows(dsns[name], UNFINISHED) for name in NAMES), seconds=600)
    judge(workers, deferred)
    assert len({row for name in "ac" for row in rows(dsns[name], UNFINISHED)}) == 0
    assert cluster.check() == []
    made_of = ", ".join(f"{what} {spent:.3f}" for what, spent in done.pause_of.items())
    print(f"{done.jobs} of {count} jobs moved; longest pause {done.longest_pause:.3f} s"
          f" ({made_of}); defers refused for {done.longest_refusal:.3f} s at most;"
          f" slowest defer {slowest:.3f} s")  # fmt: skip
    return done.longest_pause


def test_a_slot_moves_under_load(cluster: Cluster, dsns: dict[str, str]) -> None:
    names = keys(lambda key: shard_of(key) == SLOT, 20)
    move_under_load(cluster, dsns, 600, names)


def test_one_key_moves_in_pieces_under_load(cluster: Cluster, dsns: dict[str, str]) -> None:
    """Its oldest jobs run in the target while the others are still in the source."""
    set_piece(dsns, 10)
    names = keys(lambda key: shard_of(key) == SLOT, 2)
    move_under_load(cluster, dsns, 600, names)


@pytest.mark.long
def test_a_slot_with_5_000_jobs_moves_under_load(cluster: Cluster, dsns: dict[str, str]) -> None:
    names = keys(lambda key: shard_of(key) == SLOT, 100)
    move_under_load(cluster, dsns, 5_000, names)


@pytest.mark.soak
def test_a_slot_with_100_000_jobs_moves_under_load(cluster: Cluster, dsns: dict[str, str]) -> None:
    names = keys(lambda key: shard_of(key) == SLOT, 2_000)
    assert move_under_load(cluster, dsns, 100_000, names, patience=0.5) <= 1


# Moves the slot in a process of its own for each step that it reads, and prints how that ended.
MOVERS = """
import os, signal, sys, json
from pgdefer import App
from pgdefer.contrib.cluster import Cluster
from pgdefer.contrib.cluster import move_slot
parts, real, count = json.loads(sys.argv[2]), move_slot.execute, 0
def execute(connection, statement, parameters):
    global count
    found = real(connection, statement, parameters)
    # the parts without jobs are all alike: of their steps only the first few count
    count += parameters.get("part") in (None, *parts)
    if count == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
move_slot.execute = execute
for step in map(int, sys.stdin):
    mover = os.fork()
    if mover == 0:
        Cluster(App(), sys.argv[1]).move(5, "c")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(mover, 0)[1]), flush=True)
"""


def ends_of_movers(dsn: str, parts: str) -> Iterator[int]:
    """Start one mover after another, each of which dies a step later; yield the exit codes."""
    command = [sys.executable, "-c", MOVERS, dsn, parts]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as movers:
        assert movers.stdin is not None
        assert movers.stdout is not None
        try:
            for step in range(1, 100):
                print(step, file=movers.stdin)
                yield int(movers.stdout.readline())
        finally:
            movers.kill()


@pytest.mark.parametrize("piece", [100, pytest.param(4, marks=pytest.mark.long)])
def test_a_mover_that_dies_at_any_step_is_followed(
    cluster: Cluster, dsns: dict[str, str], piece: int
) -> None:
    """One kill after another, until a mover gets through: each goes on where the last one died."""
    set_piece(dsns, piece)
    names = keys(lambda key: shard_of(key) == SLOT, 2)
    deferred = defer_all(cluster, names, 12)
    parts = json.dumps([part_of(name) for name in names])
    with psycopg.connect(dsns["a"], autocommit=True) as connection:
        connection.execute("select queue.hold(%s)", [rows(dsns["a"], UNFINISHED)[3][0]])
    killed = 0
    for code in ends_of_movers(dsns["b"], parts):
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
        # at each point one shard at most has the key, and no job is in two places
        homes = [rows(dsns[name], "select queue.shard_find(%s)", [names[0]])[0][0] for name in "ac"]
        assert [name for name, home in zip("ac", homes, strict=True) if home == name] in (
            [],
            ["a"],
            ["c"],
        )
        jobs = [len(rows(dsns[name], UNFINISHED)) for name in "ac"]
        sent = rows(
            dsns["a"],
            "select count(*) from queue.shard_sent s join queue.shard_part p using (slot, part)"
            " where p.state = 'leaving'",
        )[0][0]
        assert len(deferred) <= sum(jobs) + sent <= len(deferred) + 6  # sent, and there already
    assert killed >= 10
    assert cluster.move(SLOT, "c").is_done
    assert rows(dsns["a"], UNFINISHED) == []
    found = rows(
        dsns["c"], "select args ->> 'key', (args ->> 'n')::int, state from queue.jobs order by id"
    )
    for name in names:
        assert [n for key, n, _ in found if key == name] == [
            n for key, n in deferred if key == name
        ]
    assert [state for *_, state in found].count("held") == 1
    assert cluster.check() == []
    for table in ("shard_move", "shard_part", "shard_job", "shard_sent"):
        assert [rows(dsns[name], f"select * from queue.{table}") for name in "ac"] == [[], []]


def test_a_move_goes_on_by_new_connections(
    cluster: Cluster, dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover without CPU is idle between a step and its commit; a session may also be ended."""
    idle = "set local idle_in_transaction_session_timeout to '1ms'"
    end = "select pg_terminate_backend(pg_backend_pid())"
    real = move_slot.execute
    lost = [
        (sql.PART_LEAVE, "shard_a", idle),
        (sql.PART_ARRIVE, "shard_b", end),
        (sql.MOVED, "shard_a", idle),
    ]

    def execute(connection: Any, statement: Any, parameters: Any) -> Any:
        found = real(connection, statement, parameters)
        if lost and (statement, connection.info.dbname) == lost[0][:2]:
            is_on = f"select from pg_stat_activity where pid = {connection.info.backend_pid}"
            connection.execute(lost.pop(0)[2])
            wait_for(lambda: not rows(dsns["a"], is_on))
        return found

    monkeypatch.setattr(move_slot, "execute", execute)
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    cluster.defer_many((key, cluster.app.prepare("work", {})) for _ in range(3))
    done = cluster.move(SLOT, "b")
    assert (done.jobs, done.is_done, lost) == (3, True, [])
    assert cluster.check() == []
    lost += [(sql.MAP, "shard_b", end)] * 5
    with pytest.raises(psycopg.OperationalError):
        cluster.move(SLOT, "a")
    assert len(lost) == 1


def test_everything_about_a_job_moves(cluster: Cluster, dsns: dict[str, str]) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    first = cluster.defer("work", {"n": 0}, shard_key=key, delay=dt.timedelta(days=1))
    job = {
        "shard_key": key, "task": "full", "args": {"card": {"x": [1, None, "{n}"]}}, "queue": "q",
        "priority": -3, "lock": "l", "queueing_lock": "u", "deadline": "2100-01-01T00:00:00Z",
        "scheduled_at": "2099-01-01T00:00:00Z", "needs": [first.id],
        "concurrency_key": "k", "concurrency_limit": 2,
        "options": {
            "concurrency": [{"key": "r", "rate": {"limit": 5, "per": "1 s"}, "weight": 2}],
            "unique_until": "finish", "lock_mode": "mutex", "needs_mode": "any",
            "on_need_failure": "proceed", "on_limit": "discard", "timeout": "5 min",
            "retry": {"max_attempts": 7, "base": "3 s"}, "expires_at": "2101-01-01T00:00:00Z",
            "held": True, "description": "d", "headers": {"h": [1]}, "max_progress": None,
            "retain": {"failed": "3 days"}, "share": "s", "idempotency_key": "i",
            "unique_for": "2 days",
        },
    }  # fmt: skip
    rows(dsns["a"], "select queue.shard_defer_many(%s)", [Jsonb([job])])
    statement = (
        "select to_jsonb(j)"
        " - '{id,xid,created_at,needs,is_overridden,flags,tag,options,is_kept}'::text[],"
        " j.options - 'terms', replace((j.options -> 'terms')::text, 'null', '{}'),"
        " j.flags & ~2048,"
        " (select count(*) from queue.need n where n.job_id = j.id), s.state"
        " from queue.job_now j join queue.jobs s using (id) where j.task = 'full'"
    )
    (before,) = rows(dsns["a"], statement)
    assert cluster.move(SLOT, "b").jobs == 2
    (after,) = rows(dsns["b"], statement)
    assert after == before
    assert rows(dsns["a"], "select * from queue.jobs") == []
    # the job's keys moved with it
    again = {"shard_key": key, "task": "full", "options": {"idempotency_key": "i"}}
    ids = rows(dsns["b"], "select queue.shard_defer_many(%s)", [Jsonb([again])])
    assert ids == rows(dsns["b"], "select id from queue.jobs where task = 'full'")


def test_what_has_started_stays_until_it_ends(cluster: Cluster, dsns: dict[str, str]) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    for n in range(3):
        cluster.defer("work", {"n": n}, lock=key)
    with psycopg.connect(dsns["a"], autocommit=True) as connection:
        connection.execute("select queue.register_worker('w')")
        row = connection.execute(
            "select id, claim from queue.fetch((select max(id) from queue.workers))"
        ).fetchone()
        assert row is not None
        done = cluster.move(SLOT, "b", patience=0)
        assert done.stays == {part_of(key): f"job {row[0]}: it runs"}
        assert {state for (state,) in rows(dsns["a"], "select state from queue.jobs")} == {
            "running",
            "blocked",
        }
        cluster.defer("work", {"n": 3}, lock=key)  # still accepted where it is
        connection.execute("select queue.retry_later(%s, %s, now() + interval '1 hour')", row)
        assert cluster.move(SLOT, "b", patience=0).stays == {
            part_of(key): f"job {row[0]}: it has been started before"
        }
        assert cluster.move(SLOT, "b", patience=0, started=True).jobs == 4
    assert [
        n for (n,) in rows(dsns["b"], "select (args ->> 'n')::int from queue.jobs order by id")
    ] == [0, 1, 2, 3]


def test_an_open_transaction_keeps_its_part(cluster: Cluster, dsns: dict[str, str]) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    rows(dsns["a"], "select queue.shard_leave(%s, 'b'), queue.shard_list(%s)", [SLOT, SLOT])
    with psycopg.connect(dsns["a"]) as producer:
        cluster.defer("work", {}, lock=key, connection=producer)
        with psycopg.connect(dsns["a"], autocommit=True) as connection:
            connection.execute("set lock_timeout to '20ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                connection.execute("select queue.shard_part_leave(%s, %s)", [SLOT, part_of(key)])
        producer.commit()
    assert cluster.move(SLOT, "b").jobs == 1


def test_an_open_transaction_keeps_the_slot_for_as_long_as_patience(
    cluster: Cluster, dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are shut out for each other second at most."""
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    clock = itertools.count(0, 0.5)
    now = 0.0
    closed: list[float] = []
    real = move_slot.execute

    def monotonic() -> float:
        nonlocal now
        now = next(clock)
        return now

    def execute(connection: Any, statement: Any, parameters: Any) -> Any:
        if statement is sql.CLOSE:
            closed.append(now)
        return real(connection, statement, parameters)

    with psycopg.connect(dsns["a"]) as producer:
        cluster.defer("work", {}, lock=key, connection=producer)
        with monkeypatch.context() as patch:
            patch.setattr(move_slot, "execute", execute)
            patch.setattr(move_slot, "time", types.SimpleNamespace(monotonic=monotonic))
            with pytest.raises(SlotBusy, match="an open transaction has deferred for it"):
                cluster.move(SLOT, "b", patience=3)
        producer.commit()
    assert closed == [0.5, 2.5]
    assert now == 3.5
    assert rows(dsns["a"], "select from queue.shard_move") == []
    assert cluster.move(SLOT, "b").jobs == 1


def test_who_replaces_a_job_keeps_none_of_its_part_held(
    cluster: Cluster, dsns: dict[str, str]
) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    options: dict[str, Any] = {"shard_key": key, "queueing_lock": "q", "on_conflict": "replace"}
    jobs = [cluster.defer("work", {}, **options), cluster.defer("work", {}, shard_key=key)]
    rows(dsns["a"], "select queue.shard_leave(%s, 'b'), queue.shard_list(%s)", [SLOT, SLOT])
    rows(dsns["a"], "select to_hold from queue.shard_hold(%s, %s)", [SLOT, part_of(key)])
    states = "select state, reason from queue.jobs order by id"
    assert rows(dsns["a"], states) == [("blocked", "moving")] * 2
    with psycopg.connect(dsns["a"]) as producer:
        assert cluster.defer("work", {}, connection=producer, **options) == jobs[0]
        with psycopg.connect(dsns["a"], autocommit=True) as connection:
            connection.execute("set statement_timeout to '60s'")
            connection.execute("select queue.shard_unhold(%s, %s)", [SLOT, part_of(key)])
    assert [state for state, _ in rows(dsns["a"], states)] == ["ready"] * 2


def test_a_signal_that_is_not_committed_keeps_its_part(
    cluster: Cluster, dsns: dict[str, str]
) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    job = cluster.defer("work", {}, shard_key=key)
    with psycopg.connect(dsns["a"]) as sender:
        sender.execute("select queue.signal(%s, 'approved')", [job.id])
        done = cluster.move(SLOT, "b", patience=0)
        assert done.stays == {part_of(key): "an open transaction"}
        sender.commit()
    assert cluster.move(SLOT, "b").jobs == 1
    assert rows(dsns["b"], "select name from queue.received_signal") == [("approved",)]


def test_a_job_that_another_one_needs_stays(cluster: Cluster, dsns: dict[str, str]) -> None:
    """Only its part: the rest of the slot moves."""
    one, two = keys(lambda key: shard_of(key) == SLOT, 2)
    needed = cluster.defer("work", {}, shard_key=one)
    cluster.defer("work", {}, shard_key=two)
    rows(dsns["a"], "select queue.defer('plain', needs => array[%s]::bigint[])", [needed.id])
    done = cluster.move(SLOT, "b")
    assert done.jobs == 1
    assert done.stays == {part_of(one): f"job {needed.id}: another one needs it"}
    rows(dsns["a"], "select queue.delete(array(select id from queue.jobs where task = 'plain'))")
    assert cluster.move(SLOT, "b").is_done


@pytest.mark.skipif(PROGRAM is None, reason="there is no pgbouncer here")
def test_a_move_leaves_no_setting_to_other_clients_of_pgbouncer(dsns: dict[str, str]) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    with bouncing(dsns["a"]) as bouncer:
        shards = {name: make_conninfo(bouncer.dsn, dbname=f"shard_{name}") for name in NAMES}
        cluster = Cluster.create(App(pgbouncer=True), shards)
        cluster.defer("work", {}, shard_key=key)
        assert cluster.move(SLOT, "b").jobs == 1
        cluster.close()
        for name in "ab":
            assert rows(shards[name], "show lock_timeout") == [("0",)]


def test_a_slot_moves_where_transactions_are_serializable_by_default(
    app: App, dsns: dict[str, str]
) -> None:
    for name in NAMES:
        change = f"alter database shard_{name} set default_transaction_isolation to serializable"
        rows(dsns[name], change)
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    cluster = Cluster.create(app, dsns)
    cluster.defer("work", {}, shard_key=key)
    assert cluster.move(SLOT, "b").jobs == 1
    cluster.close()


def test_no_two_movers(
    cluster: Cluster, dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with psycopg.connect(dsns["a"], autocommit=True) as connection:
        connection.execute("select queue.shard_leave(%s, 'b')", [SLOT])
        assert connection.execute("select queue.shard_mover(%s)", [SLOT]).fetchone() == (True,)
        with pytest.raises(SlotBusy, match="by another process"):
            cluster.move(SLOT, "b")


def test_a_new_shard_and_one_that_is_down(app: App, dsns: dict[str, str], blank_dsn: str) -> None:
    """A fourth shard gets a slot while another one can't be reached, which learns it later."""
    down = dsns | {"b": make_conninfo(dsns["b"], dbname="nowhere")}
    Cluster.create(app, dsns).close()
    for name in NAMES:
        rows(dsns[name], "update queue.shard set dsn = %s where name = 'b'", [down["b"]])
    install(blank_dsn)
    cluster = Cluster(app, dsns["a"])
    cluster.add("d", blank_dsn)
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    cluster.defer("work", {}, shard_key=key)
    assert cluster.move(SLOT, "d").jobs == 1
    assert cluster.check() == ["shard b: can't be reached"]
    find = "select queue.shard_find(%s)"
    assert [rows(dsns[name], find, [key]) for name in "abc"] == [[("d",)], [("a",)], [("d",)]]
    cluster.map.shards["b"] = dsns["b"]
    cluster.close()
    late = Cluster(app, dsns["a"])
    late.refresh()
    late.map.shards["b"] = dsns["b"]
    assert late.tell() == []
    assert rows(dsns["b"], find, [key]) == [("d",)]
    assert late.check() == []
    late.close()

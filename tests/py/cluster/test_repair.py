"""Moves that were refused or interrupted, and shards that come back: what repairs them."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from pgdefer import App, InvalidParameter
from pgdefer.contrib import cluster as package
from pgdefer.contrib.cluster import Cluster, install, move_slot, shard_of, sql
from pgdefer.contrib.cluster.shards import part_of
from pgdefer.database import install as installing
from pgdefer.database.embedded import EmbeddedServer
from pgdefer.database.sql import Statement
from support import ROOT
from workers import wait_for

from .conftest import NAMES, keys, rows

SLOT = 5  # of shard a
TABLES = ("shard_move", "shard_part", "shard_job", "shard_sent")


def left(dsn: str) -> list[str]:
    """Return the tables in which something is left of a move."""
    return [name for name in TABLES if rows(dsn, f"select from queue.{name} limit 1")]


def owners(dsns: dict[str, str]) -> list[tuple[str, int]]:
    """Return who has the slot, by the map of each shard."""
    read = "select shard, version from queue.shard_slot where slot = %s"
    return [rows(dsns[name], read, [SLOT])[0] for name in NAMES]


def test_a_target_that_refuses_leaves_the_slot_where_it_is(
    cluster: Cluster, dsns: dict[str, str]
) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    cluster.defer("work", {}, shard_key=key)
    rows(dsns["b"], "create or replace function queue.shard_format() returns integer"
                    " language sql as 'select 0'")  # fmt: skip
    with pytest.raises(InvalidParameter, match="different releases"):
        cluster.move(SLOT, "b")
    assert left(dsns["a"]) == []
    assert cluster.move(SLOT, "c").jobs == 1


def test_a_move_is_given_up(cluster: Cluster, dsns: dict[str, str]) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    cluster.defer("work", {}, shard_key=key)
    rows(dsns["a"], "select queue.shard_leave(%s, 'b')", [SLOT])
    rows(dsns["b"], "select queue.shard_receive(%s, 'a', 2, queue.shard_format())", [SLOT])
    cluster.stay(SLOT)
    assert [left(dsns[name]) for name in NAMES] == [[], [], []]
    assert owners(dsns) == [("a", 2)] * 3
    cluster.defer("work", {}, shard_key=key)
    assert cluster.move(SLOT, "c").jobs == 2
    assert owners(dsns) == [("c", 3)] * 3


def test_a_move_without_its_last_step_is_followed(
    cluster: Cluster, dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot moves on, and back to the shard that has not heard of the end."""
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    cluster.defer("work", {}, shard_key=key)
    real = move_slot._Mover.call

    def call(mover: Any, connection: Any, statement: Statement, **parameters: Any) -> Any:
        if statement is sql.MOVED and connection is mover.source:
            raise KeyboardInterrupt
        return real(mover, connection, statement, **parameters)

    for target in ("b", "c"):
        with monkeypatch.context() as patch:
            patch.setattr(move_slot._Mover, "call", call)
            with pytest.raises(KeyboardInterrupt):
                cluster.move(SLOT, target)
    assert cluster.move(SLOT, "a").is_done
    assert owners(dsns) == [("a", 4)] * 3
    assert [left(dsns[name]) for name in NAMES] == [[], [], []]
    assert cluster.check() == []


def test_empty_parts_that_have_left_arrive_at_once(
    cluster: Cluster, dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover died before it brought them: until they arrive, defers for them are refused."""
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    cluster.defer("work", {}, shard_key=key)
    real = move_slot._Mover.call
    deaths = [sql.EMPTY_PARTS, sql.ARRIVE_EMPTY, sql.GONE_EMPTY]
    steps = 0

    def call(mover: Any, connection: Any, statement: Statement, **parameters: Any) -> Any:
        nonlocal steps
        steps += 1
        if deaths and statement is deaths[0]:
            deaths.pop(0)
            raise KeyboardInterrupt
        return real(mover, connection, statement, **parameters)

    monkeypatch.setattr(move_slot._Mover, "call", call)
    while deaths:
        with pytest.raises(KeyboardInterrupt):
            cluster.move(SLOT, "b")
    steps = 0
    assert cluster.move(SLOT, "b").jobs == 1
    assert steps < 100
    assert cluster.check() == []


def test_jobs_arrive_whatever_size_the_target_allows(
    cluster: Cluster, dsns: dict[str, str]
) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    given = random.Random(1).randbytes(90_000).hex()
    for n in range(2):
        cluster.defer("work", {"n": n, "given": given}, shard_key=key, idempotency_key="i" * n)
    rows(dsns["b"], "select queue.configure('{\"max_size\": 100000}')")
    rows(dsns["b"], "select queue.defer('work', options => '{\"idempotency_key\": \"i\"}')")
    worker = rows(dsns["b"], "select queue.register_worker('w')")[0][0]
    assert cluster.move(SLOT, "b").jobs == 2
    found = rows(dsns["b"], "select args ->> 'given' from queue.jobs where args ? 'n'")
    assert found == [(given,)] * 2
    assert rows(dsns["b"], "select queue.configure('{}') ->> 'max_size'") == [("100000",)]
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="too large"):
        rows(dsns["b"], "select queue.defer('work', %s)", [Jsonb({"given": given})])
    # no new era has begun
    assert rows(dsns["b"], "select queue.register_worker('w')") == [(worker + 1,)]


def test_check_reports_jobs_under_way(
    cluster: Cluster, dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    for _ in range(2):
        cluster.defer("work", {}, shard_key=key)
    with monkeypatch.context() as patch:
        patch.setattr(move_slot._Mover, "arrive", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cluster.move(SLOT, "b")
    wrong = [
        "slot 5: 2 jobs have left a: go on with its move to b",
        "slot 5: its move from a to b has stopped and holds 0 jobs: go on with it, or give it up",
    ]
    wait_for(lambda: cluster.check() == wrong)  # once the mover's session has ended
    assert cluster.move(SLOT, "b").jobs == 2
    assert cluster.check() == []


def test_check_reports_a_move_that_has_stopped(cluster: Cluster, dsns: dict[str, str]) -> None:
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    for _ in range(2):
        cluster.defer("work", {}, shard_key=key)
    with psycopg.connect(dsns["a"], autocommit=True) as mover:
        mover.execute("select queue.shard_leave(%s, 'b'), queue.shard_mover(%s)", [SLOT, SLOT])
        mover.execute("select queue.shard_list(%s)", [SLOT])
        mover.execute("select queue.shard_hold(%s, %s)", [SLOT, part_of(key)])
        assert cluster.check() == []  # it is being made
    stopped = (
        "slot 5: its move from a to b has stopped and holds 2 jobs: go on with it, or give it up"
    )
    wait_for(lambda: cluster.check() == [stopped])
    cluster.stay(SLOT)
    assert cluster.check() == []


def test_a_shard_without_its_map_is_reported_and_not_told(
    cluster: Cluster, app: App, dsns: dict[str, str], blank_dsn: str
) -> None:
    """One whose database was made anew: without a queue, without shards, without a map."""

    def lead_to(dsn: str) -> Cluster:
        for name in NAMES:
            rows(dsns[name], "update queue.shard set dsn = %s where name = 'b'", [dsn])
        found = Cluster(app, dsns["a"])
        found.refresh()
        return found

    def wrong(dsn: str) -> list[str]:
        with contextlib.closing(lead_to(dsn)) as late:
            assert late.tell() == ["b"]
            return late.check()

    assert wrong(make_conninfo(dsns["b"], dbname="nowhere")) == ["shard b: can't be reached"]
    (found,) = wrong(blank_dsn)
    assert found.startswith('shard b: schema "queue" does not exist. Run `pgdefer install`')
    installing.install(blank_dsn)
    (found,) = wrong(blank_dsn)
    assert found.startswith("shard b: function queue.shard_map() does not exist")
    install(blank_dsn)
    assert wrong(blank_dsn) == ["shard b: its database has no map"]
    assert rows(blank_dsn, "select from queue.shard") == []
    assert wrong(dsns["c"]) == ["shard b: its database is c"]
    with contextlib.closing(Cluster(app, blank_dsn, dsns["a"])) as late:
        assert late.of("k").client is late.app_of(late.map.slots[shard_of("k")][0]).client
    with (
        contextlib.closing(Cluster(app, blank_dsn)) as late,
        pytest.raises(InvalidParameter, match="no database of the cluster has a map"),
    ):
        late.of("k")
    lead_to(dsns["b"]).close()
    assert cluster.check() == []


@contextlib.contextmanager
def restored(server: EmbeddedServer, name: str) -> Iterator[None]:
    """Restore a shard to the time before the block, after it."""
    database, copy = f"shard_{name}", f"shard_{name}_old"
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s",
            [database],
        )
        connection.execute(f"create database {copy} template {database}".encode())
        yield
        connection.execute(f"drop database {database} with (force)".encode())
        connection.execute(f"alter database {copy} rename to {database}".encode())


@pytest.mark.parametrize("name", ["a", pytest.param("b", marks=pytest.mark.long)])
def test_a_shard_is_restored_to_the_middle_of_a_move(
    app: App, dsns: dict[str, str], server: EmbeddedServer, name: str
) -> None:
    """It is told the map of the others, and serves what it should."""
    cluster = Cluster.create(app, dsns)
    names = keys(lambda key: shard_of(key) == SLOT, 2)
    for key in (*names, names[1]):
        cluster.defer("work", {}, shard_key=key)
    rows(dsns["a"], "select queue.shard_leave(%s, 'b'), queue.shard_list(%s)", [SLOT, SLOT])
    rows(dsns["b"], "select queue.shard_receive(%s, 'a', 2, queue.shard_format())", [SLOT])
    rows(dsns["a"], "select queue.shard_part_leave(%s, %s)", [SLOT, part_of(names[0])])
    rows(dsns["a"], "select queue.shard_hold(%s, %s)", [SLOT, part_of(names[1])])
    cluster.close()
    with restored(server, name):
        mover = Cluster(App(), dsns["c"])
        assert mover.move(SLOT, "b").jobs == 3
        mover.close()
    late = Cluster(app, dsns["c"])
    late.refresh()
    assert late.tell() == []
    assert owners(dsns) == [("b", 2)] * 3
    assert [left(dsns[name]) for name in NAMES] == [[], [], []]
    assert late.check() == []
    assert rows(dsns[name], "select from queue.jobs where reason = 'moving'") == []
    for key in names:
        late.defer("late", {}, shard_key=key)
    assert late.move(SLOT, "c").is_done
    assert owners(dsns) == [("c", 3)] * 3
    late.close()


def test_a_target_that_has_forgotten_parts(
    app: App, dsns: dict[str, str], server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement of docs/scaling.md."""
    text = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    (repair,) = re.findall(r"`(insert into queue.shard_part [^`]*)`", text)
    cluster = Cluster.create(app, dsns)
    (key,) = keys(lambda key: shard_of(key) == SLOT, 1)
    cluster.defer("work", {}, shard_key=key)
    cluster.close()
    real = move_slot._Mover.call

    def call(mover: Any, connection: Any, statement: Statement, **parameters: Any) -> Any:
        if statement is sql.MOVED:
            raise KeyboardInterrupt
        return real(mover, connection, statement, **parameters)

    rows(dsns["b"], "select queue.shard_receive(%s, 'a', 2, queue.shard_format())", [SLOT])
    with restored(server, "b"), monkeypatch.context() as patch:
        patch.setattr(move_slot._Mover, "call", call)
        with pytest.raises(KeyboardInterrupt):
            Cluster(App(), dsns["a"]).move(SLOT, "b")
    late = Cluster(app, dsns["a"])
    with pytest.raises(InvalidParameter, match="parts of this slot have not moved yet"):
        late.move(SLOT, "b")
    rows(dsns["b"], repair.replace("17", str(SLOT)))
    assert late.move(SLOT, "b").is_done
    assert owners(dsns) == [("b", 2)] * 3
    assert late.check() == []
    late.close()


def test_a_cluster_is_created_after_a_failure(
    app: App, dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(psycopg.OperationalError):
        Cluster.create(app, {**dsns, "b": make_conninfo(dsns["b"], dbname="nowhere")})

    def fail(dsn: str, **given: Any) -> None:
        if given and given["self"] == "b":
            raise KeyboardInterrupt
        install(dsn, **given)

    with monkeypatch.context() as patch:
        patch.setattr(package, "install", fail)
        with pytest.raises(KeyboardInterrupt):
            Cluster.create(app, dsns)
    cluster = Cluster.create(app, dsns)
    assert cluster.check() == []
    cluster.close()


def test_no_such_slot_or_shard(cluster: Cluster) -> None:
    for slot in (1024, -1):
        with pytest.raises(InvalidParameter, match=rf"no slot {slot}\. Slots are 0 to 1023"):
            cluster.move(slot, "b")
        with pytest.raises(InvalidParameter, match="no slot"):
            cluster.stay(slot)
    with pytest.raises(InvalidParameter, match=r"no shard 'z'\. The map has a, b, c"):
        cluster.move(SLOT, "z")

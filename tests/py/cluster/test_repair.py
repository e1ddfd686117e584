"""Moves that were refused or interrupted, and shards that come back: what repairs them."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from pgdefer import InvalidParameter
from pgdefer.contrib.cluster import Cluster, moving, shard_of, sql
from pgdefer.database.sql import Statement

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
    cluster.stay(SLOT)
    assert left(dsns["a"]) == []
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
    real = moving._Mover.call

    def call(mover: Any, connection: Any, statement: Statement, **parameters: Any) -> Any:
        if statement is sql.MOVED and connection is mover.source:
            raise KeyboardInterrupt
        return real(mover, connection, statement, **parameters)

    for target in ("b", "c"):
        with monkeypatch.context() as patch:
            patch.setattr(moving._Mover, "call", call)
            with pytest.raises(KeyboardInterrupt):
                cluster.move(SLOT, target)
    assert cluster.move(SLOT, "a").is_done
    assert owners(dsns) == [("a", 4)] * 3
    assert [left(dsns[name]) for name in NAMES] == [[], [], []]
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
        patch.setattr(moving._Mover, "arrive", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cluster.move(SLOT, "b")
    assert cluster.check() == ["slot 5: 2 jobs have left a: go on with its move to b"]
    assert cluster.move(SLOT, "b").jobs == 2
    assert cluster.check() == []

"""Clusters of three databases of one server: they show what is right, not how fast it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgdefer import App
from pgdefer.contrib.cluster import Cluster
from pgdefer.database.embedded import EmbeddedServer

NAMES = ("a", "b", "c")


@pytest.fixture
def dsns(server: EmbeddedServer, dsn: str) -> Iterator[dict[str, str]]:
    """The databases of three shards; all invariants hold in each of them afterwards."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        for name in NAMES:
            database = sql.Identifier(f"shard_{name}")
            connection.execute(sql.SQL("drop database if exists {} with (force)").format(database))
            connection.execute(sql.SQL("create database {} template pgdefer_base").format(database))
        found = {name: make_conninfo(server.dsn(f"shard_{name}")) for name in NAMES}
        yield found
        broken = [row for one in found.values() for row in rows(one, "select * from queue.check()")]
        for name in NAMES:
            connection.execute(
                sql.SQL("drop database {} with (force)").format(sql.Identifier(f"shard_{name}"))
            )
    assert not broken


@pytest.fixture
def app() -> Iterator[App]:
    app = App()
    yield app
    app.close()


@pytest.fixture
def cluster(app: App, dsns: dict[str, str]) -> Iterator[Cluster]:
    """The slots are divided evenly: a has the first third, c the last."""
    found = Cluster.create(app, dsns)
    yield found
    found.close()


def rows(dsn: str, statement: str, parameters: Any = None) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        done = connection.execute(statement.encode(), parameters)
        return done.fetchall() if done.description else []


def keys(of: Callable[[str], bool], count: int) -> list[str]:
    """Return keys with a property."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        number += 1
        if of(f"key {number}"):
            found.append(f"key {number}")
    return found

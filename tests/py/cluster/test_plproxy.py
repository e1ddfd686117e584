"""Deferring through a database that routes, by PL/Proxy of the system's PostgreSQL."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.types.json import Jsonb

from pgdefer import App
from pgdefer.contrib.cluster import Cluster, shard_of
from pgdefer.contrib.cluster.install import folder
from pgdefer.database.embedded import temporary_server
from pgdefer.database.install import install
from support import ROOT, create_database

from .conftest import NAMES, keys, rows

pytestmark = pytest.mark.client


@pytest.fixture(scope="module")
def shards() -> Iterator[dict[str, str]]:
    """Three shards and, as the empty name, the router, in a server of the system's PostgreSQL."""
    found = subprocess.run(
        [ROOT / "tests" / "system-postgres"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not found:
        pytest.skip("the system has no PostgreSQL 15, 16 or 17")
    version = Path(found).parent.name
    if not Path(f"/usr/share/postgresql/{version}/extension/plproxy.control").exists():
        pytest.skip(f"postgresql-{version}-plproxy is missing (tests/install-tools postgres)")
    with temporary_server(found) as server:
        dsns = {name: server.dsn(f"shard_{name}") for name in NAMES}
        for name in NAMES:
            create_database(server, f"shard_{name}")
            install(dsns[name], "plain")
        create_database(server, "router")
        dsns[""] = server.dsn("router")
        Cluster.create(App(), {name: dsns[name] for name in NAMES}).close()
        with psycopg.connect(dsns[""], autocommit=True) as connection:
            connection.execute("create schema queue")
            connection.execute((folder("cluster") / "cluster.sql").read_bytes())
            given = Jsonb({name: dsns[name] for name in NAMES})
            connection.execute("select queue.shard_start(null, %s)", [given])
            connection.execute((folder("plproxy") / "router.sql").read_bytes())
        yield dsns


def test_the_router_defers_in_the_shard_of_the_key(shards: dict[str, str]) -> None:
    names = keys(lambda _: True, 30)
    with psycopg.connect(shards[""], autocommit=True) as router:
        for key in names[:15]:
            router.execute("select queue.defer('work', lock => %s)", [key])
        jobs = Jsonb(
            [{"task": "work", "shard_key": key, "args": {"n": n}} for n, key in enumerate(names)]
        )
        ids = [id for (id,) in router.execute("select queue.defer_many(%s)", [jobs]).fetchall()]
    found = {
        name: rows(shards[name], "select id, headers ->> 'shard_key', args ->> 'n' from queue.jobs")
        for name in NAMES
    }
    for number, name in enumerate(NAMES):
        assert found[name]
        assert {shard_of(key) * 3 // 1024 for _, key, _ in found[name]} == {number}
    assert sum(map(len, found.values())) == 45
    for n, key in enumerate(names):
        home = found[NAMES[shard_of(key) * 3 // 1024]]
        assert (ids[n], key, str(n)) in home


def test_it_is_not_undone_with_the_caller(shards: dict[str, str]) -> None:
    """What the page says: PL/Proxy commits by itself."""
    with psycopg.connect(shards[""]) as router:
        router.execute("select queue.defer('rolled back', shard_key => 'a')")
        router.rollback()
    home = shards[NAMES[shard_of("a") * 3 // 1024]]
    assert rows(home, "select count(*) from queue.jobs where task = 'rolled back'") == [(1,)]


def test_errors_of_a_shard_reach_the_caller(shards: dict[str, str]) -> None:
    with psycopg.connect(shards[""], autocommit=True) as router:
        with pytest.raises(psycopg.Error) as refused:
            router.execute("select queue.defer('work', '[]', shard_key => 'a')")
        assert refused.value.sqlstate == "22023"
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="no shard key"):
            router.execute("select queue.defer('work')")
        router.execute("select queue.defer('work', shard_key => 'a', queueing_lock => 'q')")
        with pytest.raises(psycopg.Error) as refused:
            router.execute("select queue.defer('work', shard_key => 'a', queueing_lock => 'q')")
        assert refused.value.sqlstate == "QJ004"


def test_the_router_learns_where_a_slot_went(shards: dict[str, str]) -> None:
    slot = shard_of("a")
    cluster = Cluster(App(), shards["a"])
    source = NAMES[slot * 3 // 1024]
    target = NAMES[(slot * 3 // 1024 + 1) % 3]
    assert cluster.move(slot, target).is_done
    with psycopg.connect(shards[""], autocommit=True) as router:
        with pytest.raises(psycopg.Error, match="another shard") as refused:
            router.execute("select queue.defer('moved', shard_key => 'a')")
        assert refused.value.sqlstate == "55000"
        told = Jsonb(rows(shards[target], "select queue.shard_map()")[0][0])
        assert router.execute("select queue.shard_learn(%s)", [told]).fetchone() == (1,)
        router.execute("select queue.defer('moved', shard_key => 'a')")
    count = "select count(*) from queue.jobs where task = 'moved'"
    assert (rows(shards[source], count), rows(shards[target], count)) == ([(0,)], [(1,)])
    cluster.move(slot, source)
    cluster.close()

"""Where keys belong: the same in SQL and Python; who accepts which; what a stale client gets."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql as sql_of
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from pgdefer import App, InvalidParameter
from pgdefer.contrib.cluster import Cluster, install, shard_of, sql
from pgdefer.contrib.cluster.shards import part_of
from pgdefer.database import install as installing
from pgdefer.database.embedded import EmbeddedServer

from .conftest import NAMES, keys, rows

HOSTILE = [
    "a",
    "A",
    " ",
    "é",
    "e\u0301",
    "ß",
    "\U0001f600",
    "\u202eabc",
    "';--",
    "{x}",
    "%s",
    "\\",
    "\n",
    "0" * 1000,
]


@settings(max_examples=200)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=200))
def _python_is_sha256(key: str) -> None:
    digest = int.from_bytes(hashlib.sha256(key.encode()).digest()[:3], "big")
    assert (shard_of(key), part_of(key)) == (digest >> 14, digest >> 2 & 4095)
    assert 0 <= shard_of(key) < 1024


def test_sql_and_python_give_a_key_the_same_slot(cluster: Cluster, dsns: dict[str, str]) -> None:
    assert cluster.map.slots == []  # not needed
    _python_is_sha256()
    with psycopg.connect(dsns["a"], autocommit=True) as connection:

        @settings(max_examples=100)
        @given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
        def same(key: str) -> None:
            row = connection.execute(
                "select queue.shard_of(%(key)s), queue._shard_part_of(%(key)s)", {"key": key}
            ).fetchone()
            assert row == (shard_of(key), part_of(key))

        same()
        for key in HOSTILE:
            row = connection.execute("select queue.shard_of(%s)", [key]).fetchone()
            assert row == (shard_of(key),), key


def test_the_slot_of_a_key_never_changes() -> None:
    assert [shard_of(key) for key in ("a", "b", "customer 42", "\U0001f600")] == [
        int(hashlib.sha256(key.encode()).hexdigest()[:3], 16) >> 2
        for key in ("a", "b", "customer 42", "\U0001f600")
    ]
    assert shard_of("a") == 0xCA978112 >> 22  # SHA-256 of a, from FIPS 180


def test_jobs_go_where_their_keys_belong(cluster: Cluster, app: App, dsns: dict[str, str]) -> None:
    @app.task(name="work", lock="order:{order}")
    def work(order: int) -> None: ...

    for order in range(30):
        job = cluster.defer("work", {"order": order})
        assert cluster.of(f"order:{order}").client is job.client
    cluster.defer_many((f"k{n}", app.prepare("other", {"n": n})) for n in range(30))
    found = [
        (shard_of(row[0]) * 3 // 1024, "abc".index(name))
        for name in NAMES
        for row in rows(dsns[name], "select headers ->> 'shard_key' from queue.jobs")
    ]
    assert len(found) == 60
    assert {shard for shard, _ in found} == {0, 1, 2}
    assert all(wanted == got for wanted, got in found)


def test_a_template_gives_the_key_that_it_gives_as_a_lock(
    cluster: Cluster, dsns: dict[str, str]
) -> None:
    for lock in ("{{n}}", "{{{n}}}", "}}{n}", "{n}}"):
        cluster.defer("work", {"n": 1}, lock=lock)
    found = [
        row
        for name in NAMES
        for row in rows(dsns[name], "select lock, headers ->> 'shard_key' from queue.jobs")
    ]
    assert sorted(found) == [(key, key) for key in ("1}", "{1}", "{n}", "}1")]


async def test_deferring_in_coroutines(cluster: Cluster, dsns: dict[str, str]) -> None:
    await cluster.defer_async("work", {}, lock="x")
    await cluster.defer_async("work", {}, share="x")
    await cluster.defer_async("work", {}, headers={"tenant": "x"})
    await cluster.defer_async("work", {}, shard_key="x", lock="other")
    name = cluster.map.slots[shard_of("x")][0]
    assert rows(dsns[name], "select count(*), min(headers ->> 'shard_key') from queue.jobs") == [
        (4, "x")
    ]
    await cluster.close_async()


def test_the_default_of_the_key_is_the_same_in_sql(cluster: Cluster, dsns: dict[str, str]) -> None:
    statement = "select queue.shard_key(%s::text::jsonb)"
    for job, key in {
        '{"shard_key": "k", "lock": "l"}': "k",
        '{"lock": "l", "options": {"share": "s"}}': "l",
        '{"options": {"share": "s", "headers": {"tenant": "t"}}}': "s",
        '{"options": {"headers": {"tenant": "t"}}}': "t",
    }.items():
        assert rows(dsns["a"], statement, [job]) == [(key,)]
    for job in ("{}", '{"lock": ""}', '{"lock": "a:{b}"}'):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            rows(dsns["a"], statement, [job])
    with pytest.raises(ValueError, match="needs a shard_key"):
        cluster.defer("work", {})


def test_a_shard_refuses_the_keys_of_others(cluster: Cluster, dsns: dict[str, str]) -> None:
    (theirs,) = keys(lambda key: shard_of(key) * 3 // 1024 == 1, 1)
    (mine,) = keys(lambda key: shard_of(key) * 3 // 1024 == 0, 1)
    with psycopg.connect(dsns["a"]) as connection:
        with (
            pytest.raises(
                psycopg.errors.ObjectNotInPrerequisiteState, match="another shard"
            ) as refused,
            connection.transaction(),
        ):
            connection.execute("select queue.shard_defer(%s, 'work')", [theirs])
        assert refused.value.diag.message_detail == f"slot: {shard_of(theirs)}, shard: b"
        both = Jsonb([{"task": "t", "shard_key": k} for k in (mine, theirs)])
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState), connection.transaction():
            connection.execute("select queue.shard_defer_many(%s)", [both])
        connection.execute("select queue.shard_defer(%s, 'work')", [mine])
    assert rows(dsns["a"], "select count(*) from queue.jobs") == [(1,)]
    # the client's map is wrong: it follows
    cluster.refresh()
    cluster.map.slots = [("c", 0)] * 1024
    cluster.defer("work", {}, shard_key=theirs)
    assert rows(dsns["b"], "select count(*) from queue.jobs") == [(1,)]


def test_a_job_in_the_callers_transaction(cluster: Cluster, dsns: dict[str, str]) -> None:
    (key,) = keys(lambda key: shard_of(key) * 3 // 1024 == 0, 1)
    with psycopg.connect(dsns["a"]) as connection:
        cluster.defer("work", {}, shard_key=key, connection=connection)
        connection.rollback()
        cluster.defer("work", {}, shard_key=key, connection=connection)
    assert rows(dsns["a"], "select count(*) from queue.jobs") == [(1,)]
    with psycopg.connect(dsns["b"]) as connection:
        cluster.map.slots = [("b", 9)] * 1024
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            cluster.defer("work", {}, shard_key=key, connection=connection)


def test_needs_and_groups_stay_in_one_key(cluster: Cluster) -> None:
    here, there = keys(lambda key: shard_of(key) * 3 // 1024 == 0, 2)
    (elsewhere,) = keys(lambda key: shard_of(key) * 3 // 1024 == 1, 1)
    first = cluster.defer("work", {}, shard_key=here)
    cluster.defer("work", {}, shard_key=here, needs=[first])
    with pytest.raises(InvalidParameter, match="a need has another shard key"):
        cluster.defer("work", {}, shard_key=there, needs=[first])
    with pytest.raises(ValueError, match="in another shard"):
        cluster.defer("work", {}, shard_key=elsewhere, needs=[first])
    with pytest.raises(InvalidParameter, match="a group has no shard key"):
        cluster.defer("work", {}, shard_key=here, group="g")


def test_a_role_without_rights_defers_nothing(cluster: Cluster, dsns: dict[str, str]) -> None:
    assert cluster.check() == []
    with psycopg.connect(dsns["a"], autocommit=True) as connection:
        connection.execute("drop role if exists shard_web")
        connection.execute("create role shard_web")
        connection.execute("set role shard_web")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select queue.shard_of('a')")
        connection.execute("reset role")
        connection.execute("select queue.grant_access('shard_web', 'producer')")
        connection.execute("set role shard_web")
        (key,) = keys(lambda key: shard_of(key) * 3 // 1024 == 0, 1)
        connection.execute("select queue.shard_defer(%s, 'work')", [key])
        for call in (
            "shard_learn('{}')",
            "shard_start('a', '{}')",
            "shard_leave(1, 'b')",
            "shard_part_arrive('{}')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"select queue.{call}".encode())
        connection.execute("reset role")
        connection.execute("select queue.revoke_access('shard_web')")
        connection.execute("drop role shard_web")


def test_a_name_that_is_taken_is_refused(
    cluster: Cluster, dsns: dict[str, str], blank_dsn: str
) -> None:
    for other in (blank_dsn, dsns["b"], blank_dsn):
        with pytest.raises(InvalidParameter, match="there is a shard 'a', and this"):
            cluster.add("a", other)
        installing.install(blank_dsn)
    with pytest.raises(InvalidParameter, match="another name for itself"):
        cluster.add("d", dsns["b"])
    assert rows(blank_dsn, "select to_regclass('queue.shard')") == [(None,)]
    assert cluster.map.shards == dsns
    assert cluster.check() == []
    # the same shard at another address
    moved = make_conninfo(dsns["a"], application_name="elsewhere")
    cluster.add("a", moved)
    assert cluster.app_of("a").client.call(sql.MAP, {})[0][0]["self"] == "a"
    for name in NAMES:
        assert rows(dsns[name], "select dsn from queue.shard where name = 'a'") == [(moved,)]
    assert cluster.check() == []


def test_an_upgrade_leaves_the_functions_to_producers(blank_dsn: str) -> None:
    installing.install(blank_dsn, "plain")
    with psycopg.connect(blank_dsn, autocommit=True) as connection:
        for role in ("shard_early", "shard_late", "shard_reader", "shard_nobody"):
            connection.execute(f"drop role if exists {role}".encode())
            connection.execute(f"create role {role}".encode())
        connection.execute("select queue.grant_access('shard_early', 'producer')")
        connection.execute("grant usage on schema queue to shard_nobody")
        install(blank_dsn, self="a", shards={"a": blank_dsn})
        connection.execute("select queue.grant_access('shard_late', 'producer', '{default}')")
        connection.execute("select queue.grant_access('shard_reader', 'reader')")
        for _ in range(2):
            for role in ("shard_early", "shard_late"):
                connection.execute(f"set role {role}".encode())
                connection.execute("select queue.shard_defer('k', 'work')")
                connection.execute("reset role")
            # readers look at the map only, and strangers at nothing
            for role, allowed in (("shard_reader", 5), ("shard_nobody", 0)):
                found = connection.execute(
                    "select count(*) from pg_proc p where p.pronamespace = 'queue'::regnamespace"
                    " and p.proname like '%%shard%%'"
                    " and has_function_privilege(%s, p.oid, 'execute')",
                    [role],
                ).fetchone()
                assert found == (allowed,)
            connection.execute(installing.plain_script().encode())
            connection.execute("select queue.migrate()")
        for role in ("shard_early", "shard_late", "shard_reader", "shard_nobody"):
            connection.execute(f"drop owned by {role}".encode())
            connection.execute(f"drop role {role}".encode())


def test_limits_are_divided(cluster: Cluster, dsns: dict[str, str]) -> None:
    assert cluster.split("mail", 10) == {"a": 4, "b": 3, "c": 3}
    limits = [
        rows(dsns[name], "select max_running from queue.queues where name = 'mail'")[0][0]
        for name in NAMES
    ]
    assert limits == [4, 3, 3]
    with pytest.raises(ValueError, match="can't be divided"):
        cluster.split("mail", 2)


def test_a_second_map_is_refused_and_a_copy_learns(cluster: Cluster, dsns: dict[str, str]) -> None:
    Cluster.create(cluster.app, dsns).close()  # the same map
    other = {"a": dsns["a"], "b": dsns["b"]}, "has a map"
    twice = {**dsns, "b": dsns["a"]}, "that of a shard before it"
    for shards, said in (other, twice):
        with pytest.raises(InvalidParameter, match=said):
            Cluster.create(cluster.app, shards)
    cluster.refresh()
    known = {"shards": cluster.map.shards, "slots": [("b", 7), *cluster.map.slots[1:]]}
    learn = "select queue.shard_learn(%s)"
    given = [Jsonb(known)]
    assert rows(dsns["c"], learn, given) == [(1,)]
    assert rows(dsns["c"], learn, given) == [(0,)]
    assert cluster.check() == []  # a still serves it, and c has a newer word
    assert rows(dsns["a"], learn, given) == [(1,)]
    assert cluster.check() == ["slot 0: no shard"]


@contextlib.contextmanager
def elsewhere(server: EmbeddedServer, cluster: Cluster) -> Iterator[str]:
    """Yield the DSN of a copy of shard a; when the block ends, the shard is there no longer."""
    database = sql_of.Identifier("shard_a_copy")
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        cluster.close()
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = 'shard_a'"
        )
        connection.execute(sql_of.SQL("create database {} template shard_a").format(database))
        try:
            yield make_conninfo(server.dsn("shard_a_copy"))
        finally:
            connection.execute(sql_of.SQL("drop database {} with (force)").format(database))


def test_threads_share_the_app_of_a_shard(
    cluster: Cluster, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that one thread has deferred is in the shard that another one sees."""
    real = app.bind

    def bind(dsn: str) -> App:
        time.sleep(0.2)
        return real(dsn)

    monkeypatch.setattr(app, "bind", bind)
    cluster.refresh()
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: cluster.app_of("a"), range(4)))
    assert len(found) == 1


async def test_a_program_follows_a_shard_to_its_new_dsn(
    cluster: Cluster, app: App, dsns: dict[str, str], server: EmbeddedServer
) -> None:
    """When it has the new map, and by itself once the old address is dead."""
    (key,) = keys(lambda key: shard_of(key) * 3 // 1024 == 0, 1)
    informed, waiting, asynchronous = (Cluster(app, dsns["b"]) for _ in range(3))
    first = informed.defer("work", {}, shard_key=key)
    waiting.defer("work", {}, shard_key=key)
    await asynchronous.defer_async("work", {}, shard_key=key)
    await asynchronous.close_async()
    waiting.close()
    with elsewhere(server, informed) as moved:
        cluster.add("a", moved)
        informed.refresh("b")
        informed.defer("work", {}, shard_key=key, needs=[first])
        assert first.state() == "ready"
        assert rows(moved, "select count(*) from queue.jobs") == [(4,)]
        assert rows(dsns["a"], "select count(*) from queue.jobs") == [(3,)]
        rows(server.dsn("postgres"), "alter database shard_a allow_connections false")
        try:
            waiting.defer("work", {}, shard_key=key)
            waiting.defer_many((name, app.prepare("work")) for name in (key, key))
            await asynchronous.defer_async("work", {}, shard_key=key)
        finally:
            rows(server.dsn("postgres"), "alter database shard_a allow_connections true")
        assert rows(moved, "select count(*) from queue.jobs") == [(8,)]
        for each in (informed, waiting):
            each.close()
        await asynchronous.close_async()


def test_a_call_that_may_have_deferred_is_not_made_again(
    cluster: Cluster, app: App, dsns: dict[str, str], server: EmbeddedServer
) -> None:
    (key,) = keys(lambda key: shard_of(key) * 3 // 1024 == 0, 1)
    with contextlib.closing(Cluster(app, dsns["b"])) as late, elsewhere(server, cluster) as moved:
        late.refresh()
        cluster.add("a", moved)
        rows(
            dsns["a"],
            "create function queue.shard_lost() returns trigger language plpgsql as"
            " 'begin perform pg_terminate_backend(pg_backend_pid()); return new; end';"
            " create trigger lost before insert on queue.queueing_lock"
            " for each row execute function queue.shard_lost()",
        )
        with pytest.raises(psycopg.OperationalError):
            late.defer("work", {}, shard_key=key, queueing_lock="q")
        assert rows(moved, "select count(*) from queue.jobs") == [(0,)]
        late.defer("work", {}, shard_key=key)
        assert rows(moved, "select count(*) from queue.jobs") == [(1,)]
        rows(dsns["a"], "drop function queue.shard_lost() cascade")


def test_a_shard_that_was_away_brings_no_old_dsn_back(
    cluster: Cluster, app: App, dsns: dict[str, str], server: EmbeddedServer
) -> None:
    """While c is down, a gets another DSN; later c learns it, whichever copy is told first."""
    read = "select dsn from queue.shard where name = 'a'"
    moved = make_conninfo(dsns["a"], application_name="elsewhere")
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute("alter database shard_c allow_connections false")
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = 'shard_c'"
        )
        assert cluster.add("a", moved) == ["c"]
        connection.execute("alter database shard_c allow_connections true")
    assert rows(dsns["c"], read) == [(dsns["a"],)]
    late = Cluster(app, dsns["c"])
    assert late.move(500, "a").is_done  # a slot of b
    late.close()
    assert [rows(dsns[name], read) for name in NAMES] == [[(moved,)]] * 3
    # a copy of an old release says no version
    given = [Jsonb({"shards": dsns, "slots": cluster.map.slots})]
    rows(dsns["b"], "select queue.shard_learn(%s)", given)
    assert rows(dsns["b"], read) == [(moved,)]
    for wrong in (5, {"a": "x"}, {"a": None}):
        given = [Jsonb({"shards": dsns, "slots": cluster.map.slots, "versions": wrong})]
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="versions must be"):
            rows(dsns["b"], "select queue.shard_learn(%s)", given)


def test_a_database_that_is_behind_hides_no_shard(
    app: App, dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Cluster.create(app, {"a": dsns["a"], "b": dsns["b"]})
    with monkeypatch.context() as patch:
        patch.setattr(first, "_tell", lambda *_: [])  # as if it died before
        first.add("c", dsns["c"])
    known = {"map": first.map.to_json(), "self": None}
    first.app_of("b").client.call(sql.LEARN, known)
    first.close()
    behind = Cluster(app, dsns["a"])
    assert behind.split("mail", 6) == {"a": 2, "b": 2, "c": 2}
    behind.close()
    behind = Cluster(app, dsns["a"])
    assert behind.check() == []
    assert sorted(behind.map.shards) == ["a", "b", "c"]
    behind.close()

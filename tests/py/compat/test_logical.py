"""Logical replication, as docs/backup.md says: moving to another server, and a bystander."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer, sql_folder
from support import quick_server, refused, server_program
from workers import wait_for

from .test_dump_restore import carry_on, compare, fill, grant, look, make_roles, run

pytestmark = pytest.mark.long

SETTINGS = {"wal_level": "logical", "max_logical_replication_workers": "8"}


@pytest.fixture
def servers() -> Iterator[tuple[EmbeddedServer, EmbeddedServer]]:
    """A publisher and a subscriber."""
    with quick_server(SETTINGS) as publisher, quick_server(SETTINGS) as subscriber:
        yield publisher, subscriber


def connect(server: EmbeddedServer) -> psycopg.Connection:
    return psycopg.connect(server.dsn("postgres"), autocommit=True)


def subscribe(subscriber: psycopg.Connection, publisher: EmbeddedServer) -> None:
    dsn = publisher.dsn("postgres")
    subscriber.execute(f"create subscription s connection '{dsn}' publication p".encode())
    states = "select from pg_subscription_rel where srsubstate <> 'r'"
    wait_for(lambda: not subscriber.execute(states).rowcount)


def catch_up(publisher: psycopg.Connection) -> None:
    """Wait until the subscriber has everything."""
    row = publisher.execute("select pg_current_wal_lsn()").fetchone()
    assert row
    wait_for(
        lambda: (
            publisher.execute(
                "select from pg_stat_replication where replay_lsn >= %s", row
            ).rowcount
        )
    )


def test_moving_to_another_server(servers: tuple[EmbeddedServer, EmbeddedServer]) -> None:
    """The publication is there first, so that it would stop any change that needs a key."""
    old, new = servers
    tools = [server_program(new, name) for name in ("pg_dump", "psql")]
    if None in tools:
        pytest.skip("pg_dump or psql is missing")
    dump, psql = map(str, tools)
    make_roles(old)
    make_roles(new)
    with connect(old) as publisher, connect(new) as subscriber:
        publisher.execute("create publication p for all tables")
        publisher.execute((sql_folder() / "pgdefer.sql").read_bytes())
        grant(publisher)
        publisher.execute("select queue.defer('before')")
        schema = run([dump, "--schema-only", "--no-publications", "-d", old.dsn("postgres")]).stdout
        run([psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", new.dsn("postgres")], input=schema)
        subscribe(subscriber, old)
        publisher.execute("select queue.cancel(1)")
        fill(publisher)
        catch_up(publisher)
        before = look(publisher)
        assert subscriber.execute("select * from queue.check()").fetchall() == []
        # Workers that come too early would run the publisher's jobs; migrating must go on.
        for call in ("register_worker('w')", "tick()", "fetch(1)"):
            assert refused(subscriber, f"select queue.{call}") == "55000"
        assert refused(subscriber, "select queue.install()") == "accepted"
        health = "select detail from queue.health() where name = 'version' and status = 'fail'"
        assert "subscription s fills the tables" in str(subscriber.execute(health).fetchall())
        assert refused(subscriber, "select queue.defer('t')") == "23505"
        subscriber.execute("drop subscription s")
        for name, value in before.sequences:
            if value is not None:
                subscriber.execute("select setval('queue.' || %s, %s)", [name, value])
        after = look(subscriber)
        before.sequences = [s for s in before.sequences if s[1] is not None]
        after.sequences = [s for s in after.sequences if s[0] in dict(before.sequences)]
        compare(before, after)
        carry_on(subscriber)
        carry_on(publisher)


def test_a_subscriber_without_the_queue(servers: tuple[EmbeddedServer, EmbeddedServer]) -> None:
    """Replication goes on if the queue is not published, and else stops for all tables."""
    old, new = servers
    with connect(old) as publisher, connect(new) as subscriber:
        for connection in (publisher, subscriber):
            connection.execute("create table customer (id integer primary key)")
        publisher.execute("create publication p for all tables")
        publisher.execute("create publication shop for tables in schema public")
        subscribe(subscriber, old)
        publisher.execute((sql_folder() / "pgdefer.sql").read_bytes())
        publisher.execute("insert into customer values (1)")
        failed = "select from pg_stat_subscription_stats where apply_error_count > 0"
        wait_for(lambda: subscriber.execute(failed).rowcount)
        assert subscriber.execute("select * from customer").fetchall() == []
        subscriber.execute("alter subscription s set publication shop")
        wait_for(lambda: subscriber.execute("select from customer").rowcount)
        publisher.execute("select queue.defer('t')")
        publisher.execute("insert into customer values (2)")
        wait_for(lambda: subscriber.execute("select from customer").rowcount == 2)

"""Upgrades: the result equals a fresh installation, and nobody has to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgdefer import App, Worker
from pgdefer.database import install
from pgdefer.database.embedded import EmbeddedServer
from releases import Releases, catalog, difference
from support import create_database
from workers import CheckedThread, beside, slowness

pytestmark = pytest.mark.client

# Small, for busy machines; `-m soak` takes a table of realistic size.
JOBS = 50_000
SOAK_JOBS = 10_000_000

LONGEST_DEFER = 1.0


@pytest.fixture
def roles(blank: psycopg.Connection) -> Iterator[list[str]]:
    names = [f"upgraded_{kind}" for kind in ("producer", "worker", "operator", "reader", "limited")]
    for name in names:
        blank.execute(f"create role {name}".encode())
    yield names
    for name in names:
        blank.execute(f"drop owned by {name}".encode())
        blank.execute(f"drop role {name}".encode())


def grant(connection: psycopg.Connection, roles: list[str]) -> None:
    for name in roles[:4]:
        connection.execute("select queue.grant_access(%s, %s)", (name, name.partition("_")[2]))
    connection.execute("select queue.grant_access(%s, 'reader', '{a*}')", (roles[4],))


def uninstall(connection: psycopg.Connection) -> None:
    connection.execute("drop extension if exists pgdefer")
    connection.execute("drop schema queue cascade")


@pytest.mark.parametrize("hops", ["at once", "one by one"])
def test_an_upgrade_is_a_fresh_installation(
    blank: psycopg.Connection, releases: Releases, roles: list[str], form: str, hops: str
) -> None:
    wanted = releases.second if hops == "at once" else releases.third
    releases.install(blank, form, wanted)
    grant(blank, roles)
    fresh = catalog(blank)
    uninstall(blank)
    releases.install(blank, form, releases.first)
    grant(blank, roles)
    first = catalog(blank)
    blank.execute("select queue.defer('t', '{\"n\": 1}')")
    if hops == "one by one":
        releases.install(blank, form, releases.second)
    releases.install(blank, form, wanted)
    upgraded = catalog(blank)
    assert difference(upgraded, fresh) == {}
    # The comparison sees differences of each kind that the second release has.
    seen = {key[0] for key in difference(first, fresh)}
    assert {"function", "column", "index", "relation", "sequence", "constraint"} <= seen
    assert ("function", "queue.autoscale_hint(interval)") not in upgraded
    row = blank.execute("select code, tables from queue.version()").fetchone()
    assert row == (wanted, wanted)
    assert blank.execute("select args, note from queue.jobs").fetchall() == [({"n": 1}, "")]
    assert blank.execute("select * from queue.migration()").fetchall() == []
    assert blank.execute("select * from queue.check()").fetchall() == []


def test_two_releases_at_once(
    blank: psycopg.Connection, releases: Releases, roles: list[str], form: str
) -> None:
    releases.install(blank, form, releases.third)
    fresh = catalog(blank)
    uninstall(blank)
    releases.install(blank, form, releases.first)
    releases.install(blank, form, releases.third)
    assert difference(catalog(blank), fresh) == {}


def test_roles_get_the_new_functions(
    blank: psycopg.Connection, releases: Releases, roles: list[str], form: str
) -> None:
    releases.install(blank, form, releases.first)
    grant(blank, roles)
    blank.execute("create role upgraded_gone")
    blank.execute("select queue.grant_access('upgraded_gone', 'worker')")
    blank.execute("drop owned by upgraded_gone")
    blank.execute("drop role upgraded_gone")
    releases.install(blank, form, releases.second)
    for name, may in zip(roles, (False, False, True, True, True), strict=True):
        row = blank.execute(
            "select has_function_privilege(%s, 'queue.note_of(bigint)', 'execute')", (name,)
        ).fetchone()
        assert row == (may,), name


def test_the_extension_made_anew_keeps_the_roles(
    blank: psycopg.Connection, releases: Releases, roles: list[str], form: str
) -> None:
    if form == "plain":
        pytest.skip("it is about the extension")
    releases.install(blank, form, releases.first)
    grant(blank, roles)
    before = catalog(blank)
    blank.execute("drop extension pgdefer")
    releases.install(blank, form, releases.first)
    assert difference(catalog(blank), before) == {}


def test_code_of_the_next_release_works_on_the_tables(
    blank: psycopg.Connection, releases: Releases, form: str
) -> None:
    """Between ALTER EXTENSION and queue.migrate() nobody stops; distant releases get an error."""
    if form == "plain":
        pytest.skip("the plain file migrates in the same transaction")
    releases.install(blank, form, releases.first)
    blank.execute(f"alter extension pgdefer update to '{releases.second}'".encode())
    row = blank.execute("select code, tables from queue.version()").fetchone()
    assert row == (releases.second, releases.first)
    worker = blank.execute("select queue.register_worker('w')").fetchone()
    assert worker
    blank.execute("select queue.defer('t')")
    claims = blank.execute("select id, claim from queue.fetch(%s)", worker).fetchall()
    assert len(claims) == 1
    blank.execute("select queue.succeed(%s, %s)", claims[0])
    blank.execute(f"alter extension pgdefer update to '{releases.third}'".encode())
    with pytest.raises(psycopg.Error, match="are incompatible") as raised:
        blank.execute("select queue.register_worker('w')")
    assert raised.value.sqlstate == "QJ090"
    assert "queue.migrate()" in (raised.value.diag.message_hint or "")
    blank.execute("select queue.migrate()")
    blank.execute("select queue.register_worker('w')")


def test_older_code_on_later_tables(
    blank: psycopg.Connection, releases: Releases, form: str
) -> None:
    releases.install(blank, "plain", releases.third)
    with pytest.raises(psycopg.Error, match="there is no migration") as raised:
        releases.install(blank, "plain", releases.first)
    assert raised.value.sqlstate == "QJ090"


def test_an_incompatible_client_ends_with_its_own_code(
    blank: psycopg.Connection, blank_dsn: str, releases: Releases, tmp_path: Path
) -> None:
    (tmp_path / "upgraded_app.py").write_text("import pgdefer\napp = pgdefer.App()\n")

    def run_worker(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pgdefer", "worker", "-A", "upgraded_app", *options]
        env = os.environ | {"PGDEFER_DSN": blank_dsn, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )

    releases.install(blank, "plain", releases.second)
    done = run_worker("--drain")
    assert done.returncode == 0, done.stderr
    releases.install(blank, "plain", releases.third)
    done = run_worker("--drain")
    assert done.returncode == 5, done.stderr
    assert "client and schema are incompatible" in done.stderr


class Producer(CheckedThread):
    """Defers one job after the other and records the longest time."""

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self.dsn = dsn
        self.ids: list[int] = []
        self.longest = 0.0

    def work(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not self.is_over.wait(0.002):
                began = time.monotonic()
                row = connection.execute("select queue.defer('count')").fetchone()
                self.longest = max(self.longest, time.monotonic() - began)
                assert row
                self.ids.append(row[0])


async def test_upgrade_under_load(
    blank: psycopg.Connection,
    blank_dsn: str,
    releases: Releases,
    form: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Workers of the first release keep running: each job runs once, no error stops one."""
    caplog.set_level(logging.WARNING)
    releases.install(blank, form, releases.first)
    app = App(blank_dsn)
    ran: list[int] = []

    @app.task(name="count")
    async def count() -> None:
        ran.append(1)
        await asyncio.sleep(0.001)

    # Otherwise a slow worker may give back what it has claimed ahead.
    workers = [Worker(app, concurrency=5, prefetch=0, name=f"old {n}") for n in range(2)]
    tasks = [asyncio.create_task(worker.run_async()) for worker in workers]
    producers = [Producer(blank_dsn) for _ in range(2)]

    async def reached(number: int) -> None:
        async with asyncio.timeout(300):
            while len(ran) < number:
                assert not any(task.done() for task in tasks)
                await asyncio.sleep(0.01)

    try:
        for producer in producers:
            producer.start()
        await reached(200)
        with psycopg.connect(blank_dsn, autocommit=True) as upgrader:
            await asyncio.to_thread(releases.install, upgrader, form, releases.second)
        await reached(len(ran) + 200)
        ids = [worker.id for worker in workers]
    finally:
        for producer in producers:
            await asyncio.to_thread(producer.end)
    deferred = sorted(id for producer in producers for id in producer.ids)
    await reached(len(deferred))
    assert [worker.id for worker in workers] == ids
    for worker in workers:
        worker.stop()
    async with asyncio.timeout(300):
        await asyncio.gather(*tasks)
    await app.close_async()
    rows = blank.execute("select id, state, claims from queue.jobs order by id").fetchall()
    assert rows == [(id, "succeeded", 1) for id in deferred]
    assert len(ran) == len(deferred)
    assert blank.execute("select count(*) from queue.attempts").fetchone() == (0,)
    assert max(producer.longest for producer in producers) < LONGEST_DEFER * slowness()
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == []
    assert blank.execute("select * from queue.check()").fetchall() == []


def fill(connection: psycopg.Connection, number: int) -> None:
    """Defer many jobs, a third of which are finished and a third scheduled."""
    connection.execute("set pgdefer.notify = off")
    worker = connection.execute("select queue.register_worker('filler')").fetchone()
    assert worker
    for first in range(0, number, 10_000):
        connection.execute(
            """
            select count(*) from queue.defer_many((
              select jsonb_agg(jsonb_build_object('task', 'filled', 'args',
                jsonb_build_object('n', n, 'text', repeat('x', 100))))
              from generate_series(%s::int, %s::int) n))
            """,
            (first, first + 9_999),
        )
        if first < number // 3:
            connection.execute(
                """
                select count(*) from queue.finish_many((
                  select jsonb_agg(jsonb_build_object('id', f.id, 'claim', f.claim,
                    'outcome', 'succeeded'))
                  from queue.fetch(%s, null, 5000) f))
                """,
                worker,
            )
    connection.execute("select queue.deregister_worker(%s)", worker)
    connection.execute("vacuum analyze queue.log")


@pytest.fixture
def longest_of(blank_dsn: str) -> Callable[[Callable[[], object]], tuple[float, float]]:
    def measure(action: Callable[[], object]) -> tuple[float, float]:
        """Run it while two sessions defer; return the longest defer, and its own duration."""
        producers = [Producer(blank_dsn) for _ in range(2)]
        with beside(*producers):
            began = time.monotonic()
            action()
            took = time.monotonic() - began
        assert all(producer.ids for producer in producers)
        return max(producer.longest for producer in producers), took

    return measure


@pytest.mark.parametrize("number", [JOBS, pytest.param(SOAK_JOBS, marks=pytest.mark.soak)])
@pytest.mark.parametrize("blocked", [False, True])
def test_nobody_who_defers_waits_long(  # noqa: PLR0917
    blank: psycopg.Connection,
    blank_dsn: str,
    releases: Releases,
    longest_of: Callable[[Callable[[], object]], tuple[float, float]],
    number: int,
    blocked: bool,
) -> None:
    releases.install(blank, "plain", releases.first)
    fill(blank, number)
    holder = psycopg.connect(blank_dsn)

    def upgrade() -> None:
        if blocked:
            # A transaction that has deferred and stays open for a while: migrate must succeed.
            holder.execute("select queue.defer('open')")
            timer = threading.Timer(2.0, holder.rollback)
            timer.start()
        blank.execute(releases.plain[releases.second].encode())
        if blocked:
            timer.join()

    longest, took = longest_of(upgrade)
    holder.close()
    index, took_index = 0.0, 0.0
    # Indexes of tables up to 16 MB are built at once.
    row = blank.execute("select pg_relation_size('queue.log') > 16777216").fetchone()
    is_large = row == (True,)
    statements = [row[0] for row in blank.execute("select statement from queue.migration()")]
    if number == SOAK_JOBS:
        assert is_large
    if is_large:
        assert [text.split(" on ")[0] for text in statements] == [
            "create index concurrently log_note_idx"
        ]

        def build() -> None:
            for statement in statements:
                blank.execute(statement.encode())

        index, took_index = longest_of(build)
    assert blank.execute("select * from queue.migration()").fetchall() == []
    print(
        f"{number} jobs: upgrade {took:.2f} s, longest defer {longest * 1e3:.0f} ms;"
        f" index {took_index:.2f} s, longest defer {index * 1e3:.0f} ms"
    )
    assert longest < LONGEST_DEFER * slowness()
    assert index < LONGEST_DEFER * slowness()
    row = blank.execute("select tables from queue.version()").fetchone()
    assert row == (releases.second,)


def test_a_transaction_that_stays_open_is_told_of(
    blank: psycopg.Connection, blank_dsn: str, releases: Releases
) -> None:
    releases.install(blank, "plain", releases.first)
    with psycopg.connect(blank_dsn) as holder:
        holder.execute("select queue.defer('open')")
        before = catalog(blank)
        with pytest.raises(psycopg.errors.LockNotAvailable, match="stays open") as raised:
            blank.execute(releases.plain[releases.second].encode())
        assert "Nothing was changed" in (raised.value.diag.message_hint or "")
        blank.execute("rollback")
        assert difference(catalog(blank), before) == {}
        holder.rollback()
    releases.install(blank, "plain", releases.second)


def test_a_version_that_stays_locked_for_a_while(
    blank: psycopg.Connection, blank_dsn: str, releases: Releases
) -> None:
    """An attempt that has migrated the tables, and can't set their version, is repeated."""
    releases.install(blank, "plain", releases.first)
    waits: set[object] = set()
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(blank_dsn) as holder,
        psycopg.connect(blank_dsn, autocommit=True) as upgrader,
    ):
        holder.execute("select from queue.installation for update")
        done = pool.submit(releases.install, upgrader, "plain", releases.second)
        while len(waits) < 2 and not done.done():
            waits |= set(blank.execute("select waitstart from pg_locks where not granted"))
            waits -= {(None,)}
        holder.rollback()
        done.result()
    row = blank.execute("select tables from queue.version()").fetchone()
    assert row == (releases.second,)


def make_large(connection: psycopg.Connection) -> None:
    """Fill the log with few rows of many bytes."""
    connection.execute("alter table queue.log alter column args set storage external")
    connection.execute("alter table queue.log set (toast_tuple_target = 8160)")
    connection.execute(
        "select count(*) from queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't',"
        " 'args', jsonb_build_object('x', repeat('x', 7000)))) from generate_series(1, 3000)))"
    )


def test_pgdefer_upgrade_builds_large_indexes(
    blank: psycopg.Connection,
    blank_dsn: str,
    releases: Releases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    releases.install(blank, "plain", releases.first)
    make_large(blank)
    monkeypatch.setattr(install, "_script", lambda: releases.plain[releases.second])
    done = install.install(blank_dsn)
    assert (done.before, done.version) == (releases.first, releases.second)
    assert blank.execute("select * from queue.migration()").fetchall() == []
    row = blank.execute(
        "select indisvalid from pg_index where indexrelid = 'queue.log_note_idx'::regclass"
    ).fetchone()
    assert row == (True,)


def test_a_large_index_is_left_to_the_operator(
    blank: psycopg.Connection, releases: Releases, server: EmbeddedServer
) -> None:
    releases.install(blank, "plain", releases.first)
    make_large(blank)
    notices: list[str] = []
    blank.add_notice_handler(lambda diag: notices.append(str(diag.message_primary)))
    blank.execute(releases.plain[releases.second].encode())
    assert any(text.startswith("a large index is missing") for text in notices), notices
    rows = blank.execute("select statement from queue.migration()").fetchall()
    assert len(rows) == 1
    # An interrupted build leaves an invalid index: it is dropped first.
    blank.execute("set statement_timeout = '1ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        blank.execute(rows[0][0])
    blank.execute("reset statement_timeout")
    rows = blank.execute("select statement from queue.migration()").fetchall()
    for (statement,) in rows:
        blank.execute(statement)
    assert blank.execute("select * from queue.migration()").fetchall() == []
    notices.clear()
    blank.execute("select queue.migrate()")
    assert notices == []


@pytest.mark.parametrize("is_there", [False, True])
def test_two_who_run_the_plain_file_at_once(
    blank: psycopg.Connection, blank_dsn: str, is_there: bool
) -> None:
    """The second waits for the first, and then finds nothing to do."""
    script = install.plain_script().encode()
    if is_there:
        with blank.transaction():
            blank.execute(script)
        blank.execute("comment on schema queue is 'ours'")

    def run() -> None:
        with psycopg.connect(blank_dsn) as connection:
            connection.execute(script)

    with ThreadPoolExecutor(1) as pool, psycopg.connect(blank_dsn) as connection:
        connection.execute(script)
        second = pool.submit(run)
        while (
            not second.done()
            and not blank.execute(
                "select from pg_stat_activity where cardinality(pg_blocking_pids(pid)) > 0"
                " and datname = current_database()"
            ).rowcount
        ):
            pass
    second.result()
    row = blank.execute(
        "select tables, obj_description('queue'::regnamespace, 'pg_namespace') from queue.version()"
    ).fetchone()
    assert row == (install.offered_version(), "ours" if is_there else None)


def test_two_who_upgrade_at_once(server: EmbeddedServer, releases: Releases) -> None:
    create_database(server, "upgraded_twice")
    dsn = make_conninfo(server.dsn("upgraded_twice"))
    with psycopg.connect(dsn, autocommit=True) as connection:
        releases.install(connection, "plain", releases.first)

    def upgrade(_: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("select queue.migrate()")

    with psycopg.connect(dsn, autocommit=True) as connection, ThreadPoolExecutor(3) as pool:
        code = releases.plain[releases.second].replace("select queue.install();", "")
        connection.execute(code.encode())
        list(pool.map(upgrade, range(3)))
        row = connection.execute("select tables from queue.version()").fetchone()
    assert row == (releases.second,)

"""No pair (id, claim) and no worker id is used twice, whatever the server has lost.

In each test a worker claims jobs, the server loses these transactions, or goes back in time, and
others claim. The first worker is still alive: none of its reports is taken for another worker's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from clusters import Cluster, running
from pgdefer.database.embedded import EmbeddedServer, sql_folder
from support import open_folder, refused, server_program

pytestmark = [pytest.mark.client, pytest.mark.long]

Connection = psycopg.Connection[Any]
Pairs = dict[int, int]

# Transactions committed without a wait for the disk stay away from it until a checkpoint.
FORGETFUL = (
    "synchronous_commit = off\nwal_writer_delay = 10s\nwal_writer_flush_after = 2GB\n"
    "bgwriter_lru_maxpages = 0\n"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder("eras") as made:
        yield made


def install(connection: Connection, task: str) -> None:
    connection.execute((sql_folder() / "pgdefer.sql").read_bytes())
    defer(connection, task)


def defer(connection: Connection, task: str) -> None:
    connection.execute("select queue.defer(%s) from generate_series(1, 60)", [task])


def claim(connection: Connection, worker: int | None = None) -> tuple[int, Pairs]:
    """Register, unless there is a worker, and claim jobs one by one and several at once."""
    if worker is None:
        ((worker,),) = connection.execute("select queue.register_worker('w')").fetchall()
        assert worker is not None
    pairs: Pairs = {}
    for size in (1, 1, 1, 9, 9):
        call = "select id, claim from queue.fetch(%s, null, %s)"
        pairs |= dict(connection.execute(call, [worker, size]).fetchall())
    assert len(pairs) == 21
    return worker, pairs


def look_for_the_dead(
    connection: Connection, old: int, pairs: Pairs, by: int | None = None
) -> None:
    """Others claim, and the old worker's reports on its own claims are not taken for theirs.

    The worker `by`, if any, existed before. A crash may lose only a part.
    """
    remembered = connection.execute(
        "select id, claim from queue.active_job where claim > 0"
    ).fetchall()
    pairs = dict(pairs.items() - dict(remembered).items())
    if not pairs:
        pytest.skip("the crash has forgotten nothing")
    is_known = connection.execute("select from queue.workers where id = %s", [old]).rowcount == 1
    new, others = claim(connection, by)
    assert new != old
    assert not pairs.items() & others.items()
    assert set(pairs) & set(others), "the same jobs, or others with their ids, are claimed again"
    assert max(others.values()) < 2**53, "exact in JSON wherever it is read"
    for id_, number in pairs.items():
        assert refused(connection, "select queue.succeed(%s, %s)", id_, number) == "QJ002"
        assert refused(connection, "select queue.extend(%s, %s, '1 h')", id_, number) == "QJ002"
        assert refused(connection, "select queue.release(%s, %s)", id_, number) == "QJ002"
    reports = connection.execute(
        "select distinct f.error from queue.finish_many((select jsonb_agg(jsonb_build_object("
        "'id', p.id, 'claim', p.claim, 'outcome', 'succeeded'))"
        " from unnest(%s::bigint[], %s::bigint[]) p (id, claim))) f",
        [list(pairs), list(pairs.values())],
    ).fetchall()
    assert reports == [("QJ002",)]
    for call in ("select queue.heartbeat(%s)", "select queue.fetch(%s)"):
        assert is_known or refused(connection, call, old) == "QJ007"
    held = connection.execute("select id, claim from queue.claims(%s)", [new]).fetchall()
    assert others.items() <= dict(held).items()
    assert connection.execute("select * from queue.check()").fetchall() == []


@pytest.mark.parametrize("has_restarted", [False, True])
def test_a_standby_that_was_behind(
    folder: Path, server: EmbeddedServer, has_restarted: bool
) -> None:
    primary, standby = Cluster(folder, server), Cluster(folder, server, 5433)
    primary.initdb()
    with running(primary, standby):
        primary.start()
        with primary.connect() as connection:
            install(connection, "pay")
        if not (server.bin_dir / "pg_basebackup").exists():
            pytest.skip(f"{server.bin_dir} has no pg_basebackup")
        primary.run("pg_basebackup", "-d", primary.dsn(), "-D", standby.data, "-R", "-c", "fast")
        if has_restarted:  # so that the standby does not even know the era
            primary.stop("immediate")
            primary.start()
        with primary.connect() as connection:
            old, pairs = claim(connection)
        primary.stop("immediate")
        standby.start()
        with standby.connect() as reader:
            # a session from before, which may only read
            assert refused(reader, "select queue.register_worker('w')") == "25006"
            assert refused(reader, "select queue.fetch(%s)", old) == "25006"
            standby.run("pg_ctl", "-w", "-D", standby.data, "promote")
            look_for_the_dead(reader, old, pairs)


def test_both_go_on(folder: Path, server: EmbeddedServer) -> None:
    """The old primary was not stopped: workers of either server never affect the other's jobs."""
    one, two = Cluster(folder, server), Cluster(folder, server, 5433)
    one.initdb()
    with running(one, two):
        one.start()
        with one.connect() as connection:
            install(connection, "pay")
        one.stop()
        shutil.copytree(one.data, two.data, copy_function=_copy_owned)
        _own(two.data, one.data)
        one.start()
        two.start()
        with one.connect() as first, two.connect() as second:
            old, pairs = claim(first)
            look_for_the_dead(second, old, pairs)
            assert refused(second, "select queue.heartbeat(%s)", old) == "QJ007"
            _, later = claim(first, old)
            held = dict(second.execute("select id, claim from queue.active_job where claim > 0"))
            assert not later.items() & held.items()


def test_a_crash_that_forgets(folder: Path, server: EmbeddedServer) -> None:
    cluster = Cluster(folder, server)
    cluster.initdb(FORGETFUL)
    with running(cluster):
        cluster.start()
        with cluster.connect() as connection:
            install(connection, "pay")
            connection.execute("checkpoint")
            old, pairs = claim(connection)
        cluster.stop("immediate")
        cluster.start()
        with cluster.connect() as connection:
            look_for_the_dead(connection, old, pairs)


def test_a_crash_of_one_process(folder: Path, server: EmbeddedServer) -> None:
    """The server recovers within one start."""
    cluster = Cluster(folder, server)
    cluster.initdb(FORGETFUL)
    with running(cluster):
        cluster.start()
        with cluster.connect() as connection, cluster.connect() as victim:
            install(connection, "pay")
            connection.execute("checkpoint")
            started = connection.execute("select pg_postmaster_start_time()").fetchone()
            old, pairs = claim(connection)
            os.kill(victim.info.backend_pid, signal.SIGKILL)
            while not connection.closed:
                with contextlib.suppress(psycopg.OperationalError):
                    connection.execute("select")
        with _connect_again(cluster) as connection:
            assert connection.execute("select pg_postmaster_start_time()").fetchone() == started
            look_for_the_dead(connection, old, pairs)


def test_a_cold_copy_of_the_files(folder: Path, server: EmbeddedServer) -> None:
    cluster = Cluster(folder, server)
    cluster.initdb()
    with running(cluster):
        cluster.start()
        with cluster.connect() as connection:
            install(connection, "pay")
        cluster.stop()
        shutil.copytree(cluster.data, folder / "copy", copy_function=_copy_owned)
        cluster.start()
        with cluster.connect() as connection:
            old, pairs = claim(connection)
        cluster.stop()
        _own(folder / "copy", cluster.data)
        shutil.rmtree(cluster.data)
        (folder / "copy").rename(cluster.data)
        cluster.start()
        with cluster.connect() as connection:
            look_for_the_dead(connection, old, pairs)


def test_a_dump_put_back_under_sessions_that_live_on(
    dsn: str, server: EmbeddedServer, folder: Path
) -> None:
    psql, dump = server_program(server, "psql"), server_program(server, "pg_dump")
    if not (psql and dump):
        pytest.skip("there is no pg_dump")
    with psycopg.connect(dsn, autocommit=True) as worker:
        defer(worker, "pay")
        other, _ = claim(worker)
        file = folder / "dump.sql"
        subprocess.run([dump, "-d", dsn, "--clean", "-f", file], check=True)
        old, pairs = claim(worker)
        subprocess.run(
            [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", file],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        look_for_the_dead(worker, old, pairs, by=other)


def test_a_copy_of_the_database_in_its_place(dsn: str, server: EmbeddedServer) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        defer(connection, "pay")
        name = connection.info.dbname
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
        admin.execute(f'create database "{name} copy" template "{name}"'.encode())
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                old, pairs = claim(connection)
            admin.execute(f'alter database "{name}" rename to "{name} old"'.encode())
            admin.execute(f'alter database "{name} copy" rename to "{name}"'.encode())
            with psycopg.connect(dsn, autocommit=True) as connection:
                look_for_the_dead(connection, old, pairs)
        finally:
            admin.execute(f'drop database if exists "{name} old"'.encode())
            admin.execute(f'drop database if exists "{name} copy"'.encode())


def test_an_installation_after_another(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as worker:
        worker.execute("select queue.uninstall(true), queue.install()")
        defer(worker, "pay")
        old, pairs = claim(worker)
        worker.execute("select queue.uninstall(true)")
        worker.execute("select queue.install()")
        defer(worker, "mail")
        look_for_the_dead(worker, old, pairs)


def _copy_owned(source: str, target: str) -> str:
    return str(shutil.copy2(source, target))


def _own(folder: Path, like: Path) -> None:
    """Give the copy of a cluster's files to the owner of the others."""
    of = like.stat()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, of.st_uid, of.st_gid, follow_symlinks=False)


def _connect_again(cluster: Cluster) -> Connection:
    while True:
        with contextlib.suppress(psycopg.OperationalError):
            return cluster.connect()

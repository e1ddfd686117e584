"""A primary and its standby, and a load of producers and workers with ledgers outside of both."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
import pytest

from clusters import Cluster
from pgdefer.database.embedded import EmbeddedServer, sql_folder
from support import open_folder, refused
from workers import CheckedThread, wait_for

Connection = psycopg.Connection[Any]

SYNCHRONOUS = "synchronous_standby_names = '*'\n"
# Without new WAL a standby reports what it has only so often; commits may have to wait for that.
SETTINGS = "wal_keep_size = '1GB'\nwal_log_hints = on\nwal_receiver_status_interval = '1s'\n"

TASKS = """
import asyncio, json, os, time
import pgdefer

app = pgdefer.App(os.environ["PAIR"])
ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


@app.task(name="pay")
async def pay(lock):
    job, since = pgdefer.current_job(), time.monotonic()
    await asyncio.sleep(0.002)
    line = json.dumps([job.id, job.claim, lock, since, time.monotonic()])
    os.write(ledger, line.encode() + b"\\n")
"""


class Pair:
    """A primary and a standby of it; `through`: the port by which the standby follows."""

    def __init__(
        self, folder: Path, server: EmbeddedServer, settings: str = SYNCHRONOUS, through: int = 0
    ) -> None:
        self.folder = folder
        self.primary = Cluster(folder, server)
        self.standby = Cluster(folder, server, 5433)
        #: For clients: the one of the two that can be written to.
        self.dsn = dsn_of(folder, 5432, 5433)
        self.primary.initdb(SETTINGS + settings)
        self.primary.start()
        with self.primary.connect() as connection:
            # Nobody confirms commits yet.
            connection.execute("set synchronous_commit = local")
            connection.execute((sql_folder() / "pgdefer.sql").read_bytes())
        self.follow(through)

    def follow(self, through: int = 0) -> None:
        """Make a standby of the primary, and wait until it follows."""
        command = ("-d", self.primary.dsn(), "-D", self.standby.data, "-R", "-c", "fast")
        # The copy itself commits nothing, so that it need not wait for a standby.
        self.primary.run("pg_basebackup", *command)
        self.start_standby(through)

    def start_standby(self, through: int = 0) -> None:
        """Start the standby, and wait until it follows."""
        with (self.standby.data / "postgresql.auto.conf").open("a") as file:
            port = through or self.primary.port
            file.write(f"primary_conninfo = 'host={self.folder} port={port} user=postgres'\n")
        self.standby.start()
        with self.primary.connect() as connection:
            wait_for(
                lambda: (
                    connection.execute(
                        "select from pg_stat_replication where state = 'streaming' and (sync_state"
                        " = 'sync' or current_setting('synchronous_standby_names') = '')"
                    ).rowcount
                )
            )

    def kill(self) -> None:
        """Kill the primary."""
        kill(self.primary)

    def promote(self) -> float:
        """Promote the standby, which is then the primary; return when it was promoted."""
        self.primary, self.standby = self.standby, self.primary
        self.primary.run("pg_ctl", "-w", "-D", self.primary.data, "promote")
        return time.monotonic()

    def fail_over(self) -> float:
        """Kill the primary, and promote its standby; return when it was promoted."""
        self.kill()
        promoted = self.promote()
        # Until there is a standby again, commits wait for it: acknowledged stays acknowledged.
        shutil.rmtree(self.standby.data)
        self.follow()
        return promoted

    def switch_over(self) -> float:
        """Stop the primary in order, promote its standby, and let the old primary follow."""
        self.primary.stop("fast")
        promoted = self.promote()
        (self.standby.data / "standby.signal").touch()
        self.start_standby()
        return promoted

    def rewind(self) -> None:
        """Rewind the old primary, which has been stopped or killed, and let it follow."""
        command = ("-D", self.standby.data, "--source-server", self.primary.dsn(), "-R")
        self.standby.run("pg_rewind", *command)
        self.start_standby()

    def stop(self) -> None:
        for cluster in (self.primary, self.standby):
            if (cluster.data / "postmaster.pid").exists():
                with contextlib.suppress(pytest.fail.Exception):
                    cluster.stop("immediate")


def dsn_of(folder: Path, *ports: int) -> str:
    """Return a DSN of several servers, of which clients use the one that can be written to."""
    return (
        f"host={','.join([str(folder)] * len(ports))} port={','.join(map(str, ports))}"
        " user=postgres dbname=postgres target_session_attrs=read-write connect_timeout=3"
    )


def kill(cluster: Cluster) -> None:
    """Kill a server, and wait until its other processes have ended, which they do by themselves."""
    os.kill(int((cluster.data / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
    wait_for(lambda: not _is_used(cluster))
    # Nobody may have waited for its end: then its number still seems to be in use.
    (cluster.data / "postmaster.pid").unlink()
    (cluster.folder / f".s.PGSQL.{cluster.port}.lock").unlink(missing_ok=True)


def _is_used(cluster: Cluster) -> bool:
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if process.readlink() == cluster.data:
                return True
    return False


@contextlib.contextmanager
def folder_of_servers(server: EmbeddedServer) -> Iterator[Path]:
    """Make a folder for servers and their sockets."""
    if not (server.bin_dir / "pg_basebackup").exists():
        pytest.skip(f"{server.bin_dir} has no pg_basebackup")
    with open_folder("failover") as folder:
        yield folder


class OldWorker:
    """A worker that holds claims, and lives through whatever happens to the server."""

    def __init__(self, connection: Connection) -> None:
        ((self.id,),) = connection.execute(
            "select queue.register_worker('old', '{apart}', '{\"dead_after\": \"1 hour\"}')"
        ).fetchall()
        defer = "select queue.defer('t', queue => 'apart') from generate_series(1, 3)"
        connection.execute(defer)
        call = "select id, claim from queue.fetch(%s, '{apart}', 3)"
        self.pairs: dict[int, int] = dict(connection.execute(call, [self.id]).fetchall())
        assert len(self.pairs) == 3

    def is_refused(self, connection: Connection) -> None:
        """Others run its jobs; its reports are refused."""
        connection.execute("select queue.worker_died(%s)", [self.id])
        ((new,),) = connection.execute("select queue.register_worker('new', '{apart}')").fetchall()
        assert new > self.id
        left = dict(self.pairs)

        def another() -> list[tuple[int, int]]:
            call = "select id, claim from queue.fetch(%s, '{apart}')"
            return connection.execute(call, [new]).fetchall()

        while left:
            ((id_, claim),) = wait_for(another)
            old = left.pop(id_)
            assert claim > old
            for call in ("succeed(%s, %s)", "release(%s, %s)", "extend(%s, %s, '1 h')"):
                assert refused(connection, f"select queue.{call}", id_, old) == "QJ002"
            report = json.dumps([{"id": id_, "claim": old, "outcome": "succeeded"}])
            call = "select error from queue.finish_many(%s)"
            assert connection.execute(call, [report]).fetchall() == [("QJ002",)]
            assert refused(connection, "select queue.succeed(%s, %s)", id_, claim) == "accepted"
        assert refused(connection, "select queue.heartbeat(%s)", self.id) == "QJ007"
        assert refused(connection, "select queue.fetch(%s)", self.id) == "QJ007"
        connection.execute("select queue.deregister_worker(%s)", [new])


class Producer(CheckedThread):
    """Defers jobs on ten locks, and knows those whose commit was acknowledged, in order."""

    def __init__(self, dsn: str, name: str = "customer") -> None:
        super().__init__(name)
        self._dsn = dsn
        self.acknowledged: list[tuple[int, str]] = []

    def work(self) -> None:
        turn = 0
        while not self.is_over.is_set():
            with (
                contextlib.suppress(
                    psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction
                ),
                psycopg.connect(self._dsn, autocommit=True) as connection,
            ):
                while not self.is_over.wait(0.005):
                    turn += 1
                    lock = f"{self.name} {turn % 10}"
                    row = connection.execute(
                        "select queue.defer('pay', jsonb_build_object('lock', %s::text),"
                        " lock => %s)",
                        [lock, lock],
                    ).fetchone()
                    assert row
                    self.acknowledged.append((row[0], lock))


class Load:
    """A producer and workers in processes, who serve only the queue of its jobs."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self._dsn, self._folder = dsn, folder
        self.producer = Producer(dsn)
        self._ledger = folder / "ledger"
        self._logs = [folder / f"log{n}" for n in range(2)]
        self._workers: list[subprocess.Popen[bytes]] = []
        self._acknowledged: set[int] = set()

    def __enter__(self) -> Self:
        (self._folder / "shop.py").write_text(TASKS)
        self._ledger.touch()
        environment = os.environ | {"PAIR": self._dsn, "LEDGER": str(self._ledger)}
        command = [sys.executable, "-m", "pgdefer", "worker", "-A", "shop:app", "-c", "5"]
        command += ["-q", "default"]
        for path in self._logs:
            with path.open("wb") as log:
                self._workers.append(
                    subprocess.Popen(command, cwd=self._folder, env=environment, stderr=log)
                )
        self.producer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            for path in self._logs:
                sys.stderr.write(path.read_text("utf-8", "replace")[-5000:])
            for worker in self._workers:
                worker.kill()
                worker.wait()

    def runs(self) -> list[list[Any]]:
        """Return the runs so far: id, claim, lock, begin, end."""
        whole, _, _ = self._ledger.read_text("utf-8").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def _count(self) -> int:
        return self._ledger.read_bytes().count(b"\n")

    def go_on(self, jobs: int = 100) -> None:
        """Wait until as many more jobs were deferred, and as many have run."""
        runs, deferred = self._count() + jobs, len(self.producer.acknowledged) + jobs
        wait_for(lambda: self._count() >= runs and len(self.producer.acknowledged) >= deferred)

    def waited(self, promoted: float) -> float:
        """Return the seconds from a promotion to the end of the next job."""
        return min(end for *_, end in self.runs() if end > promoted) - promoted

    def end(self, primary: Cluster, *others: Producer) -> str:
        """End the producers, and the workers when all jobs have run; check and sum up ledgers."""
        self._acknowledged = set()
        for producer in (self.producer, *others):
            producer.end()
            self._acknowledged |= {id_ for id_, _ in producer.acknowledged}
        with primary.connect() as connection:
            unfinished = (
                "select from queue.jobs where state <> 'succeeded' and queue = 'default' limit 1"
            )
            wait_for(lambda: not connection.execute(unfinished).rowcount)
            for worker in self._workers:
                worker.send_signal(signal.SIGTERM)
            assert [worker.wait(120) for worker in self._workers] == [0] * len(self._workers)
            self._check(connection)
        count = len({job for job, *_ in self.runs()})
        return (
            f"{len(self._acknowledged):,} jobs acknowledged, none lost; {count:,} have run,"
            f" {len(self.runs()) - count} of them again by a later claim"
        )

    def _check(self, connection: Connection) -> None:
        ran = self.runs()
        ended = {
            id_
            for (id_,) in connection.execute("select id from queue.jobs where queue = 'default'")
        }
        assert connection.execute("select * from queue.check()").fetchall() == []
        assert self._acknowledged <= ended, "acknowledged, and lost"
        assert {job for job, *_ in ran} == ended, "each has run"
        assert len({(job, claim) for job, claim, *_ in ran}) == len(ran), "no claim ran twice"
        by_lock = defaultdict(list)
        for job, _, lock, since, until_ in ran:
            by_lock[lock].append((since, until_, job))
        for turns in by_lock.values():
            turns.sort()
            for (_, end, _), (since, _, _) in itertools.pairwise(turns):
                assert end <= since, "two of one lock at once"
            firsts = list(dict.fromkeys(job for *_, job in turns))
            assert firsts == sorted(firsts), "out of the lock's order"

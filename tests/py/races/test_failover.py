"""The primary dies under load, and its synchronous standby takes over: nothing acknowledged is lost.

Producers and workers have a DSN of both servers. Two ledgers are kept outside of the database: the
producer's has the jobs whose commit was acknowledged, the workers' has when each job ran.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from clusters import Cluster
from pgdefer.database.server import EmbeddedServer, sql_folder

from .conftest import until

pytestmark = [pytest.mark.client, pytest.mark.long]

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
    """A primary and a synchronous standby of it."""

    def __init__(self, folder: Path, server: EmbeddedServer) -> None:
        self.primary = Cluster(folder, server)
        self.standby = Cluster(folder, server, 5433)
        #: For clients: the one of the two that can be written to.
        self.dsn = (
            f"host={folder},{folder} port=5432,5433 user=postgres dbname=postgres"
            " target_session_attrs=read-write connect_timeout=10"
        )
        self.primary.initdb("synchronous_standby_names = '*'\nwal_keep_size = '1GB'\n")
        self.primary.start()
        self._follow()

    def _follow(self) -> None:
        """Make a standby of the primary, and wait until commits wait for it."""
        command = ("-d", self.primary.dsn(), "-D", self.standby.data, "-R", "-c", "fast")
        # The copy itself commits nothing, so that it need not wait for a standby.
        self.primary.run("pg_basebackup", *command)
        self.standby.start()
        with self.primary.connect() as connection:
            until(
                lambda: (
                    connection.execute(
                        "select from pg_stat_replication where sync_state = 'sync'"
                    ).rowcount
                )
            )

    def fail_over(self) -> float:
        """Kill the primary, and promote its standby; returns when it was promoted."""
        postmaster = int((self.primary.data / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGKILL)
        self.primary, self.standby = self.standby, self.primary
        self.primary.run("pg_ctl", "-w", "-D", self.primary.data, "promote")
        promoted = time.monotonic()
        # Until there is a standby again, commits wait for it: acknowledged stays acknowledged.
        until(lambda: not _is_used(self.standby))
        shutil.rmtree(self.standby.data)
        self._follow()
        return promoted

    def stop(self) -> None:
        for cluster in (self.primary, self.standby):
            if (cluster.data / "postmaster.pid").exists():
                with contextlib.suppress(pytest.fail.Exception):
                    cluster.stop("immediate")


def _is_used(cluster: Cluster) -> bool:
    """Whether processes of a killed server are left: they end by themselves."""
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if process.readlink() == cluster.data:
                return True
    return False


@pytest.fixture
def pair(server: EmbeddedServer) -> Iterator[Pair]:
    if not (server.bin_dir / "pg_basebackup").exists():
        pytest.skip(f"{server.bin_dir} has no pg_basebackup")
    folder = Path(tempfile.mkdtemp(prefix="pgdefer-failover-"))
    folder.chmod(0o777)
    made = Pair(folder, server)
    yield made
    made.stop()
    shutil.rmtree(folder, ignore_errors=True)


class Producer(threading.Thread):
    """Defers jobs on ten locks, and knows those whose commit was acknowledged, in order."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self._dsn = dsn
        self._is_over = threading.Event()
        self.acknowledged: list[tuple[int, str]] = []

    def run(self) -> None:
        turn = 0
        while not self._is_over.is_set():
            with (
                contextlib.suppress(psycopg.OperationalError),
                psycopg.connect(self._dsn, autocommit=True) as connection,
            ):
                while not self._is_over.wait(0.005):
                    turn += 1
                    lock = f"customer {turn % 10}"
                    row = connection.execute(
                        "select queue.defer('pay', jsonb_build_object('lock', %s::text), lock => %s)",
                        [lock, lock],
                    ).fetchone()
                    assert row
                    self.acknowledged.append((row[0], lock))

    def end(self) -> None:
        self._is_over.set()
        self.join(120)
        assert not self.is_alive()


def fail_over_under_load(pair: Pair, folder: Path, times: int) -> list[float]:
    """Fail over; returns the seconds from each promotion to the end of the next job."""
    with pair.primary.connect() as connection:
        connection.execute((sql_folder() / "pgdefer.sql").read_bytes())
    (folder / "shop.py").write_text(TASKS)
    ledger = folder / "ledger"
    ledger.touch()
    environment = os.environ | {"PAIR": pair.dsn, "LEDGER": str(ledger)}
    command = [sys.executable, "-m", "pgdefer", "worker", "-A", "shop:app", "-c", "5"]
    workers = []
    for n in range(2):
        with (folder / f"log{n}").open("wb") as log:
            workers.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=log))

    def runs() -> list[list[Any]]:
        lines = ledger.read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    producer = Producer(pair.dsn)
    producer.start()
    promoted = []
    try:
        for _ in range(times):
            count, deferred = len(runs()), len(producer.acknowledged)
            until(lambda c=count, d=deferred: (
                len(runs()) >= c + 100 and len(producer.acknowledged) >= d + 100
            ))  # fmt: skip
            promoted.append(pair.fail_over())
        count = len(runs())
        until(lambda: len(runs()) >= count + 100)
        producer.end()
        with pair.primary.connect() as connection:
            unfinished = "select from queue.jobs where state <> 'succeeded'"
            until(lambda: not connection.execute(unfinished).rowcount)
    except BaseException:
        for n in range(2):
            sys.stderr.write((folder / f"log{n}").read_text("utf-8", "replace")[-5000:])
        raise
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(120) for worker in workers]
    assert codes == [0, 0]
    ran = runs()
    with pair.primary.connect() as connection:
        ended = dict(connection.execute("select id, claims from queue.jobs").fetchall())
        assert connection.execute("select * from queue.check()").fetchall() == []
    assert {id_ for id_, _ in producer.acknowledged} <= set(ended), "acknowledged, and lost"
    assert {job for job, *_ in ran} == set(ended), "each has run"
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
    return [min(end for *_, end in ran if end > at) - at for at in promoted]


def test_a_synchronous_standby_takes_over(pair: Pair, tmp_path: Path) -> None:
    fail_over_under_load(pair, tmp_path, 2)


@pytest.mark.soak
def test_fifty_failovers(pair: Pair, tmp_path: Path) -> None:
    waits = fail_over_under_load(pair, tmp_path, 50)
    print(f"from promotion to the next job's end: median {statistics.median(waits):.2f} s,"
          f" {min(waits):.2f} to {max(waits):.2f}")  # fmt: skip

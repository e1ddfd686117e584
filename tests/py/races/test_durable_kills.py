"""Workers that are killed in the middle of durable jobs: the steps that ran, and how often.

The effect of a step outside the database is a line in a file, written before the step is finished. In
the long form the server is killed too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from clusters import Cluster
from clusters import running as stopping
from pgdefer.database.embedded import EmbeddedServer, sql_folder
from support import open_folder
from workers import wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
# Of each eight steps; half of them are transactions.
KINDS = (
    *("transaction", "outside", "transaction", "sleep"),
    *("transaction", "outside", "transaction", "wait"),
)
WORKERS = 4

# argv: DSN, ledger, the number of steps of a job, their kinds, the longest pause. For each line of its
# input it forks a worker, and prints its pid. A worker runs until it is killed or loses its connection.
# Jobs with odd ids ask before each step, the others rely on the steps from fetch.
PROGRAM = """
import collections, json, os, random, signal, sys, threading, time
import psycopg

dsn, path, count, kinds, longest = sys.argv[1:]
kinds = kinds.split()
ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def connect():
    while True:
        try:
            return psycopg.connect(dsn, autocommit=True)
        except psycopg.OperationalError:
            time.sleep(0.05)  # the server starts


def beat(worker):
    try:
        with connect() as conn:
            while True:
                conn.execute("select * from queue.heartbeat(%s)", (worker,))
                time.sleep(0.2)
    finally:
        os._exit(1)


def write(*line):
    os.write(ledger, json.dumps([*line, os.getpid()]).encode() + b"\\n")


def pause():
    time.sleep(random.random() * float(longest))


def run(conn, id, claim, steps):
    uses = collections.Counter()
    for n in range(int(count)):
        kind = kinds[n % len(kinds)]
        uses[kind] += 1
        name = kind if uses[kind] == 1 else f"{kind}#{uses[kind]}"
        here = (id, claim, kind if id % 2 else name)
        if id % 2:
            done = conn.execute("select finished from queue.begin_step(%s, %s, %s)", here)
            is_finished = done.fetchone()[0]
        else:
            is_finished = name in (steps or {})
        if is_finished:
            continue
        if kind == "transaction":
            with conn.transaction():
                conn.execute("insert into effect values (%s, %s)", (id, n))
                pause()
                conn.execute("select queue.finish_step(%s, %s, %s)", here)
        elif kind == "outside":
            write("ran", id, n)
            pause()
            conn.execute("select queue.finish_step(%s, %s, %s)", here)
        elif kind == "sleep":
            pause()
            conn.execute("select queue.sleep(%s, %s, %s, now())", here)
            return
        else:
            conn.execute("select queue.signal(%s, 's')", (id,))
            pause()
            conn.execute("select queue.wait(%s, %s, %s, 's')", here)
            return
    conn.execute("select queue.succeed(%s, %s)", (id, claim))


def work():
    with connect() as conn:
        [worker] = conn.execute(
            "select * from queue.register_worker('w', null, '{\\"dead_after\\": \\"1 s\\"}')"
        ).fetchone()
        threading.Thread(target=beat, args=(worker,), daemon=True).start()
        while True:
            jobs = conn.execute(
                "select id, claim, steps from queue.fetch(%s)", (worker,)
            ).fetchall()
            for job in jobs:
                try:
                    run(conn, *job)
                except psycopg.Error as error:
                    if error.sqlstate != "QJ002":
                        raise
                    write("lost", *job[:2])  # given up for dead: on a busy machine
            if not jobs:
                conn.execute("select * from queue.tick()")
                time.sleep(0.01)


signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    print(pid, flush=True)
"""


@dataclasses.dataclass
class Size:
    """How many jobs, steps of each, kills of a worker, crashes of the server; the longest pause."""

    jobs: int
    steps: int
    kills: int
    crashes: int
    pause: float


SHORT, LONG = Size(8, 9, 6, 0, 0.02), Size(200, 20, 2000, 20, 0.5)


class Workers:
    """The worker processes, all of which end with the test."""

    def __init__(self, dsn: str, folder: Path, size: Size) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        self.ledger = folder / "ledger"
        arguments = [dsn, self.ledger, str(size.steps), " ".join(KINDS), str(size.pause)]
        with (folder / "errors").open("w") as errors:
            self._launcher = subprocess.Popen(
                [sys.executable, program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.pids: list[int] = []
        #: Those that were killed, or have lost their connection.
        self.ended: set[int] = set()

    def start(self) -> None:
        """Start as many as are missing."""
        for pid in [pid for pid in self.pids if not is_alive(pid)]:
            self.pids.remove(pid)
            self.ended.add(pid)
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        while len(self.pids) < WORKERS:
            print(file=self._launcher.stdin, flush=True)
            self.pids.append(int(self._launcher.stdout.readline()))

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid))

    def stop(self) -> None:
        with self._launcher:
            self._launcher.kill()
            for pid in self.pids:
                self.kill(pid)


def is_alive(pid: int) -> bool:
    """Whether a process exists that has not ended."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def crash(cluster: Cluster) -> None:
    """Kill all of a server's processes at once, and start it again."""
    file = cluster.data / "postmaster.pid"
    pid = int(file.read_text().split()[0])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pids = [pid, *map(int, children)]
    for one in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, pids)))
    # Where nobody reaps orphans, the files seem to belong to a process that exists.
    for path in (file, cluster.folder / f".s.PGSQL.{cluster.port}.lock"):
        path.unlink()
    cluster.start()


def check(conn: Connection, workers: Workers, size: Size) -> None:
    """Compare what has happened with what should have."""
    ran: dict[tuple[int, int], list[int]] = defaultdict(list)
    lost = set()
    for what, id, n, pid in map(json.loads, workers.ledger.read_text().splitlines()):
        if what == "ran":
            ran[id, n].append(pid)
        else:
            lost.add((id, pid))
    all_steps = {(id, n) for id in range(1, size.jobs + 1) for n in range(size.steps)}
    kinds = {kind: {(id, n) for id, n in all_steps if KINDS[n % 8] == kind} for kind in KINDS}
    query = "select job, step, count(*) from effect group by 1, 2"
    effects = {(job, step): n for job, step, n in conn.execute(query).fetchall()}
    assert effects == dict.fromkeys(kinds["transaction"], 1)
    assert ran.keys() == kinds["outside"]
    # It ran again only after a run that was killed, or whose worker was given up for dead.
    for (id, n), pids in ran.items():
        assert all(pid in workers.ended or (id, pid) in lost for pid in pids[:-1]), (id, n)
    assert conn.execute("select count(*) from queue.steps").fetchone() == (len(all_steps),)
    states = "select state, count(*) from queue.jobs group by 1"
    assert conn.execute(states).fetchall() == [("succeeded", size.jobs)]
    assert conn.execute("select * from queue.check()").fetchall() == []
    again = sum(len(pids) - 1 for pids in ran.values())
    print(f"{len(workers.ended)} workers ended, {again} steps ran again, {len(lost)} claims lost")


def kill_and_check(dsn: str, folder: Path, size: Size, cluster: Cluster | None = None) -> int:
    """Return how many workers were killed before the work was done."""
    dice = random.Random(28)

    def connect() -> Connection:
        return psycopg.connect(dsn, autocommit=True)

    with connect() as conn:
        conn.execute("create table effect (job bigint, step integer)")
        conn.execute("""select queue.register_task('t', '{"retry": {"max_crashes": null}}')""")
        conn.execute("select queue.defer('t') from generate_series(1, %s)", [size.jobs])
    workers = Workers(dsn, folder, size)
    try:
        crashes = set(dice.sample(range(1, size.kills), size.crashes))
        conn = connect()

        def is_over() -> bool:
            workers.start()
            query = "select not exists (select from queue.jobs where state <> 'succeeded')"
            return bool(conn.execute(query).fetchone() == (True,))

        def is_at_work() -> bool:
            query = "select from queue.jobs where state = 'running' limit 1"
            return is_over() or bool(conn.execute(query).fetchall())

        killed = 0
        while killed < size.kills and wait_for(is_at_work) and not is_over():
            if killed in crashes and cluster is not None:
                conn.close()
                crash(cluster)
                conn = connect()
            time.sleep(dice.random() * size.pause / 4)
            workers.kill(dice.choice(workers.pids))
            killed += 1
        wait_for(is_over, 600.0)
        check(conn, workers, size)
        conn.close()
    finally:
        workers.stop()
    return killed


def test_killed_between_steps(dsn: str, tmp_path: Path) -> None:
    kill_and_check(dsn, tmp_path, SHORT)


@pytest.fixture
def cluster(server: EmbeddedServer) -> Iterator[Cluster]:
    """A server that may be killed, with pgdefer installed."""
    with open_folder("kills") as folder:
        cluster = Cluster(folder, server)
        cluster.initdb("fsync = off\n")  # only processes are killed
        with stopping(cluster):
            cluster.start()
            with cluster.connect() as conn:
                conn.execute((sql_folder() / "pgdefer.sql").read_bytes())
            yield cluster


@pytest.mark.soak
def test_killed_between_steps_long(cluster: Cluster, tmp_path: Path) -> None:
    assert kill_and_check(cluster.dsn(), tmp_path, LONG, cluster) == LONG.kills

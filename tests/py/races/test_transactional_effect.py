"""A job whose handler ends its own transaction with queue.succeed takes effect exactly once.

Workers are processes that are killed with SIGKILL again and again, at any point; so is the
server. A lost claim rolls the effect back with the outcome.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer, temporary_server
from support import create_database, install

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]

WORKER = """
import random, sys, threading, time
import psycopg

dsn = sys.argv[1]

def beat(worker):
    with psycopg.connect(dsn, autocommit=True) as conn:
        while True:
            conn.execute("select * from queue.heartbeat(%s)", (worker,))
            conn.execute("select * from queue.tick()")
            time.sleep(0.2)

def quietly(action, *arguments):
    try:
        action(*arguments)
    except psycopg.Error:
        pass

def work():
    with psycopg.connect(dsn) as conn:
        conn.autocommit = True
        info = '{"dead_after": "1 second"}'
        register = "select * from queue.register_worker('w', null, %s)"
        [worker] = conn.execute(register, (info,)).fetchone()
        threading.Thread(target=quietly, args=(beat, worker), daemon=True).start()
        while True:
            fetch = "select id, claim from queue.fetch(%s, null, 5)"
            jobs = conn.execute(fetch, (worker,)).fetchall()
            if not jobs:
                time.sleep(0.02)
            for id, claim in jobs:
                with conn.transaction():
                    conn.execute("insert into effect (job_id) values (%s)", (id,))
                    time.sleep(random.random() * 0.06)
                    conn.execute("select queue.succeed(%s, %s)", (id, claim))

while True:
    try:
        work()
    except psycopg.Error:
        time.sleep(0.05)
"""


@pytest.fixture
def own() -> Iterator[EmbeddedServer]:
    """A server that may be killed."""
    with temporary_server(settings={"max_connections": "60"}) as server:
        create_database(server, "effect")
        install(server, "effect")
        yield server


class Fleet:
    """Worker processes; any may be killed and is replaced."""

    def __init__(self, dsn: str, script: Path, size: int) -> None:
        self._command = [sys.executable, str(script), dsn]
        self._processes = [subprocess.Popen(self._command) for _ in range(size)]

    def kill_one(self, n: int) -> None:
        self._processes[n].kill()
        self._processes[n].wait()
        self._processes[n] = subprocess.Popen(self._command)

    def __len__(self) -> int:
        return len(self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def unfinished(dsn: str) -> int | None:
    """The number of jobs left, None while the server is away."""
    with contextlib.suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute(
            "select (select count(*) from queue.job) - (select count(*) from queue.finished)"
        ).fetchone()
        assert row is not None
        return int(row[0])
    return None


def kill_server(server: EmbeddedServer) -> None:
    pid = server.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    server.ensure_running()


def exactly_once(
    server: EmbeddedServer, folder: Path, jobs: int, server_kills: int, seconds: float
) -> None:
    dsn = server.dsn("effect")
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create table effect (job_id bigint not null)")
        conn.execute(
            """
            select * from queue.defer_many((
              select jsonb_agg(jsonb_build_object('task', 't', 'options',
                '{"retry": {"max_crashes": null}}'::jsonb) || case when n %% 3 = 0
                then jsonb_build_object('lock', 'lock ' || n %% 7) else '{}' end)
              from generate_series(1, %s) n))
            """,
            (jobs,),
        )
    script = folder / "worker.py"
    script.write_text(WORKER)
    dice = random.Random(jobs)
    fleet = Fleet(dsn, script, 4)
    kills = 0
    left: int | None = jobs
    kill_at = jobs * 0.99
    try:
        end = time.monotonic() + seconds
        while left != 0:
            assert time.monotonic() < end, f"{left} jobs are left"
            time.sleep(dice.uniform(0.0, 0.05))
            left = unfinished(dsn)
            # By progress, because a fleet that only dies gets nowhere; towards the end nothing is killed.
            if left is not None and jobs * 0.2 < left <= kill_at:
                fleet.kill_one(dice.randrange(len(fleet)))
                kills += 1
                kill_at = left - jobs * 0.04
            if left is not None and server_kills and left < jobs * 0.3 * server_kills:
                kill_server(server)
                server_kills -= 1
    finally:
        fleet.close()
    with psycopg.connect(dsn, autocommit=True) as conn:
        rows = conn.execute(
            """
            select j.state, count(e.job_id) as effects, count(*) from queue.jobs j
            left join effect e on e.job_id = j.id group by j.id, j.state
            """
        ).fetchall()
        crashes = conn.execute("select coalesce(sum(crashes), 0) from queue.jobs").fetchone()
        broken = conn.execute("select * from queue.check()").fetchall()
    assert [(state, effects) for state, effects, _ in rows] == [("succeeded", 1)] * jobs
    assert not broken
    assert kills > 10
    assert server_kills == 0
    assert crashes is not None
    assert crashes[0] > 0, "nobody was killed in the middle of a job"


@pytest.mark.long
def test_each_job_takes_effect_once(own: EmbeddedServer, tmp_path: Path) -> None:
    exactly_once(own, tmp_path, jobs=300, server_kills=2, seconds=150)


@pytest.mark.soak
def test_each_of_5000_jobs_takes_effect_once(own: EmbeddedServer, tmp_path: Path) -> None:
    exactly_once(own, tmp_path, jobs=5000, server_kills=3, seconds=900)

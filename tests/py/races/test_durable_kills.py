"""Workers that are killed in the middle of durable jobs: the steps that ran, and how often.

The effect of a step outside the database is a line in a file, written before the step is finished.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from .conftest import until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]

# argv: DSN, ledger, the number of steps of a job. Runs until it is killed. Of each four steps one is a
# transaction, one is outside the database, one a sleep, one a wait for a signal. Jobs with odd
# ids ask before each step, the others rely on the steps from fetch.
PROGRAM = """
import json, os, sys, threading, time
import psycopg

dsn, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def beat():
    with psycopg.connect(dsn, autocommit=True) as conn:
        while True:
            conn.execute("select * from queue.heartbeat(%s)", (worker,))
            time.sleep(0.2)


def run(conn, id, claim, steps):
    for n in range(count):
        kind = ("transaction", "outside", "sleep", "wait")[n % 4]
        here = (id, claim, kind)
        if id % 2:
            done = conn.execute("select finished from queue.begin_step(%s, %s, %s)", here)
            is_finished = done.fetchone()[0]
        else:
            name = kind if n < 4 else f"{kind}#{n // 4 + 1}"
            here = (id, claim, name)
            is_finished = name in (steps or {})
        if is_finished:
            continue
        if kind == "transaction":
            with conn.transaction():
                conn.execute("insert into effect values (%s, %s)", (id, n))
                conn.execute("select queue.finish_step(%s, %s, %s)", here)
        elif kind == "outside":
            os.write(ledger, json.dumps([id, n, os.getpid()]).encode() + b"\\n")
            conn.execute("select queue.finish_step(%s, %s, %s)", here)
        elif kind == "sleep":
            conn.execute("select queue.sleep(%s, %s, %s, now())", here)
            return
        else:
            conn.execute("select queue.signal(%s, 's')", (id,))
            conn.execute("select queue.wait(%s, %s, %s, 's')", here)
            return
    conn.execute("select queue.succeed(%s, %s)", (id, claim))


with psycopg.connect(dsn, autocommit=True) as conn:
    [worker] = conn.execute(
        "select * from queue.register_worker('w', null, '{\\"dead_after\\": \\"1 s\\"}')"
    ).fetchone()
    threading.Thread(target=beat, daemon=True).start()
    while True:
        jobs = conn.execute(
            "select id, claim, steps from queue.fetch(%s)", (worker,)
        ).fetchall()
        for job in jobs:
            run(conn, *job)
        if not jobs:
            conn.execute("select * from queue.tick()")
            time.sleep(0.01)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "size",
    [(8, 9, 6), pytest.param((200, 20, 2000), marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def test_killed_between_steps(
    conn: Connection,
    dsn: str,
    program: Path,
    processes: list[subprocess.Popen[bytes]],
    size: tuple[int, int, int],
) -> None:
    jobs, steps, kills = size
    dice = random.Random(28)
    ledger = program.with_name("ledger")
    ledger.touch()
    conn.execute("create table effect (job bigint, step integer)")
    conn.execute("""select queue.register_task('t', '{"retry": {"max_crashes": null}}')""")
    conn.execute("select queue.defer('t') from generate_series(1, %s)", [jobs])

    def start() -> None:
        command = [sys.executable, program, dsn, ledger, str(steps)]
        processes.append(subprocess.Popen(command))

    def is_over() -> bool:
        query = "select not exists (select from queue.jobs where state <> 'succeeded')"
        return bool(conn.execute(query).fetchone() == (True,))

    def is_at_work() -> bool:
        query = "select exists (select from queue.jobs where state = 'running')"
        return bool(conn.execute(query).fetchone() == (True,)) or is_over()

    for _ in range(3):
        start()
    for _ in range(kills):
        until(is_at_work)
        time.sleep(dice.random() * 0.02)
        victim = processes.pop(dice.randrange(len(processes)))
        victim.kill()
        victim.wait()
        start()
    until(is_over, 3000.0)
    effects = Counter(conn.execute("select job, step from effect").fetchall())
    transactions = {(id, n) for id in range(1, jobs + 1) for n in range(0, steps, 4)}
    assert effects == dict.fromkeys(transactions, 1)
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    outside = Counter((id, n) for id, n, _ in lines)
    assert outside.keys() == {(id, n) for id in range(1, jobs + 1) for n in range(1, steps, 4)}
    assert outside.total() <= len(outside) + kills
    finished = conn.execute("select count(*) from queue.steps").fetchone()
    assert finished == (jobs * steps,)
    assert conn.execute("select count(*) from queue.received_signal").fetchone() is not None
    assert conn.execute("select * from queue.check()").fetchall() == []

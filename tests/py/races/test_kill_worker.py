"""A worker that is killed, or frozen and declared dead: the fate of its jobs and outcomes.

The ledger is a file outside the database, to which each process appends its runs.
"""

from __future__ import annotations

import dataclasses
import itertools
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

from workers import wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]

# argv: DSN, ledger, seconds that a job takes. Runs until it is killed.
PROGRAM = """
import json, os, sys, threading, time
import psycopg

me = os.getpid()
dsn, path, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(what, id=0, claim=0, more=""):
    line = json.dumps([what, id, claim, me, time.monotonic(), more])
    os.write(ledger, line.encode() + b"\\n")


def beat():
    with psycopg.connect(dsn, autocommit=True) as conn:
        while True:
            try:
                conn.execute("select * from queue.heartbeat(%s)", (worker,))
            except psycopg.Error as error:
                note("gone", more=error.sqlstate)
                return
            time.sleep(0.2)


with psycopg.connect(dsn, autocommit=True) as conn:
    [worker] = conn.execute(
        "select * from queue.register_worker('w', null, '{\\"dead_after\\": \\"1 s\\"}')"
    ).fetchone()
    threading.Thread(target=beat, daemon=True).start()
    note("worker", worker)
    turn = 0
    while True:
        turn += 1
        try:
            jobs = conn.execute(
                "select id, claim from queue.fetch(%s, null, 3)", (worker,)
            ).fetchall()
        except psycopg.Error as error:
            note("gone", more=error.sqlstate)
            sys.exit(7)
        conn.execute("select * from queue.tick()")
        outcomes = []
        for id, claim in jobs:
            note("start", id, claim)
            time.sleep(seconds)
            note("end", id, claim)
            outcomes.append({"id": id, "claim": claim, "outcome": "succeeded", "result": me})
        if turn % 2:
            for row in conn.execute(
                "select * from queue.finish_many(%s)", (json.dumps(outcomes),)
            ).fetchall():
                if row[3]:
                    note("refused", row[0], row[1], row[3])
        else:
            for outcome in outcomes:
                try:
                    conn.execute(
                        "select queue.succeed(%s, %s, %s)",
                        (outcome["id"], outcome["claim"], str(me)),
                    )
                except psycopg.Error as error:
                    note("refused", outcome["id"], outcome["claim"], error.sqlstate)
        if not jobs:
            time.sleep(0.02)
"""


@dataclasses.dataclass
class Note:
    what: str
    id: int
    claim: int
    pid: int
    at: float
    more: str


class Workers:
    """Processes that run jobs, and the times at which killed ones died."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self._dsn = dsn
        self._program = folder / "program.py"
        self._program.write_text(PROGRAM)
        self._ledger = folder / "ledger"
        self._ledger.touch()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.died: dict[int, float] = {}

    def start(self, seconds: float = 0.0) -> subprocess.Popen[bytes]:
        command = [sys.executable, self._program, self._dsn, self._ledger, str(seconds)]
        self.processes.append(subprocess.Popen(command, stderr=subprocess.PIPE))
        return self.processes[-1]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        self.died[process.pid] = time.monotonic()
        self.processes.remove(process)

    def notes(self, what: str, pid: int | None = None) -> list[Note]:
        lines = self._ledger.read_text().splitlines()
        notes = [Note(*json.loads(line)) for line in lines if line.endswith("]")]
        return [n for n in notes if n.what == what and pid in (None, n.pid)]

    def is_running(self, pid: int) -> bool:
        """Whether a process is in the middle of a job."""
        return len(self.notes("start", pid)) > len(self.notes("end", pid))


@pytest.fixture
def workers(dsn: str, tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(dsn, tmp_path)
    yield workers
    for process in list(workers.processes):
        workers.kill(process)


def defer(conn: Connection, **arguments: Any) -> int:
    names = "".join(f", {name} => %({name})s" for name in arguments)
    row = conn.execute(f"select queue.defer('t'{names})", arguments).fetchone()
    assert row is not None
    return int(row[0])


def job(conn: Connection, id: int) -> dict[str, Any]:
    row = conn.execute("select to_jsonb(j) from queue.jobs j where id = %s", (id,)).fetchone()
    assert row is not None
    return dict(row[0])


def states(conn: Connection) -> set[str]:
    return {state for (state,) in conn.execute("select distinct state from queue.jobs")}


def test_killed_in_the_middle(conn: Connection, workers: Workers) -> None:
    conn.execute("select queue.register_task('t', '{}')")
    ids = [defer(conn, lock=lock) for lock in ("l", "l", None)]
    first = workers.start(60)
    wait_for(lambda: workers.notes("start", first.pid))
    running = [id for id in ids if job(conn, id)["state"] == "running"]
    assert running == [ids[0], ids[2]]
    [row] = conn.execute("select max(last_seen_at) from queue.workers").fetchall()
    workers.kill(first)
    second = workers.start()
    wait_for(lambda: states(conn) == {"succeeded"})
    for id in ids:
        row = job(conn, id)
        crashes = 1 if id in running else 0
        assert (row["crashes"], row["attempts"], row["failures"]) == (crashes, 1 + crashes, 0)
        assert row["result"] == second.pid
    attempts = conn.execute(
        "select job_id, outcome, claim, finished_at - started_at > '0.9 s' from queue.attempts"
        " order by job_id"
    ).fetchall()
    claims = {n.id: n.claim for n in workers.notes("start", first.pid)}
    assert [a[:2] for a in attempts] == [(id, "crashed") for id in running]
    assert attempts[0][2] == claims[ids[0]]
    # Not before it was certainly dead, and in the lock's order.
    begun = {n.id: n.at for n in workers.notes("start", second.pid)}
    assert min(begun.values()) > workers.died[first.pid] + 0.7
    assert begun[ids[0]] < begun[ids[1]]


def test_a_zombie_that_wakes_late(conn: Connection, workers: Workers) -> None:
    id = defer(conn)
    zombie = workers.start(0.7)
    wait_for(lambda: workers.notes("start", zombie.pid))
    os.kill(zombie.pid, signal.SIGSTOP)
    assert job(conn, id)["state"] == "running"
    other = workers.start()
    wait_for(lambda: job(conn, id)["state"] == "succeeded")
    os.kill(zombie.pid, signal.SIGCONT)
    wait_for(lambda: workers.notes("refused", zombie.pid))
    [refused] = workers.notes("refused", zombie.pid)
    assert (refused.id, refused.more) == (id, "QJ002")
    assert wait_for(lambda: workers.notes("gone", zombie.pid))[0].more == "QJ007"
    row = job(conn, id)
    assert (row["state"], row["result"], row["crashes"]) == ("succeeded", other.pid, 1)
    assert wait_for(zombie.poll) == 7


LATE = {
    "succeed": "select queue.succeed(%(id)s, %(claim)s, '\"late\"')",
    "fail": "select queue.fail(%(id)s, %(claim)s, 'late')",
    "release": "select queue.release(%(id)s, %(claim)s)",
    "retry_later": "select queue.retry_later(%(id)s, %(claim)s)",
    "extend": "select queue.extend(%(id)s, %(claim)s, '1 hour')",
}


def test_late_outcomes_are_refused(conn: Connection) -> None:
    """Before its successor claims, while that runs, and when it has ended."""
    sleepy, other = (
        conn.execute(
            "select queue.register_worker('w', info => '{\"dead_after\": \"1 s\"}')"
        ).fetchone()
        for _ in range(2)
    )
    assert sleepy is not None
    assert other is not None
    id = defer(conn)
    claims = conn.execute("select id, claim from queue.fetch(%s)", sleepy).fetchall()
    wait_for(lambda: conn.execute("select reaped from queue.reap()").fetchone() == (1,))
    late = {"id": id, "claim": claims[0][1]}

    def refuse_all() -> None:
        before = job(conn, id)
        for call in LATE.values():
            with pytest.raises(psycopg.Error) as raised:
                conn.execute(call, late)
            assert raised.value.sqlstate == "QJ002"
            assert str(late["claim"]) in (raised.value.diag.message_detail or "")
        for outcome in ("succeeded", "failed", "retry_later", "released", "aborted"):
            outcomes = json.dumps([late | {"outcome": outcome}])
            rows = conn.execute("select * from queue.finish_many(%s)", (outcomes,)).fetchall()
            assert rows == [(id, late["claim"], None, "QJ002")]
            rows = conn.execute(
                "select id, claim, error, task from queue.finish_and_fetch(%s, %s, %s)",
                (third[0], outcomes, ["none"]),
            ).fetchall()
            assert rows == [(id, late["claim"], "QJ002", None)]
        assert job(conn, id) == before

    third = conn.execute("select queue.register_worker('w')").fetchone()
    assert third is not None
    assert job(conn, id)["state"] == "ready"
    refuse_all()
    rows = conn.execute("select id, claim from queue.fetch(%s)", third).fetchall()
    assert rows[0][0] == id
    assert rows[0][1] > late["claim"]
    refuse_all()
    conn.execute("select queue.succeed(%s, %s)", rows[0])
    refuse_all()
    with pytest.raises(psycopg.Error) as raised:
        conn.execute("select * from queue.fetch(%s)", sleepy)
    assert raised.value.sqlstate == "QJ007"


def check_ledger(workers: Workers, locks: dict[int, str | None]) -> None:
    ends = {(n.id, n.claim): n.at for n in workers.notes("end")}
    runs = defaultdict(list)
    by_lock = defaultdict(list)
    for n in workers.notes("start"):
        # A run that did not end, ended with its process, or continues.
        end = ends.get((n.id, n.claim), workers.died.get(n.pid, float("inf")))
        runs[n.id].append((n.at, end, n.claim))
        if lock := locks[n.id]:
            by_lock[lock].append((n.at, end, n.id))
    assert runs.keys() == locks.keys()
    for spans in runs.values():
        spans.sort()
        assert [claim for *_, claim in spans] == sorted(claim for *_, claim in spans)
        for (_, end, _), (start, _, _) in itertools.pairwise(spans):
            assert end < start, "a job ran twice at once"
    for spans in by_lock.values():
        spans.sort()
        ids = [id for *_, id in spans]
        assert ids == sorted(ids), "the order of a lock was lost"
        for (_, end, _), (start, _, _) in itertools.pairwise(spans):
            assert end < start, "two jobs of a lock ran at once"


@pytest.mark.long
def test_killed_over_and_over(conn: Connection, workers: Workers) -> None:
    conn.execute("""
        select queue.register_task('t', '{"retry": {"max_attempts": 1, "max_crashes": null}}')
    """)
    dice = random.Random(4)
    locks = {}
    for n in range(480):
        lock = dice.choice(["a", "b", None, None])
        key = "k" if n % 5 == 0 else None
        locks[defer(conn, lock=lock, concurrency_key=key, concurrency_limit=2)] = lock
    for _ in range(3):
        workers.start(0.02)
    for _ in range(8):
        process = dice.choice(workers.processes)
        wait_for(lambda pid=process.pid: workers.is_running(pid) or states(conn) == {"succeeded"})
        time.sleep(dice.random() * 0.01)
        workers.kill(process)
        workers.start(0.02)
    wait_for(lambda: states(conn) == {"succeeded"})
    for process in list(workers.processes):
        workers.kill(process)
    check_ledger(workers, locks)
    # A worker that is late for a second counts as dead, too.
    crashed = conn.execute("select job_id, claim from queue.attempts where outcome = 'crashed'")
    assert {(note.id, note.claim) for note in workers.notes("refused")} <= {*crashed.fetchall()}
    rows = conn.execute("select crashes, attempts, failures from queue.jobs").fetchall()
    assert all(attempts == crashes + 1 and not failures for crashes, attempts, failures in rows)
    assert sum(crashes for crashes, *_ in rows) > 0

"""Clients that make only the six calls of the worker protocol see every job run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import psycopg

from workers import CheckedThread, beside, wait_for

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]

UNFINISHED = (
    "select count(*) from queue.jobs where state not in ('succeeded', 'failed', 'cancelled')"
)
INFO = json.dumps({"dead_after": "1 s"})


class Client(CheckedThread):
    """A worker of its known tasks. At times it dies: it falls silent, and begins again."""

    def __init__(self, conn: Connection, seed: int, tasks: set[str], dies: float) -> None:
        super().__init__()
        self._conn = conn
        self._dice = random.Random(seed)
        self._tasks = tasks
        self._dies = dies
        self.beside: list[int] = []

    def work(self) -> None:
        while not self.is_over.is_set():
            self._live()

    def _live(self) -> None:
        (worker,) = self._call("select queue.register_worker('six', null, %s)", INFO)[0]
        outcomes: list[dict[str, Any]] = []
        running: list[tuple[int, int, str]] = []
        try:
            while not self.is_over.is_set():
                self._call("select id, claim from queue.heartbeat(%s)", worker)
                sent = json.dumps(outcomes)
                size = self._dice.randint(1, 5) - len(running)
                if size <= 0 or self._dice.random() < 0.2:
                    self._call("select * from queue.finish_many(%s)", sent)
                    rows = self._call("select id, claim, task from queue.fetch(%s)", worker)
                else:
                    both = "select id, claim, task from queue.finish_and_fetch(%s, %s, null, %s)"
                    rows = [row for row in self._call(both, worker, sent, size) if row[2]]
                outcomes = []
                running += rows
                if any(task == "kills" for _, _, task in running):
                    self.beside.append(len(running))
                    return
                if running and self._dice.random() < self._dies:
                    return
                if not running:
                    row = self._call("select wait_for from queue.before_sleep(%s)", worker)[0]
                    self.is_over.wait(min(row[0].total_seconds(), 0.1))
                    self._call("select queue.after_sleep(%s)", worker)
                ended = [one for one in running if self._dice.random() < 0.7]
                running = [one for one in running if one not in ended]
                outcomes = [self._outcome(*one) for one in ended]
        except psycopg.errors.DatabaseError as error:
            if error.sqlstate != "QJ007":
                raise

    def _call(self, statement: str, *given: Any) -> list[Any]:
        cursor = self._conn.execute(statement, given)
        return cursor.fetchall()

    def _outcome(self, id: int, claim: int, task: str) -> dict[str, Any]:
        outcome: dict[str, Any] = {"id": id, "claim": claim}
        if task not in self._tasks:
            return outcome | {"outcome": "unknown_task"}
        if task == "fails":
            return outcome | {"outcome": "failed", "error": "as it always does"}
        if task == "yields" and self._dice.random() < 0.5:
            return outcome | {"outcome": "retry_later"}
        return outcome | {"outcome": "succeeded"}


ALL = {"plain", "new", "fails", "yields", "often"}
# A client that is slow for a second counts as dead, which is a crash of what it runs: any number may come.
RETRY = {"retry": {"max_attempts": 3, "base": "50 ms", "max_crashes": None}}
KILLS = {"retry": {"max_crashes": 2}}


def value(conn: Connection, statement: str, *given: Any) -> Any:
    """Return the first value of a statement's answer."""
    row = conn.execute(statement, given).fetchone()
    return row and row[0]


def test_every_job_ends(connect: Connect) -> None:
    """Workers die, old ones miss a task, a job kills: nobody calls tick or reap, and all jobs end."""
    dice = random.Random(22)
    conn = connect()
    conn.execute("select queue.schedule('often', 'every 1 second', 'often')")
    conn.execute("select queue.configure_queue('q2', '{\"max_running\": 2}')")
    ids: list[int] = []
    for _ in range(80):
        given: dict[str, Any] = {
            "task": dice.choice(["plain", "plain", "plain", "new", "fails", "yields"]),
            "queue": dice.choice(["q1", "q2", "q3"]),
            "priority": dice.choice([0, 0, 5]),
            "options": RETRY,
        }
        match dice.randrange(7):
            case 0:
                given["lock"] = dice.choice("ab")
            case 1:
                given |= {"concurrency_key": dice.choice("kl"), "concurrency_limit": 1}
            case 2:
                given["options"] = RETRY | {"delay": "300 ms"}
            case 3:
                given["options"] = RETRY | {"timeout": "1 minute"}
            case 4 if ids:
                given |= {"needs": [dice.choice(ids)]}
                given["options"] = RETRY | {"on_need_failure": "proceed"}
        (row,) = conn.execute(
            "select * from queue.defer_many(%s)", [json.dumps([given])]
        ).fetchall()
        ids.append(row[0])
    kills = json.dumps([{"task": "kills", "queue": "q1", "lock": "a", "options": KILLS}])
    killing = conn.execute("select * from queue.defer_many(%s)", [kills]).fetchall()
    clients = [Client(connect(), n, ALL - {"new"} if n == 1 else ALL, 0.01) for n in range(4)]
    with beside(*clients):
        wait_for(lambda: value(conn, f"{UNFINISHED} and task <> 'often'") == 0, 120)
        runs = "select count(*) from queue.jobs where task = 'often' and state = 'succeeded'"
        wait_for(lambda: value(conn, runs) > 1, 30)
    wrong = """
        select id, task, state, reason, crashes from queue.jobs
        where id = any (%s) and state <> case task when 'fails' then 'failed' else 'succeeded' end
    """
    assert not conn.execute(wrong, [ids]).fetchall()
    ended = "select state, reason from queue.jobs where id = any (%s)"
    found = conn.execute(ended, [[row[0] for row in killing]]).fetchall()
    assert found == [("failed", "crash_loop")]
    # beside its first run there may have been others, claimed with it; beside later runs none
    sizes = sorted(n for client in clients for n in client.beside)
    assert sizes[:-1] == [1] * (len(sizes) - 1)


def test_many_crashed_and_one_ready(connect: Connect) -> None:
    """Jobs that crashed delay no others, and a steady flow of others delays none of them."""
    conn = connect()
    dead = value(conn, "select queue.register_worker('dead')")
    conn.execute("select queue.defer('crashed') from generate_series(1, 300)")
    conn.execute("select count(*) from queue.fetch(%s, null, 300)", [dead])
    conn.execute("select queue.worker_died(%s)", [dead])
    crashed = "select count(*) from queue.jobs where crashes = 1 and state = 'ready'"
    wait_for(lambda: value(conn, "select reaped from queue.reap()") == 0, 30)
    assert value(conn, crashed) == 300
    conn.execute("select queue.defer('plain')")
    worker = value(conn, "select queue.register_worker('w')")
    order: list[str] = []
    outcomes = "[]"
    while len(order) < 40:
        # on a busy machine fetch would look less often whether the worker runs nothing
        conn.execute("set pgdefer.look_after = '0'")
        rows = conn.execute(
            "select id, claim, task from queue.finish_and_fetch(%s, %s, null, 4)",
            [worker, outcomes],
        ).fetchall()
        assert rows
        assert len(rows) == 1 or all(task == "plain" for _, _, task in rows)
        order += [task for _, _, task in rows]
        outcomes = json.dumps(
            [{"id": id, "claim": claim, "outcome": "succeeded"} for id, claim, _ in rows]
        )
        if len(order) >= 10:  # from then on others arrive all the time
            conn.execute("select queue.defer('plain')")
    assert "plain" in order[:4]
    assert order[12:].count("crashed") >= 5
    assert order[12:].count("plain") >= 5

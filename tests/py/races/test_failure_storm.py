"""Every way for a claim to end, at once: nothing is lost, run twice at a time, or left behind.

Workers claim jobs with locks, keys, needs, queueing locks, timeouts and expiries, and end them in
all ways, in time or as zombies. Operators cancel, abort, hold, retry and prune. Reapers end the
claims of dead workers. A ledger outside the database knows each claim, and which worker ended it.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from workers import CheckedThread, beside

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]

# The refusals that a late or an impossible call may get.
POLITE = {"QJ001", "QJ002", "QJ003", "QJ004", "QJ005", "QJ007"}


class Ledger:
    """The claims, and which of them their holders have ended: each once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: set[tuple[int, int]] = set()
        self._ended: set[tuple[int, int]] = set()
        self.errors: list[str] = []
        self.said: Counter[str] = Counter()

    def made(self, id: int, claim: int) -> None:
        with self._lock:
            if (id, claim) in self._made:
                self.errors.append(f"job {id}: claim {claim} was made twice")
            self._made.add((id, claim))

    def ended(self, id: int, claim: int) -> None:
        with self._lock:
            if (id, claim) in self._ended:
                self.errors.append(f"job {id}: claim {claim} ended twice")
            self._ended.add((id, claim))


class Actor(CheckedThread):
    """One connection that repeats its work."""

    def __init__(self, conn: Connection, ledger: Ledger, seed: int) -> None:
        super().__init__()
        self.conn = conn
        self.ledger = ledger
        self.dice = random.Random(seed)

    def work(self) -> None:
        self.begin()
        while not self.is_over.is_set():
            try:
                self.act()
            except psycopg.Error as error:
                if error.sqlstate not in POLITE:
                    raise
                self.ledger.said[error.sqlstate or ""] += 1
                if error.sqlstate == "QJ007":
                    self.begin()

    def begin(self) -> None:
        """Prepare; start again after an error says that the worker is gone."""

    def act(self) -> None:
        raise NotImplementedError

    def ask(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self.conn.execute(query, parameters).fetchall()

    def some_id(self) -> int:
        rows = self.ask("select max(id) from queue.job")
        return self.dice.randint(1, max(rows[0][0] or 1, 1))


class Producer(Actor):
    def act(self) -> None:
        dice = self.dice
        options: dict[str, Any] = {
            "retry": {"max_attempts": dice.choice([1, 3, None]), "max_crashes": None}
        }
        if dice.random() < 0.2:
            options["timeout"] = "1 hour"
        if dice.random() < 0.1:
            options["lock_mode"] = "mutex"
        if dice.random() < 0.1:
            options["on_conflict"] = dice.choice(["ignore", "replace"])
        if dice.random() < 0.1:
            options["unique_until"] = "finish"
        needs = [self.some_id()] if dice.random() < 0.1 else None
        rows = self.ask(
            """
            select * from queue.defer(
              't', lock => %s, concurrency_key => %s, concurrency_limit => 2, queueing_lock => %s,
              needs => %s::bigint[], priority => %s, options => %s::jsonb || case when %s
                then jsonb_build_object('expires_at', clock_timestamp() + '0.3 s') else '{}' end)
            """,
            dice.choice([None, None, "a", "b"]),
            dice.choice([None, None, "k", "l"]),
            dice.choice([None, None, None, "q"]),
            needs,
            dice.randint(0, 1),
            json.dumps(options),
            dice.random() < 0.1,
        )
        assert rows
        time.sleep(0.002)


class Worker(Actor):
    worker = 0

    def begin(self) -> None:
        self.worker = self.ask("select * from queue.register_worker('w')")[0][0]
        self.held: list[tuple[int, int]] = []

    def act(self) -> None:
        dice = self.dice
        if len(self.held) < 8:
            jobs = self.ask(
                "select id, claim from queue.fetch(%s, null, %s)",
                self.worker,
                dice.randint(1, 4),
            )
            for job in jobs:
                self.ledger.made(*job)
            self.held += jobs
        if not self.held:
            time.sleep(0.005)
            return
        dice.shuffle(self.held)
        mine = [self.held.pop() for _ in range(dice.randint(1, min(len(self.held), 4)))]
        chance = dice.random()
        if chance < 0.1:
            self.ask("select * from queue.extend(%s, %s, '0.2 s')", *mine[0])
            self.held += mine
        elif chance < 0.15:
            self.ask("select * from queue.deregister_worker(%s)", self.worker)
            self.begin()
        elif chance < 0.2:
            self.ask("select * from queue.heartbeat(%s)", self.worker)
            self.held += mine
        elif chance < 0.4:
            self.end_in_own_transaction(mine)
        elif chance < 0.45:
            self.begin()  # forgets its claims, like a worker that hangs
        else:
            self.finish_many(mine)

    def outcome(self, id: int) -> dict[str, Any]:
        kind = self.dice.choice(
            ["succeeded"] * 6 + ["failed"] * 3 + ["retry_later", "released", "aborted"]
        )
        more: dict[str, Any] = {}
        if kind == "failed" and self.dice.random() < 0.3:
            more["options"] = self.dice.choice(
                [
                    {"lock": "a"},
                    {"lock": ""},
                    {"queue": "other"},
                    {"priority": 1},
                    {"retry_in": 0.05},
                ]
            )
        if kind == "retry_later" and self.dice.random() < 0.3:
            # A younger job may wait for this one at their lock, which would be forever.
            more["needs"] = [self.dice.randint(1, id)]
        return {"outcome": kind} | more

    def finish_many(self, mine: list[tuple[int, int]]) -> None:
        outcomes = [{"id": id, "claim": claim} | self.outcome(id) for id, claim in mine]
        for id, claim, _, error in self.ask(
            "select * from queue.finish_many(%s)", json.dumps(outcomes)
        ):
            if error is None:
                self.ledger.ended(id, claim)
            else:
                self.ledger.said[error] += 1

    def end_in_own_transaction(self, mine: list[tuple[int, int]]) -> None:
        for id, claim in mine:
            with self.conn.transaction(force_rollback=self.dice.random() < 0.2):
                time.sleep(self.dice.random() * 0.005)
                call = self.dice.choice(
                    [
                        "succeed(%s, %s)",
                        "fail(%s, %s, 'e')",
                        "release(%s, %s)",
                        "retry_later(%s, %s)",
                    ]
                )
                self.ask(f"select * from queue.{call}", id, claim)


class Operator(Actor):
    def act(self) -> None:
        id = self.some_id()
        call = self.dice.choice(
            [
                "cancel(%s, abort => true)",
                "cancel(%s)",
                "hold(%s)",
                "unhold(%s)",
                "retry(array[%s::bigint])",
                "retry(array[%s::bigint], force => true)",
                "why(%s)",
                "retry_failed(max_jobs => %s %% 3 + 1)",
                "prune(%s %% 5 + 1, 'cancelled')",
            ]
        )
        self.ask(f"select * from queue.{call}", id)
        time.sleep(0.003)


class Reaper(Actor):
    def act(self) -> None:
        if self.dice.random() < 0.3:
            self.ask(
                """
                update queue.worker set last_seen_at = last_seen_at - interval '1 hour', dead_after = '0'
                where id = (select w.id from queue.worker w where w.gone_at is null
                            order by random() limit 1 for update skip locked)
                returning id
                """
            )
        self.ask(self.dice.choice(["select * from queue.reap()", "select * from queue.tick()"]))
        time.sleep(0.02)


def storm(connect: Connect, seconds: float, seed: int) -> None:
    ledger = Ledger()
    cast = [Producer] * 2 + [Worker] * 4 + [Operator] * 2 + [Reaper] * 2
    actors = [kind(connect(), ledger, seed * 100 + n) for n, kind in enumerate(cast)]
    with beside(*actors):
        time.sleep(seconds)
    assert ledger.errors == []
    conn = connect()
    broken = conn.execute("select * from queue.check()").fetchall()
    assert not broken
    drain(conn)
    if seconds > 30:
        assert ledger.said["QJ002"] > 0, "nobody was late"


def drain(conn: Connection) -> None:
    """Run the rest to its end: nothing may be stuck, except behind a failed need."""
    conn.execute(
        "update queue.worker set last_seen_at = last_seen_at - interval '1 hour', dead_after = '0'"
    )
    conn.execute("update queue.lease set expires_at = clock_timestamp()")
    patient = '{"dead_after": "1 hour"}'
    row = conn.execute(
        "select * from queue.register_worker('drain', null, %s)", (patient,)
    ).fetchone()
    assert row is not None
    fetch = "select id, claim from queue.fetch(%s, null, %s)"
    stuck: list[Any] = []
    end = time.monotonic() + 300
    while time.monotonic() < end:
        conn.execute("select * from queue.tick()")
        while jobs := conn.execute(fetch, (*row, 500)).fetchall():
            outcomes = [{"id": id, "claim": claim, "outcome": "succeeded"} for id, claim in jobs]
            conn.execute("select * from queue.finish_many(%s)", (json.dumps(outcomes),))
        left = conn.execute("select id, reason from queue.waiting").fetchall()
        for id, reason in left:
            if reason == "held":
                conn.execute("select queue.unhold(%s)", (id,))
            elif reason == "upstream_failed":
                with contextlib.suppress(psycopg.errors.DatabaseError):
                    conn.execute("select queue.cancel(%s)", (id,))
        stuck = conn.execute(
            "select id, state, reason, queue.why(id) from queue.jobs "
            "where state not in ('succeeded', 'failed', 'cancelled') order by id limit 10"
        ).fetchall()
        if not left and not stuck:
            break
    assert not stuck, stuck
    assert conn.execute("select count(*) from queue.active_job").fetchone() == (0,)
    assert conn.execute("select count(*) from queue.lease").fetchone() == (0,)
    assert conn.execute("select count(*) from queue.lock_member").fetchone() == (0,)
    assert conn.execute("select coalesce(sum(used), 0) from queue.semaphore").fetchone() == (0,)


def test_storm(connect: Connect) -> None:
    storm(connect, 3, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 7))
def test_long_storm(connect: Connect, seed: int) -> None:
    storm(connect, 60, seed)

"""Operators change jobs that producers defer and workers run: no errors except the contract's."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

from pgdefer.database.source import PsycopgConnection

pytestmark = pytest.mark.client

FORCED = {"move", "delete", "retry"}
DONE = ("deferred", "ended", "read", "move", "delete", "retry", "fail_jobs", "done")
STATES = (
    "scheduled waiting upstream_failed blocked ready running held succeeded failed cancelled"
).split()
# One statement, and so one snapshot.
SEARCH_AND_VIEW = """
select s.id, j.id
from (select id from queue.search(state => %(state)s, max_jobs => 30) where id is not null) s
full join (select id from queue.jobs where state = %(state)s order by id desc limit 30) j
  on j.id = s.id
where j.id is null or s.id is null
"""


class Storm:
    """Threads that call the queue at random until told to stop."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.dsn = dsn
        self.seed = seed
        self.until = self.patience = 0.0
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self, seconds: float, **kinds: int) -> None:
        self.until = time.monotonic() + seconds
        self.patience = self.until + 300
        threads = [
            threading.Thread(target=self._work, args=(kind, number))
            for kind, count in kinds.items()
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, kind: str, number: int) -> None:
        dice = random.Random(f"{self.seed} {kind} {number}")
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("set statement_timeout = '300s'")
            step = getattr(self, kind)(connection, dice)
            while self._goes_on():
                try:
                    next(step)
                except psycopg.Error as error:
                    if not (error.sqlstate or "").startswith("QJ00"):
                        self.failures.append(f"{kind}: {error.sqlstate} {error}")
                        return
                    step = getattr(self, kind)(connection, dice)

    def _goes_on(self) -> bool:
        """Until the time is over; on a slow machine longer, until every call was made."""
        now = time.monotonic()
        is_short = any(not self.counts[name] for name in DONE)
        return now < self.until or (is_short and now < self.patience and not self.failures)

    def producers(self, connection: PsycopgConnection, dice: random.Random) -> Any:
        while True:
            ids = recent(connection)
            job: dict[str, Any] = {"task": "t", "queue": dice.choice("abc")}
            if dice.random() < 0.4:
                job["lock"] = dice.choice("xyz")
            if dice.random() < 0.3:
                job |= {"concurrency_key": dice.choice("kl"), "concurrency_limit": 2}
            if dice.random() < 0.3 and ids:
                job["needs"] = dice.sample(ids, min(2, len(ids)))
            options: dict[str, Any] = {"retry": {"max_attempts": 3}}
            if dice.random() < 0.1:
                options["held"] = True
            if dice.random() < 0.2:
                options["lock_mode"] = "mutex"
            if dice.random() < 0.2:
                options["on_need_failure"] = "proceed"
            with connection.transaction(force_rollback=dice.random() < 0.1):
                connection.execute(
                    "select queue.defer_many(%s)", [json.dumps([job | {"options": options}])]
                )
                if dice.random() < 0.2:
                    time.sleep(0.005)
            self.counts["deferred"] += 1
            yield

    def workers(self, connection: PsycopgConnection, dice: random.Random) -> Any:
        row = connection.execute("select queue.register_worker('w')").fetchone()
        assert row
        outcomes: list[dict[str, Any]] = []
        while True:
            rows = connection.execute(
                "select id, claim, error from queue.finish_and_fetch(%s, %s, max_jobs => 5)",
                [row[0], json.dumps(outcomes)],
            ).fetchall()
            kinds = ["succeeded", "succeeded", "succeeded", "failed", "released", "retry_later"]
            outcomes = [
                {"id": id, "claim": claim, "outcome": dice.choice(kinds)}
                for id, claim, error in rows
                if error is None
            ]
            self.counts["ended"] += len(outcomes)
            self.counts["refused"] += len(rows) - len(outcomes)
            yield

    def operators(self, connection: PsycopgConnection, dice: random.Random) -> Any:
        while True:
            ids = recent(connection)
            if not ids:
                yield
                continue
            some = dice.sample(ids, min(dice.randint(1, 6), len(ids)))
            name = dice.choice("move delete retry fail_jobs done set_priority copy one".split())
            force = dice.random() < 0.3
            more = {"move": [dice.choice("abc"), force], "set_priority": [dice.randint(-2, 2)]}
            given = more.get(name, [force] if name in FORCED else [])
            if name == "copy":
                connection.execute("select queue.copy(%s)", some[:1])
            elif name == "one":
                calls = ["hold(%s)", "unhold(%s)", "cancel(%s)", "reschedule(%s)"]
                one = dice.choice([*calls, "set_args(%s, '{\"n\": 1}')"])
                connection.execute(f"select queue.{one}", some[:1])
            else:
                marks = ", ".join(["%s"] * (1 + len(given)))
                rows = connection.execute(
                    f"select id, outcome, error from queue.{name}({marks})", [some, *given]
                ).fetchall()
                assert [row[0] for row in rows] == some
                self.counts[name] += sum(row[2] is None for row in rows)
                assert {row[2] for row in rows} <= {None, "QJ001", "QJ003"}
            yield

    def pausers(self, connection: PsycopgConnection, dice: random.Random) -> Any:
        while True:
            queue = dice.choice("abc")
            connection.execute("select queue.pause(%s)", [queue])
            connection.execute("select queue.resume(%s)", [queue])
            if dice.random() < 0.1:
                # there may be none, because none of its jobs has been admitted
                with contextlib.suppress(psycopg.errors.InvalidParameterValue):
                    connection.execute("select queue.delete_queue(%s, true)", [queue])
            connection.execute("select * from queue.tick()")
            time.sleep(0.05)
            yield

    def readers(self, connection: PsycopgConnection, dice: random.Random) -> Any:
        """A search by state finds the jobs that the view shows in that state."""
        while True:
            state = dice.choice(STATES)
            differing = connection.execute(SEARCH_AND_VIEW, {"state": state}).fetchall()
            if differing:
                self.failures.append(f"readers: {state}: {differing}")
                return
            self.counts["read"] += 1
            yield


def recent(connection: PsycopgConnection) -> list[int]:
    rows = connection.execute("select id from queue.jobs order by id desc limit 60").fetchall()
    return [row[0] for row in rows]


@pytest.mark.parametrize("seconds", [5, pytest.param(45, marks=pytest.mark.soak)])
def test_operators_amid_the_traffic(dsn: str, conn: PsycopgConnection, seconds: float) -> None:
    storm = Storm(dsn, seed=random.randrange(10**6))
    storm.run(seconds, producers=2, workers=3, operators=3, pausers=1, readers=1)
    assert storm.failures == [], f"seed {storm.seed}"
    for name in DONE:
        assert storm.counts[name] > 0, (name, storm.counts)
    # the remaining jobs run to their end
    conn.execute("select queue.resume()")
    conn.execute("select queue.unhold(id) from queue.jobs where state = 'held' order by id")
    conn.execute("""
        select queue.deregister_worker(id) from queue.workers where is_alive order by id
    """)
    row = conn.execute("select queue.register_worker('last')").fetchone()
    assert row
    idle = 0
    outcomes: list[dict[str, Any]] = []
    while idle < 20:
        rows = conn.execute(
            "select id, claim from queue.finish_and_fetch(%s, %s, max_jobs => 100)",
            [row[0], json.dumps(outcomes)],
        ).fetchall()
        outcomes = [{"id": id, "claim": claim, "outcome": "succeeded"} for id, claim in rows]
        idle = 0 if rows else idle + 1
        conn.execute("select * from queue.tick()")
        if idle == 10:
            # a job whose need failed blocks the later ones of its lock
            failed = "select id from queue.jobs where state = 'upstream_failed' order by id limit 1"
            if stuck := conn.execute(failed).fetchone():
                conn.execute("select queue.cancel(%s)", stuck)
                idle = 0
    states = Counter(state for (state,) in conn.execute("select state from queue.jobs").fetchall())
    assert set(states) <= {"succeeded", "failed", "cancelled"}, (states, f"seed {storm.seed}")

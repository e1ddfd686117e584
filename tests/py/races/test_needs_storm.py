"""Needs under load: producers, workers and an operator at once, in transactions of all lengths.

Afterwards nothing is stuck: each unfinished job waits for a need that has not succeeded, and no
job of the simple kind (all, block, one attempt) started before all its needs had succeeded.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time

import psycopg
import pytest

pytestmark = pytest.mark.client

REGISTER = """select queue.register_worker('w', info => '{"dead_after": "1 day"}')"""
SECONDS = float(os.environ.get("PGDEFER_STORM_SECONDS", "5"))


@contextlib.contextmanager
def refused(*codes):
    """Let errors with one of these codes pass."""
    try:
        yield
    except psycopg.DatabaseError as error:
        if error.sqlstate not in codes:
            raise


class Storm:
    def __init__(self, dsn):
        self.dsn = dsn
        self.is_over = threading.Event()
        self.errors: list[BaseException] = []
        self.recent: list[int] = []
        self.plain: set[int] = set()
        self.retried: set[int] = set()

    def run(self, *actions):
        def guarded(number, action):
            generator = random.Random(number)
            try:
                with psycopg.connect(self.dsn, autocommit=True) as connection:
                    action(connection, generator)
            except BaseException as error:
                self.errors.append(error)
                self.is_over.set()

        threads = [threading.Thread(target=guarded, args=pair) for pair in enumerate(actions)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS
        # On a slow machine longer, until there is enough.
        while time.monotonic() < end or (
            len(self.recent) < 200 and time.monotonic() < end + 300 and not self.errors
        ):
            self.is_over.wait(0.1)
        self.is_over.set()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def produce(self, connection, generator):
        while not self.is_over.is_set():
            made = []
            with connection.transaction(force_rollback=generator.random() < 0.1) as transaction:
                for _ in range(generator.choice([1, 1, 3, 10])):
                    known = self.recent[-20:] + made
                    needs = generator.sample(known, min(generator.choice([0, 1, 2, 5]), len(known)))
                    mode = generator.choice(["all", "all", "all", "any"])
                    failure = generator.choice(["block", "block", "proceed"])
                    options = {"needs_mode": mode, "on_need_failure": failure, "max_progress": 5}
                    lock = generator.choice([None] * 5 + ["lock"])
                    deadline = generator.choice([None, None, time.time() + generator.random() * 60])
                    row = connection.execute(
                        "select queue.defer('t', needs => %s, options => %s, lock => %s,"
                        " deadline => to_timestamp(%s))",
                        [needs, json.dumps(options), lock, deadline],
                    ).fetchone()
                    made.append(row[0])
                    if (mode, failure) == ("all", "block"):
                        self.plain.add(row[0])
                if generator.random() < 0.3:
                    self.is_over.wait(generator.random() * 0.05)
            if not transaction.force_rollback:
                self.recent += made
            self.is_over.wait(0.02)

    def work(self, connection, generator):
        worker = connection.execute(REGISTER).fetchone()[0]
        outcomes: list[dict] = []
        while outcomes or not self.is_over.is_set():
            rows = connection.execute(
                "select id, claim, error from queue.finish_and_fetch(%s, %s, null, %s)",
                [worker, json.dumps(outcomes), generator.choice([1, 3, 20])],
            ).fetchall()
            assert not [row for row in rows if row[2] not in {None, "QJ002", "QJ005"}], rows
            outcomes = [
                {"id": row[0], "claim": row[1], "outcome": "succeeded"}
                for row in rows
                if row[2] == "QJ005"
            ]
            for number, claim, error in rows:
                if error is None:
                    outcomes += self.handle(connection, generator, number, claim)
            if not rows:
                self.is_over.wait(0.005)

    def handle(self, connection, generator, number, claim):
        pair = {"id": number, "claim": claim}
        kind = generator.random()
        if kind < 0.2:
            with refused("QJ002"), connection.transaction():
                connection.execute("select queue.succeed(%s, %s)", [number, claim])
                self.is_over.wait(generator.choice([0, 0.01, 0.1]))
            return []
        if kind < 0.75:
            return [pair | {"outcome": "succeeded"}]
        if kind < 0.85:
            return [pair | {"outcome": "failed", "options": {"retryable": False}}]
        if kind < 0.9:
            return [pair | {"outcome": "failed", "options": {"retry_in": 0}}]
        needs = generator.choice(
            [None, [], generator.sample(self.recent, 1) if self.recent else []]
        )
        return [pair | {"outcome": "retry_later", "needs": needs}]

    def operate(self, connection, generator):
        while not self.is_over.is_set():
            known = self.recent[-60:] or [0]
            number = generator.choice(known)
            call = generator.choice(
                [
                    "select queue.hold(%s)",
                    "select queue.unhold(%s)",
                    "select queue.unhold(id) from queue.jobs where state = 'held' and id > %s - 60",
                    "select queue.cancel(%s)",
                    "select * from queue.retry(array[%s]::bigint[])",
                    "select * from queue.retry(array[%s]::bigint[], true)",
                    "select * from queue.tick() where %s > 0",
                ]
            )
            if "retry" in call:
                self.retried.add(number)
            with refused("QJ001", "QJ003"):
                connection.execute(call, [number])
            self.is_over.wait(0.01)

    def drain(self, connection):
        """Run everything that can still run."""
        connection.execute("select queue.unhold(id) from queue.jobs where state = 'held'")
        worker = connection.execute(REGISTER).fetchone()[0]
        outcomes: list[dict] = []
        for _ in range(100_000):
            connection.execute("select * from queue.tick()")
            rows = connection.execute(
                "select id, claim from queue.finish_and_fetch(%s, %s, null, 50)",
                [worker, json.dumps(outcomes)],
            ).fetchall()
            outcomes = [{"id": row[0], "claim": row[1], "outcome": "succeeded"} for row in rows]
            if not rows:
                break


def test_storm(dsn):
    storm = Storm(dsn)
    storm.run(storm.produce, storm.produce, storm.work, storm.work, storm.work, storm.operate)
    with psycopg.connect(dsn, autocommit=True) as connection:
        broken = connection.execute("select * from queue.check()").fetchall()
        assert not broken
        storm.drain(connection)
        rows = connection.execute(
            "select id, state, queue.why(id) from queue.jobs"
            " where state not in ('succeeded', 'failed', 'cancelled')"
        ).fetchall()
        stuck = [row for row in rows if row[1] not in {"upstream_failed", "waiting", "blocked"}]
        assert not stuck
        states = dict(connection.execute("select id, state from queue.jobs").fetchall())
        edges = connection.execute(
            "select d.job_id, d.need_id from queue.need d join queue.jobs j on j.id = d.job_id"
            " where j.state in ('waiting', 'upstream_failed')"
        ).fetchall()
        needs: dict[int, list[int]] = {}
        for job, need in edges:
            needs.setdefault(job, []).append(need)
        for job, its in needs.items():
            bad = {"failed", "cancelled", "upstream_failed", "waiting", "blocked"}
            assert any(states[need] in bad for need in its), (job, its)
        early = connection.execute(
            """
            select j.id from queue.jobs j
            join queue.need d on d.job_id = j.id
            join queue.jobs n on n.id = d.need_id
            where j.id = any (%s) and j.claims = 1 and j.state = 'succeeded' and n.id <> all (%s)
              and (n.state <> 'succeeded' or j.started_at < n.finished_at)
            """,
            [list(storm.plain), list(storm.retried)],
        ).fetchall()
        assert not early
        counts = connection.execute("select state, count(*) from queue.jobs group by 1").fetchall()
        assert dict(counts)["succeeded"] > 50, counts


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
def test_storms(dsn, number):
    test_storm(dsn)

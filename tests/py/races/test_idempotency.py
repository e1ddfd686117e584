"""Idempotency keys under many producers: one job for each key, in whatever order batches name them."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import psycopg
import pytest

from workers import CheckedThread, beside

pytestmark = pytest.mark.client

KEYS = [f"k{n}" for n in range(40)]
WINDOW = 0.2  # s


class Producer(CheckedThread):
    """Defers batches with random keys in random order, and rolls some back."""

    def __init__(self, dsn: str, seed: int, rounds: int) -> None:
        super().__init__()
        self._dsn = dsn
        self._random = random.Random(seed)
        self._rounds = rounds
        #: The keys, and the ids that committed calls returned for them.
        self.returned: set[tuple[str, int]] = set()

    def work(self) -> None:
        with psycopg.connect(self._dsn) as connection:
            for _ in range(self._rounds):
                self._defer(connection)

    def _defer(self, connection: psycopg.Connection[Any]) -> None:
        keys = self._random.sample(KEYS, self._random.randint(1, 12))
        options = [{"idempotency_key": key, "unique_for": "1 hour"} for key in keys]
        options += [{"idempotency_key": "window", "unique_for": WINDOW}]
        self._random.shuffle(options)
        jobs = [{"task": "t", "options": each} for each in options]
        ids = connection.execute("select queue.defer_many(%s)", [json.dumps(jobs)]).fetchall()
        if self._random.random() < 0.3:
            connection.rollback()
        else:
            connection.commit()
            named = zip(options, ids, strict=True)
            self.returned |= {(str(each["idempotency_key"]), id) for each, (id,) in named}


def test_one_job_for_each_key(dsn: str, conn: psycopg.Connection[Any]) -> None:
    producers = [Producer(dsn, seed, rounds=40) for seed in range(6)]
    began = time.monotonic()
    with beside(*producers):  # without an error: not even 40P01
        while any(producer.is_alive() for producer in producers):
            conn.execute("select queue.tick()")
    took = time.monotonic() - began
    returned = set[tuple[str, int]]().union(*(producer.returned for producer in producers))
    made = conn.execute("select idempotency_key, id from queue.jobs").fetchall()
    assert returned == set(made)
    windows = [key for key, _ in made].count("window")
    assert len(made) - windows == len({key for key, _ in made} - {"window"}) == len(KEYS)
    assert 1 <= windows <= took / WINDOW + 1
    assert conn.execute("select * from queue.check()").fetchall() == []

"""A quicksort that partitions as it goes: jobs yield, wait for any of their parts, and continue.

Each run is a transaction of the handler, which also writes the outcome: the sorted items and the
outcome commit together.
"""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg

SIZE = 2000
SMALL = 32


class Sorter:
    """The handler of task `sort`: sorts the items from low to high (exclusive)."""

    def __init__(self, connection):
        self.connection = connection

    def one(self, text, *values):
        row = self.connection.execute(text, values).fetchone()
        return row[0] if row else None

    def run(self, number, claim, low, high):
        parts = self.one("select parts from sorting where job = %s", number)
        if parts is None and high - low > SMALL:
            parts = self.partition(low, high)
            self.connection.execute("insert into sorting values (%s, %s)", [number, parts])
            self.one("select queue.retry_later(%s, %s, needs => %s)", number, claim, parts)
            return
        if parts is None:
            self.replace(low, sorted(self.values(low, high)))
        elif self.one(
            "select bool_or(state <> 'succeeded') from queue.jobs where id = any (%s)", parts
        ):
            self.one("select queue.retry_later(%s, %s)", number, claim)
            return
        self.one("select queue.succeed(%s, %s)", number, claim)

    def partition(self, low, high):
        values = self.values(low, high)
        pivot = sorted(random.Random(low).sample(values, 3))[1]
        less = [value for value in values if value < pivot]
        more = [value for value in values if value >= pivot]
        if not less:
            more.sort()
        self.replace(low, less + more)
        middle = low + (len(less) or 1)
        return [
            self.one(
                "select queue.defer('sort', %s, options => '{\"needs_mode\": \"any\"}')",
                json.dumps({"low": begin, "high": end}),
            )
            for begin, end in ((low, middle), (middle, high))
            if begin < end
        ]

    def values(self, low, high):
        text = "select value from item where place >= %s and place < %s order by place"
        return [row[0] for row in self.connection.execute(text, [low, high])]

    def replace(self, low, values):
        self.connection.execute(
            "update item set value = n.value"
            " from unnest(%s::int[]) with ordinality n (value, i) where place = %s + n.i - 1",
            [values, low],
        )


def test_quicksort(dsn, conn, connect):
    conn.execute("create table item (place int primary key, value int not null)")
    conn.execute("create table sorting (job bigint primary key, parts bigint[] not null)")
    generator = random.Random(1)
    values = [generator.randrange(SIZE * 10) for _ in range(SIZE)]
    conn.execute(
        "insert into item select i - 1, v from unnest(%s::int[]) with ordinality u (v, i)", [values]
    )
    root = conn.execute(
        "select queue.defer('sort', %s, options => '{\"needs_mode\": \"any\"}')",
        [json.dumps({"low": 0, "high": SIZE})],
    ).fetchone()[0]
    is_done = threading.Event()

    def work():
        connection = connect()
        worker = connection.execute("select queue.register_worker('w')").fetchone()[0]
        try:
            while not is_done.is_set():
                rows = connection.execute(
                    "select id, claim, args from queue.fetch(%s)", [worker]
                ).fetchall()
                for number, claim, args in rows:
                    with connection.transaction():
                        Sorter(connection).run(number, claim, args["low"], args["high"])
                if not rows:
                    state = connection.execute("select state from queue.result(%s)", [root])
                    if state.fetchone()[0] == "succeeded":
                        is_done.set()
                    is_done.wait(0.002)
        finally:
            is_done.set()

    with ThreadPoolExecutor(4) as pool:
        for worker in [pool.submit(work) for _ in range(4)]:
            worker.result()
    found = conn.execute("select array_agg(value order by place) from item").fetchone()[0]
    assert found == sorted(values)
    states = conn.execute("select state, count(*) from queue.jobs group by 1").fetchall()
    assert [state for state, _ in states] == ["succeeded"]
    # called again when one part has ended, and when the other has: no call in vain
    most = conn.execute("select max(progress) from queue.jobs").fetchone()[0]
    assert most == 2
    with psycopg.connect(dsn, autocommit=True) as other:
        graph = other.execute("select count(distinct job_id) from queue.graph(%s)", [root])
        assert graph.fetchone()[0] == states[0][1] > 2 * SIZE / SMALL / 2

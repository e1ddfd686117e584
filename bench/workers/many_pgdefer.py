"""One worker process for the databases on standard input: JOBS SECONDS.

It registers everywhere, and idles for SECONDS. Then single jobs go to some databases for SECONDS, and
again while the first database is stopped. Last it runs JOBS no-op jobs, spread evenly, which become
due together. It prints its connections and CPU time while idle, the times from a job's defer to its
start, and when the first of the JOBS began and the last one ended. For one database it is the plain
worker, which skips the single jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg

from pgdefer import App, MultiWorker
from pgdefer.worker.worker import Worker

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import percentile

CHUNK = 1000
# To how many databases single jobs go, and how often, in seconds.
SAMPLE = 10
EVERY = 0.02


def defer(dsn: str, jobs: int, at: float) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for first in range(0, jobs, CHUNK):
            slice_ = [{"task": "noop", "args": {"n": n}} for n in range(min(CHUNK, jobs - first))]
            connection.execute(
                "select count(*) from queue.defer_many((select jsonb_agg("
                "  j || jsonb_build_object('scheduled_at', to_timestamp(%s)))"
                "  from jsonb_array_elements(%s) j))",
                [at, json.dumps(slice_)],
            )
        connection.execute("vacuum (analyze) queue.log, queue.waiting, queue.active_job")


def ended(dsn: str, since: float) -> tuple[int, float]:
    """Return how many of the jobs that became due then have ended, and when the last one did."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "select count(*), coalesce(extract(epoch from max(finished_at))::float8, 0)"
            " from queue.finished where state = 'succeeded' and finished_at >= to_timestamp(%s)",
            [since],
        ).fetchone()
    assert row is not None
    return int(row[0]), float(row[1])


def connections(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "select count(*) from pg_stat_activity where backend_type = 'client backend'"
            " and pid <> pg_backend_pid()"
        ).fetchone()
    assert row is not None
    return int(row[0])


def defer_singly(dsns: Sequence[str], seconds: float) -> None:
    """Defer jobs to one database after the other, with the time in their arguments."""
    with contextlib.ExitStack() as stack:
        to = [stack.enter_context(psycopg.connect(dsn, autocommit=True)) for dsn in dsns]
        for turn in range(int(seconds / EVERY)):
            to[turn % len(to)].execute(
                "select queue.defer('timed', jsonb_build_object('at', %s::float8))", [time.time()]
            )
            time.sleep(EVERY)


@contextlib.contextmanager
def stopped(dsn: str, other: str) -> Iterator[None]:
    """Stop a database: its sessions answer no more, and it takes no new ones."""
    with psycopg.connect(dsn, autocommit=True) as own, psycopg.connect(other) as admin:
        admin.autocommit = True
        name = own.info.dbname
        pids = [
            pid
            for (pid,) in own.execute(
                "select pid from pg_stat_activity where datname = current_database()"
                " and backend_type = 'client backend' and state = 'idle'"
            )
        ]
        admin.execute(f'alter database "{name}" allow_connections false'.encode())
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            own.execute("select queue.defer('timed', '{\"at\": 0}') from generate_series(1, 100)")
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            admin.execute(f'alter database "{name}" allow_connections true'.encode())


class Shop:
    """An app, and what its jobs have noted."""

    def __init__(self, dsn: str) -> None:
        self.app = App(dsn)
        self.count = 0
        self.begun = 0.0
        self.waited: list[float] = []

        @self.app.task(name="noop")
        async def noop(n: int) -> None:  # noqa: ARG001 (every job has an argument)
            self.begun = self.begun or time.time()
            self.count += 1

        @self.app.task(name="timed")
        async def timed(at: float) -> None:
            if at:
                self.waited.append(time.time() - at)


async def until(condition: Callable[[], bool], every: float = 0.01) -> None:
    while not condition():  # noqa: ASYNC110 (the workers tell nobody)
        await asyncio.sleep(every)


def is_registered(worker: Worker | MultiWorker, databases: int) -> bool:
    if isinstance(worker, Worker):
        return worker.id is not None
    return len(worker.workers) == databases and all(
        one.id is not None for one in worker.workers.values()
    )


async def latencies(shop: Shop, dsns: Sequence[str], seconds: float) -> list[dict[str, float]]:
    """Return the times from defer to start with all databases, and with the first one stopped."""
    found = []
    for stop in (False, True):
        with stopped(dsns[0], dsns[1]) if stop else contextlib.nullcontext():
            await asyncio.to_thread(defer_singly, dsns[1 : SAMPLE + 1], seconds)
            await until(lambda: len(shop.waited) == int(seconds / EVERY))
        parts = (0.5, 0.95, 0.99)
        found.append({str(part): 1000 * percentile(shop.waited, part) for part in parts})
        shop.waited.clear()
    return found


async def defer_all(dsns: Sequence[str], jobs: int) -> float:
    """Defer so many jobs to each; return when they become due."""
    at = time.time() + 5 + 0.1 * len(dsns) + jobs * len(dsns) / 4000
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        await asyncio.gather(*(loop.run_in_executor(pool, defer, dsn, jobs, at) for dsn in dsns))
    if time.time() > at:
        sys.exit("the jobs were due before all were deferred: the machine is too busy")
    return at


async def run(dsns: Sequence[str], jobs: int, seconds: float) -> dict[str, object]:
    shop = Shop(dsns[0])
    each = jobs // len(dsns)
    total = each * len(dsns)
    worker = MultiWorker(shop.app, dsns) if len(dsns) > 1 else Worker(shop.app)
    running = asyncio.create_task(worker.run_async())
    started = time.monotonic()
    await until(lambda: is_registered(worker, len(dsns)))
    up = time.monotonic() - started
    await asyncio.sleep(6)
    cpu, before = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    idle = (time.process_time() - cpu) / (time.monotonic() - before)
    held = await asyncio.to_thread(connections, dsns[0])
    waits = await latencies(shop, dsns, seconds) if len(dsns) > 1 else []
    at = await defer_all(dsns, each)
    await until(lambda: shop.count > total // 3, 0.5)
    busy = await asyncio.to_thread(connections, dsns[0])
    await until(lambda: shop.count >= total, 0.5)
    worker.stop()
    await running
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(lambda dsn: ended(dsn, at), dsns))
    assert all(found == each for found, _ in ends), ends
    assert shop.count == total, shop.count
    return {
        "jobs": total,
        "begun": shop.begun,
        "ended": max(end for _, end in ends),
        "up": up,
        "idle": idle,
        "connections": held,
        "busy_connections": busy,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "latencies": waits,
    }


def main(jobs: int, seconds: float) -> None:
    dsns = sys.stdin.read().splitlines()
    print(json.dumps(asyncio.run(run(dsns, jobs, seconds))))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

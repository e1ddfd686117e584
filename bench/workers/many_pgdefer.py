"""One worker process for the databases on standard input: JOBS SECONDS.

It registers everywhere, idles for SECONDS, then runs JOBS no-op jobs, which are due by then, spread
evenly. It prints its connections and CPU time while idle, and when the first job began and the last
one ended. For one database it is the plain worker.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psycopg

from pgdefer import App, MultiWorker
from pgdefer.worker.worker import Worker

CHUNK = 1000


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
        connection.execute("vacuum analyze")


def ended(dsn: str) -> tuple[int, float]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "select count(*), coalesce(extract(epoch from max(finished_at))::float8, 0)"
            " from queue.finished where state = 'succeeded'"
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


async def run(dsns: Sequence[str], jobs: int, seconds: float) -> dict[str, object]:
    app = App(dsns[0])
    count = 0
    begun: list[float] = []

    @app.task(name="noop")
    async def noop(n: int) -> None:  # noqa: ARG001 (every job has an argument)
        nonlocal count
        if not begun:
            begun.append(time.time())
        count += 1

    each = jobs // len(dsns)
    at = time.time() + 20 + 0.5 * len(dsns) + jobs / 2000 + seconds
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda dsn: defer(dsn, each, at), dsns))
    worker = MultiWorker(app, dsns) if len(dsns) > 1 else Worker(app)
    running = asyncio.create_task(worker.run_async())
    started = time.monotonic()

    def registered() -> bool:
        if isinstance(worker, Worker):
            return worker.id is not None
        return len(worker.workers) == len(dsns) and all(
            one.id is not None for one in worker.workers.values()
        )

    while not registered():  # noqa: ASYNC110 (the workers tell nobody)
        await asyncio.sleep(0.02)
    up = time.monotonic() - started
    await asyncio.sleep(6)
    cpu, before = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    idle = (time.process_time() - cpu) / (time.monotonic() - before)
    held = await asyncio.to_thread(connections, dsns[0])
    assert time.time() < at, "the jobs were due before all workers had idled: it needs more time"
    busy = 0
    while worker.finished < each * len(dsns):
        await asyncio.sleep(0.5)
        if worker.finished > each * len(dsns) // 3 and not busy:
            busy = await asyncio.to_thread(connections, dsns[0])
    worker.stop()
    await running
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(ended, dsns))
    assert all(found == each for found, _ in ends), ends
    assert count == each * len(dsns), count
    return {
        "jobs": count,
        "begun": begun[0],
        "ended": max(end for _, end in ends),
        "up": up,
        "idle": idle,
        "connections": held,
        "busy_connections": busy,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main(jobs: int, seconds: float) -> None:
    dsns = sys.stdin.read().splitlines()
    print(json.dumps(asyncio.run(run(dsns, jobs, seconds))))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

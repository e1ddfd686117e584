"""One worker process for the databases on the first line of standard input: JOBS SECONDS.

Each further line is a command, and each is answered by one line of JSON:

- `idle`: be idle for SECONDS; its connections, and CPU time in that time.
- `single`: take single jobs of some databases for SECONDS, and again while the first database is
  stopped; the times from a job's defer to its start.
- `drain`: run JOBS no-op jobs, spread evenly, which become due together; when the first one began
  and the last one ended.

For one database it is the plain worker.
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
from psycopg.conninfo import conninfo_to_dict

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


async def reported(dsn: str, jobs: int, at: float) -> float:
    """Wait until all jobs that became due then have ended; return when the last one did."""
    while True:
        found, last = await asyncio.to_thread(ended, dsn, at)
        if found == jobs:
            return last


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


def connections(dsns: Sequence[str]) -> float:
    """Return how many sessions each database has."""
    names = [conninfo_to_dict(dsn)["dbname"] for dsn in dsns]
    with psycopg.connect(dsns[0], autocommit=True) as connection:
        row = connection.execute(
            "select count(*) from pg_stat_activity where backend_type = 'client backend'"
            " and pid <> pg_backend_pid() and datname = any(%s)",
            [names],
        ).fetchone()
    assert row is not None
    return float(row[0] / len(dsns))


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
    at = time.time() + 2 + 0.04 * len(dsns) + jobs * len(dsns) / 5000
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        await asyncio.gather(*(loop.run_in_executor(pool, defer, dsn, jobs, at) for dsn in dsns))
    if time.time() > at:
        sys.exit("the jobs were due before all were deferred: the machine is too busy")
    return at


async def idle(dsns: Sequence[str], seconds: float) -> dict[str, object]:
    """Return what an idle worker uses."""
    await asyncio.sleep(6)
    cpu, before = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    used = (time.process_time() - cpu) / (time.monotonic() - before)
    held = await asyncio.to_thread(connections, dsns)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"idle": used, "connections": held, "memory": memory}


async def drain(shop: Shop, dsns: Sequence[str], jobs: int) -> dict[str, object]:
    """Run jobs, and return how many a second."""
    shop.begun, shop.count = 0.0, 0
    each = jobs // len(dsns)
    total = each * len(dsns)
    at = await defer_all(dsns, each)
    await until(lambda: shop.count > total // 3, 0.5)
    busy = await asyncio.to_thread(connections, dsns)
    await until(lambda: shop.count >= total, 0.5)
    # The last outcomes are on their way.
    ends = [await reported(dsn, each, at) for dsn in dsns]
    assert shop.count == total, shop.count
    return {"rate": total / (max(ends) - shop.begun), "connections": busy}


async def run(dsns: Sequence[str], jobs: int, seconds: float) -> None:
    shop = Shop(dsns[0])
    worker = MultiWorker(shop.app, dsns) if len(dsns) > 1 else Worker(shop.app)
    running = asyncio.create_task(worker.run_async())
    started = time.monotonic()
    await until(lambda: is_registered(worker, len(dsns)))
    print(json.dumps({"up": time.monotonic() - started}), flush=True)
    while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
        found: object
        match command:
            case "idle":
                found = await idle(dsns, seconds)
            case "single":
                found = await latencies(shop, dsns, seconds)
            case "drain":
                found = await drain(shop, dsns, jobs)
            case _:
                sys.exit(f"there is no command {command!r}")
        print(json.dumps(found), flush=True)
    worker.stop()
    await running


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.stdin.readline()), int(sys.argv[1]), float(sys.argv[2])))

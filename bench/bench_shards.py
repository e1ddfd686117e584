#!/usr/bin/env python3
"""What a shard key costs a defer; and three shards beside one, each a server with a limit on its CPU.

    bench/bench_shards.py [--runs N] [--seconds N] [--cores N] [--pin] [--check] [--only price|shards]

The price: queue.shard_defer beside queue.defer_many with one job and its headers, by pgbench, with 1
and 8 clients, keys of many slots and one single key.

The shards: servers of their own, each with --cores of CPU time in a control group (Linux, as root),
since this machine has too few cores for each to have one. So this shows what the shards' servers can
do, not the network or a disk of each. One producer and one worker for each shard defer and run
batches of 100 jobs, each with its key as lock; their own CPU time is not limited.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
from common import SETTINGS, Case, Report, alternate, arguments, bench, processes_of

from pgdefer import App
from pgdefer.contrib.cluster import Cluster, shard_of
from pgdefer.database.embedded import EmbeddedServer, temporary_server
from support import add_shards, create_database, install

BATCH = 100
PERIOD = 10_000  # us: short, so that a limit works evenly
PLAIN = """\\set n random(1, 100000)
select queue.defer_many('[{"task": "noop", "options": {"headers": {"shard_key": "a"}}}]')
"""
KEYS = """\\set n random(1, 100000)
select queue.shard_defer(:n::text, 'noop')
"""
ONE = """\\set n random(1, 100000)
select queue.shard_defer('a', 'noop')
"""


def price(options: argparse.Namespace) -> None:
    with bench(options) as on:

        def rate(script: str, clients: int) -> float:
            with on.fresh("ours") as name:
                add_shards(on.server.dsn(name))
                with on.connect(name) as connection:
                    connection.execute("update queue.shard_slot set shard = 'a', is_plain = true")
                on.settle(name)
                return on.pgbench(name, script, clients=clients, seconds=options.seconds)

        def case(name: str, script: str, clients: int) -> Case:
            mine, plain = (lambda: rate(script, clients)), (lambda: rate(PLAIN, clients))
            return Case(f"{name}, {clients} clients", mine, plain, None)

        cases = [
            case(name, script, clients)
            for clients in (1, 8)
            for name, script in (("many keys", KEYS), ("one key", ONE))
        ]
        alternate(cases, options, "queue.shard_defer", "queue.defer_many")


@contextlib.contextmanager
def limited(server: EmbeddedServer, cores: float) -> Iterator[None]:
    """Let a server's processes have so much CPU time in all."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    name = f"pgdefer-bench-{os.getpid()}-{server.folder.name}"
    group = (first if first.is_dir() else second) / name
    group.mkdir()
    try:
        quota = int(cores * PERIOD)
        if first.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        pid = server.status().pid
        assert pid is not None
        (group / "cgroup.procs").write_text(str(pid))
        for process in processes_of(pid):
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(process))
        yield
    finally:
        server.stop("immediate")
        group.rmdir()


def produce(dsn: str, keys: list[str], stop: threading.Event) -> None:
    """Defer batches, a thousand jobs ahead of the worker at most."""
    jobs = [{"task": "noop", "shard_key": key, "lock": key} for key in keys[:BATCH]]
    text = json.dumps(jobs)
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not stop.is_set():
            connection.execute("select count(*) from queue.shard_defer_many(%s)", [text])
            waiting = "select count(*) from queue.lock_member"
            while not stop.is_set() and connection.execute(waiting).fetchone() > (10 * BATCH,):
                time.sleep(0.01)


def work(dsn: str, done: list[int], stop: threading.Event) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        ((worker,),) = connection.execute("select queue.register_worker('w')").fetchall()
        outcomes = "[]"
        while not stop.is_set():
            fetched = connection.execute(
                "select id, claim from queue.finish_and_fetch(%s, %s, null, %s) where error is null",
                [worker, outcomes, BATCH],
            ).fetchall()
            outcomes = json.dumps(
                [{"id": id, "claim": claim, "outcome": "succeeded"} for id, claim in fetched]
            )
            done.append(len(fetched))
            if not fetched:
                time.sleep(0.005)


def rate_of(count: int, options: argparse.Namespace) -> float:
    """Return the jobs a second that so many shards run."""
    names = [f"shard {n}" for n in range(count)]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(temporary_server(settings=SETTINGS | {"shared_buffers": "128MB"}))
            for _ in names
        ]
        for server in servers:
            create_database(server, "shard")
            install(server, "shard")
        dsns = [server.dsn("shard") for server in servers]
        Cluster.create(App(), dict(zip(names, dsns, strict=True))).close()
        for server in servers:
            stack.enter_context(limited(server, options.cores))
        stop, done = threading.Event(), list[int]()
        threads = []
        for number, dsn in enumerate(dsns):
            keys = [key for key in map(str, range(5000)) if shard_of(key) * count // 1024 == number]
            threads.append(threading.Thread(target=produce, args=(dsn, keys, stop)))
            threads.append(threading.Thread(target=work, args=(dsn, done, stop)))
        for thread in threads:
            thread.start()
        time.sleep(2)  # to warm up
        before, began = sum(done), time.monotonic()
        time.sleep(options.seconds)
        found = (sum(done) - before) / (time.monotonic() - began)
        stop.set()
        for thread in threads:
            thread.join()
    return found


def shards(options: argparse.Namespace) -> None:
    print(f"{options.cores:g} cores for each server, in a control group")
    report = Report()
    report.heading("three shards", "one")
    three, one = [], []
    for _ in range(options.runs):
        three.append(rate_of(3, options))
        one.append(rate_of(1, options))
    report.compare("jobs deferred and run, with locks", three, one, 2.5)
    report.end(options)


def main() -> None:
    parser = arguments(__doc__, runs=3)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--cores", type=float, default=0.3)
    options = parser.parse_args()
    only, options.only = options.only, ""
    if only in ("", "price"):
        price(options)
    if only in ("", "shards"):
        if not os.access("/sys/fs/cgroup", os.W_OK):
            sys.exit("three shards: no control groups here, so no limits on CPU")
        shards(options)


if __name__ == "__main__":
    main()

"""Celery on Redis. Best: prefetch 128 for short tasks, no results, gossip or heartbeats (its guide Optimizing); for
waiting handlers 20 threads. Default: a process for each core, prefetch 4. It has no call that sends many.
"""

from __future__ import annotations

import json
import sys

from celery import Celery
from celery.signals import worker_process_init
from peer import Producer, Ran, drive

app = Celery("peer_celery", broker=sys.argv[2])
app.conf.update(
    worker_redirect_stdouts=False, worker_hijack_root_logger=False, task_ignore_result=True
)
ran: list[Ran] = []


@app.task(name="noop")
def noop(n: int, at: float | None = None) -> None:  # noqa: ARG001 (every job has an argument)
    ran[0].run_sync(at)


@worker_process_init.connect
def forked(**_: object) -> None:
    """Count in the process that runs jobs, whose threads a fork has not copied."""
    ran[:] = [Ran(json.loads(sys.argv[3])["kind"])]


async def producer(_: str) -> Producer:
    pool = app.producer_pool.acquire(block=True)
    return Producer(lambda args: noop.apply_async(kwargs=args, producer=pool))


def work(_: str, own: Ran, setting: str) -> None:
    options = json.loads(sys.argv[3])
    ran.append(own)
    command = ["worker", "--loglevel", "ERROR"]
    if setting == "best":
        command += ["--prefetch-multiplier", "128"]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        if options["kind"] == "sleep":
            command += ["--pool", "threads", "--concurrency", "20"]
    if options["processes"] > 1:
        command += ["--concurrency", str(options["processes"])]
    app.worker_main(command)


drive(lambda _: None, producer, work)

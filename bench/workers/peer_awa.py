"""awa-pg. Best: max_workers 1024, claims of 512, as its benchmarking.md has it; default: 50 workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import awa
from peer import Producer, Ran, drive


@dataclasses.dataclass
class Noop:
    n: int
    at: float | None = None


async def install(dsn: str) -> None:
    await awa.migrate(dsn)
    client = awa.AsyncClient(dsn)
    client.task(Noop, queue="default")(print)
    await client.start([("default", 1)])  # which switches the empty database to its queue storage
    while json.loads(await client.storage_status())["state"] != "active":  # noqa: ASYNC110 (it tells nobody)
        await asyncio.sleep(0.05)
    await client.shutdown()


async def producer(dsn: str) -> Producer:
    client = awa.AsyncClient(dsn)
    return Producer(
        lambda args: client.insert(Noop(**args)),
        lambda jobs: client.enqueue_many_copy([Noop(**args) for args in jobs]),
    )


async def work(dsn: str, ran: Ran, setting: str) -> None:
    client = awa.AsyncClient(dsn)

    @client.task(Noop, queue="default")
    async def noop(job: awa.Job) -> None:
        await ran.run(job.args.at)

    best = {"name": "default", "max_workers": 1024, "claim_batch_size": 512}
    await client.start([best] if setting == "best" else [("default", 50)])
    await asyncio.Event().wait()


drive(install, producer, work)

"""pgqueuer on asyncpg and uvloop, its fastest driver. Best: batches of 100, by measurement; default: 10."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import uvloop
from peer import Args, Producer, Ran, drive
from pgqueuer import PgQueuer
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.queries import Queries

uvloop.install()


async def connect(dsn: str) -> asyncpg.Connection[Any]:
    return await asyncpg.connect(dsn)


async def install(dsn: str) -> None:
    await Queries(AsyncpgDriver(await connect(dsn))).install()


async def producer(dsn: str) -> Producer:
    queries = Queries(AsyncpgDriver(await connect(dsn)))

    def payload(args: Args) -> bytes:
        return json.dumps(args).encode()

    return Producer(
        lambda args: queries.enqueue("noop", payload(args)),
        lambda jobs: queries.enqueue(["noop"] * len(jobs), [*map(payload, jobs)], [0] * len(jobs)),
    )


async def work(dsn: str, ran: Ran, setting: str) -> None:
    app = PgQueuer.from_asyncpg_connection(await connect(dsn))

    @app.entrypoint("noop")
    async def noop(job: Any) -> None:
        await ran.run(json.loads(job.payload)["at"])

    await app.run(batch_size=100 if setting == "best" else 10)


drive(install, producer, work)

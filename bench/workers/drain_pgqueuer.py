"""Drains no-op jobs with one worker of pgqueuer on asyncpg: DSN JOBS BATCH."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import asyncpg
import psycopg
from pgqueuer import PgQueuer
from pgqueuer.adapters.drivers.psycopg import SyncPsycopgDriver
from pgqueuer.queries import Queries, SyncQueries
from pgqueuer.types import QueueExecutionMode
from psycopg.conninfo import conninfo_to_dict


async def connect(dsn: str) -> asyncpg.Connection[Any]:
    given = conninfo_to_dict(dsn)
    return await asyncpg.connect(
        host=given["host"], user=given["user"], database=given["dbname"], port=5432
    )


async def setup(dsn: str) -> None:
    connection = await connect(dsn)
    await Queries(PgQueuer.from_asyncpg_connection(connection).connection).install()
    await connection.close()


async def drain(dsn: str, batch: int, begun: list[float]) -> None:
    connection = await connect(dsn)
    app = PgQueuer.from_asyncpg_connection(connection)

    @app.entrypoint("noop")
    async def noop(job: Any) -> None:
        json.loads(job.payload)
        if not begun:
            begun.append(time.time())

    await app.run(batch_size=batch, mode=QueueExecutionMode.drain)
    await connection.close()


def main(dsn: str, jobs: int, batch: int) -> None:
    asyncio.run(setup(dsn))
    begun: list[float] = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        payloads: list[bytes | None] = [json.dumps({"n": n}).encode() for n in range(jobs)]
        queries = SyncQueries(SyncPsycopgDriver(connection))
        for first in range(0, jobs, 10_000):
            some = payloads[first : first + 10_000]
            queries.enqueue(["noop"] * len(some), some, [0] * len(some))
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")
        asyncio.run(drain(dsn, batch, begun))
        row = connection.execute(
            "select count(*), extract(epoch from max(created))::float8 from pgqueuer_log"
            " where status = 'successful'"
        ).fetchone()
    assert row is not None
    assert row[0] == jobs, row
    print(json.dumps({"begun": begun[0], "ended": row[1]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

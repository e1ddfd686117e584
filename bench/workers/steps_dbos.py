"""Runs workflows of many steps in one process of DBOS: DSN JOBS STEPS CONCURRENCY.

They are started without one of its queues, which would poll for them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import psycopg
import psycopg.conninfo
import sqlalchemy as sa
from dbos import DBOS


def main(dsn: str, jobs: int, steps: int, concurrency: int) -> None:
    of = psycopg.conninfo.conninfo_to_dict(dsn)
    url = sa.URL.create(
        "postgresql+psycopg",
        username=str(of["user"]),
        database=str(of["dbname"]),
        query={"host": str(of["host"])},
    )
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url.render_as_string(hide_password=False),
            "sys_db_pool_size": max(concurrency, 4),
            "log_level": "ERROR",
        }
    )

    @DBOS.step()
    async def step(n: int) -> int:
        return n

    @DBOS.workflow()
    async def run(n: int) -> None:
        for _ in range(steps):
            await step(n)

    async def run_all() -> tuple[float, float]:
        slots = asyncio.Semaphore(concurrency)

        async def run_one(n: int) -> None:
            async with slots:
                await run(n)

        begun = time.time()
        await asyncio.gather(*(run_one(n) for n in range(jobs)))
        return begun, time.time()

    DBOS.launch()
    begun, ended = asyncio.run(run_all())
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "select (select count(*) from dbos.workflow_status where status = 'SUCCESS'),"
            "  (select count(*) from dbos.operation_outputs)"
        ).fetchone()
    DBOS.destroy()
    assert row == (jobs, jobs * steps), row
    print(json.dumps({"begun": begun, "ended": ended}))


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))

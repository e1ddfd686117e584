"""Runs tasks of many steps with one worker of Absurd: DSN JOBS STEPS CONCURRENCY."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import absurdctl
import psycopg
from absurd_sdk import AsyncAbsurd


async def main(dsn: str, jobs: int, steps: int, concurrency: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(absurdctl.BUNDLED_SCHEMA_SQL.encode())
    app = AsyncAbsurd(dsn)
    await app.create_queue()
    begun: list[float] = []
    ended = 0

    @app.register_task(name="steps")
    async def run(params: Any, context: Any) -> None:
        nonlocal ended
        if not begun:
            begun.append(time.time())

        async def step() -> int:
            return params["n"]

        for _ in range(steps):
            await context.step("step", step)
        ended += 1
        if ended == jobs:
            app.stop_worker()

    for n in range(jobs):
        await app.spawn("steps", {"n": n})
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")
        await app.start_worker(concurrency=concurrency, claim_timeout=3600)
        await app.close()
        row = connection.execute(
            "select count(*), extract(epoch from max(completed_at))::float8,"
            "  (select count(*) from absurd.c_default)"
            " from absurd.r_default where state = 'completed'"
        ).fetchone()
    assert (row[0], row[2]) == (jobs, jobs * steps), row
    print(json.dumps({"begun": begun[0], "ended": row[1]}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *(int(number) for number in sys.argv[2:])))

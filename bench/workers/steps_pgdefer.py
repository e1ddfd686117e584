"""Runs jobs of many steps with one worker of pgdefer: DSN JOBS STEPS CONCURRENCY."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import psycopg

from pgdefer import App, current_job
from pgdefer.worker.worker import Worker


def main(dsn: str, jobs: int, steps: int, concurrency: int) -> None:
    app = App(dsn)
    begun: list[float] = []

    async def step(n: int) -> int:
        return n

    @app.task(name="steps")
    async def run(n: int) -> None:
        if not begun:
            begun.append(time.time())
        job = current_job()
        for _ in range(steps):
            await job.step_async("step", step, n)

    with psycopg.connect(dsn, autocommit=True) as connection:
        calls = [{"task": "steps", "args": {"n": n}} for n in range(jobs)]
        connection.execute("select count(*) from queue.defer_many(%s)", [json.dumps(calls)])
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")
        asyncio.run(Worker(app, drain=True, concurrency=concurrency).run_async())
        row = connection.execute(
            "select count(*), extract(epoch from max(finished_at))::float8,"
            "  (select count(*) from queue.step where finished_at is not null)"
            " from queue.finished where state = 'succeeded'"
        ).fetchone()
    assert row is not None
    assert (row[0], row[2]) == (jobs, jobs * steps), row
    print(json.dumps({"begun": begun[0], "ended": row[1]}))


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))

"""Drains no-op jobs with one worker of pgdefer: DSN JOBS CONCURRENCY [TELEMETRY...]."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib import import_module

import psycopg

from pgdefer import App
from pgdefer.worker.worker import Worker


def main(dsn: str, jobs: int, concurrency: int | None, telemetry: list[str]) -> None:
    app = App(dsn)
    if telemetry:
        import_module("telemetry").instrument(app, telemetry)
    begun: list[float] = []
    count = 0

    @app.task(name="noop")
    async def noop(n: int) -> None:  # noqa: ARG001 (every job has an argument)
        nonlocal count
        if not begun:
            begun.append(time.time())
        count += 1

    with psycopg.connect(dsn, autocommit=True) as connection:
        for first in range(0, jobs, 1000):
            slice_ = [
                {"task": "noop", "args": {"n": n}} for n in range(first, min(first + 1000, jobs))
            ]
            connection.execute("select count(*) from queue.defer_many(%s)", [json.dumps(slice_)])
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")
        chosen = {} if concurrency is None else {"concurrency": concurrency}
        asyncio.run(Worker(app, drain=True, **chosen).run_async())
        row = connection.execute(
            "select count(*), extract(epoch from max(finished_at))::float8 from queue.finished"
            " where state = 'succeeded'"
        ).fetchone()
    assert row is not None
    assert row[0] == jobs == count, (row, count)
    print(json.dumps({"begun": begun[0], "ended": row[1]}))


if __name__ == "__main__":
    setting = None if sys.argv[3] == "default" else int(sys.argv[3])
    main(sys.argv[1], int(sys.argv[2]), setting, sys.argv[4:])

"""Drains jobs with one worker, which compute for some time: DSN JOBS MILLISECONDS [TELEMETRY...]."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib import import_module

import psycopg

from pgdefer import App
from pgdefer.worker.worker import Worker


def main(dsn: str, jobs: int, milliseconds: float, telemetry: list[str]) -> None:
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
        if milliseconds:
            until = time.perf_counter() + milliseconds / 1000
            while time.perf_counter() < until:
                pass

    with psycopg.connect(dsn, autocommit=True) as connection:
        for first in range(0, jobs, 1000):
            slice_ = [
                {"task": "noop", "args": {"n": n}} for n in range(first, min(first + 1000, jobs))
            ]
            connection.execute("select count(*) from queue.defer_many(%s)", [json.dumps(slice_)])
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")
        before = time.process_time()
        asyncio.run(Worker(app, drain=True).run_async())
        cpu = time.process_time() - before
        row = connection.execute(
            "select count(*), extract(epoch from max(finished_at))::float8 from queue.finished"
            " where state = 'succeeded'"
        ).fetchone()
    assert row is not None
    assert row[0] == jobs == count, (row, count)
    print(json.dumps({"begun": begun[0], "ended": row[1], "cpu": cpu}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])

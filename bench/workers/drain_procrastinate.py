"""Drains no-op jobs with one worker of Procrastinate: DSN JOBS CONCURRENCY."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import procrastinate
import psycopg


def main(dsn: str, jobs: int, concurrency: int) -> None:
    setup = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=dsn))
    with setup.open():
        setup.schema_manager.apply_schema()
    size = max(concurrency, 4)
    connector = procrastinate.PsycopgConnector(conninfo=dsn, min_size=1, max_size=size)
    app = procrastinate.App(connector=connector)
    begun: list[float] = []

    @app.task(name="noop")
    async def noop(n: int) -> None:  # noqa: ARG001 (every job has an argument)
        if not begun:
            begun.append(time.time())

    async def drain() -> None:
        async with app.open_async():
            await app.run_worker_async(
                concurrency=concurrency, wait=False, install_signal_handlers=False
            )

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "select count(*) from unnest(procrastinate_defer_jobs_v1(array("
            " select row('default', 'noop', 0, null, null, jsonb_build_object('n', g), null)"
            "   ::procrastinate_job_to_defer_v1"
            " from generate_series(1, %s) g)))",
            [jobs],
        )
        connection.execute("vacuum analyze")
        connection.execute("checkpoint")
        asyncio.run(drain())
        row = connection.execute(
            "select count(*), extract(epoch from max(at))::float8 from procrastinate_events"
            " where type = 'succeeded'"
        ).fetchone()
    assert row is not None
    assert row[0] == jobs, row
    print(json.dumps({"begun": begun[0], "ended": row[1]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

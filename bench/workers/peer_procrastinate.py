"""Procrastinate. Best: concurrency 10, one connection each, by measurement; more is slower. Default: 1."""

from __future__ import annotations

import procrastinate
from peer import Producer, Ran, drive


def app_with(connector: procrastinate.BaseConnector, ran: Ran) -> procrastinate.App:
    app = procrastinate.App(connector=connector)

    @app.task(name="noop")
    async def noop(n: int, at: float | None = None) -> None:  # noqa: ARG001 (every job has an argument)
        await ran.run(at)

    return app


def install(dsn: str) -> None:
    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=dsn))
    with app.open():
        app.schema_manager.apply_schema()


async def producer(dsn: str) -> Producer:
    app = app_with(procrastinate.SyncPsycopgConnector(conninfo=dsn), Ran("noop"))
    app.open()
    task = app.tasks["noop"]
    return Producer(lambda args: task.defer(**args), lambda jobs: task.batch_defer(*jobs))


async def work(dsn: str, ran: Ran, setting: str) -> None:
    concurrency = 10 if setting == "best" else 1
    app = app_with(procrastinate.PsycopgConnector(conninfo=dsn, max_size=10), ran)
    async with app.open_async():
        await app.run_worker_async(concurrency=concurrency)


drive(install, producer, work)

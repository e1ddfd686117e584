"""pgdefer. Best: concurrency 200, for handlers that wait little (docs/python.md); default: 20."""

from __future__ import annotations

import gc

import psycopg
from peer import Producer, Ran, drive

from pgdefer import App
from pgdefer.worker.worker import Worker


def app_with(dsn: str, ran: Ran) -> App:
    app = App(dsn)

    @app.task(name="noop")
    async def noop(n: int, at: float | None = None) -> None:  # noqa: ARG001 (every job has an argument)
        await ran.run(at)

    return app


def install(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select queue.register_task('noop', '{}')")


async def producer(dsn: str) -> Producer:
    task = app_with(dsn, Ran("noop")).tasks["noop"]
    return Producer(lambda args: task.defer(**args), task.defer_many)


async def work(dsn: str, ran: Ran, setting: str) -> None:
    gc.collect()  # as `pgdefer worker` does
    gc.freeze()
    await Worker(
        app_with(dsn, ran), **({"concurrency": 200} if setting == "best" else {})
    ).run_async()


drive(install, producer, work)

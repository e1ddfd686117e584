"""absurd-sdk. Best: the async worker, concurrency 20, by measurement (its docs advise more processes only); default: 1.

It polls, each 0.25 s by default, each 0.02 s at best. It has no call that spawns many.
"""

from __future__ import annotations

import absurdctl
import psycopg
from absurd_sdk import Absurd, AsyncAbsurd
from peer import Producer, Ran, drive


def install(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
    Absurd(dsn).create_queue("default")


async def producer(dsn: str) -> Producer:
    app = Absurd(dsn)
    return Producer(lambda args: app.spawn("noop", args, queue="default"))


async def work(dsn: str, ran: Ran, setting: str) -> None:
    app = AsyncAbsurd(dsn)

    @app.register_task(name="noop")
    async def noop(params: dict[str, float | None], context: object) -> None:  # noqa: ARG001
        await ran.run(params["at"])

    await app.start_worker(
        **({"concurrency": 20, "poll_interval": 0.02} if setting == "best" else {})
    )


drive(install, producer, work)

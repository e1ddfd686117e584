"""A bare table with NOTIFY: what every queue on PostgreSQL needs from sending a job to its start, and no more."""

from __future__ import annotations

import psycopg
from peer import Args, Producer, Ran, drive
from psycopg.types.json import Jsonb

TABLE = "create table q (id bigint generated always as identity primary key, args jsonb not null)"
SEND = "with sent as (insert into q (args) values (%s)) select pg_notify('q', '')"
CLAIM = """
delete from q using (select id from q order by id for update skip locked limit 1) c where q.id = c.id
returning q.args
"""


async def connect(dsn: str) -> psycopg.AsyncConnection:
    return await psycopg.AsyncConnection.connect(dsn, autocommit=True)


async def install(dsn: str) -> None:
    await (await connect(dsn)).execute(TABLE)


async def producer(dsn: str) -> Producer:
    connection = await connect(dsn)

    async def send(args: Args) -> None:
        await connection.execute(SEND, [Jsonb(args)])

    return Producer(send)


async def work(dsn: str, ran: Ran, setting: str) -> None:  # noqa: ARG001 (there is nothing to set)
    connection, listener = await connect(dsn), await connect(dsn)
    await listener.execute("listen q")
    async for _ in listener.notifies():
        while row := await (await connection.execute(CLAIM)).fetchone():
            await ran.run(row[0]["at"])


drive(install, producer, work)

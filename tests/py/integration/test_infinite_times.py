"""Moments that Python's datetime can't hold: they do not break a worker."""

from __future__ import annotations

import datetime as dt
from typing import Any

import psycopg
import pytest

from pgdefer import App, current_job
from pgdefer.database.source import FIRST, LAST, Source

from .conftest import running, until

PsycopgConnection = psycopg.Connection[Any]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("moment", "found"),
    [
        ("infinity", LAST),
        ("-infinity", FIRST),
        ("20000-01-01", LAST),
        ("0044-03-15 BC", FIRST),
        ("9999-12-30 00:00+00", LAST - dt.timedelta(days=1)),
        ("2026-01-02 03:04:05.678+00", dt.datetime(2026, 1, 2, 3, 4, 5, 678000, dt.UTC)),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago"])
def test_it_is_read(dsn: str, moment: str, found: dt.datetime, binary: bool, zone: str) -> None:
    with Source(dsn).connect() as connection, connection.cursor(binary=binary) as cursor:
        cursor.execute(f"set timezone = '{zone}'")
        cursor.execute(f"select timestamptz '{moment}', null::timestamptz")
        assert cursor.fetchone() == (found, None)


async def test_a_worker_goes_on(app: App, conn: PsycopgConnection) -> None:
    seen = []

    @app.task(name="t")
    async def task() -> None:
        seen.append(current_job().deadline)

    conn.execute("select queue.defer('t', deadline => 'infinity')")
    async with running(app):
        await until(lambda: set(jobs_states(conn)) == {"succeeded"})
    assert seen == [None]


def jobs_states(conn: PsycopgConnection) -> list[str]:
    """Not by the fixture `jobs`, whose connection can't read these deadlines."""
    return [row[0] for row in conn.execute("select state from queue.jobs order by id")]

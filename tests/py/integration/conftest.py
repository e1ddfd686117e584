"""Code common to the tests of workers."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
import typer.testing
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from pgdefer import App
from pgdefer.database.embedded import EmbeddedServer
from support import create_database, url_of
from workers import running as running
from workers import until as until
from workers import wait_for as wait_for

from .worker_program import program as program

# A test runs many commands in its process: typer would build all sixty anew for each.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]


@pytest.fixture
def engine(dsn: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url_of(dsn))
    yield engine
    engine.dispose()


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    app = App(dsn)
    yield app
    app.close()


@pytest.fixture
def hangup_is_not_ignored() -> Iterator[None]:
    """Start programs that notice SIGHUP, even where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def give_up(conn: psycopg.Connection[Any]) -> None:
    """Make all workers dead."""
    with conn.transaction():  # otherwise a heartbeat comes between
        conn.execute(
            "update queue.worker set last_seen_at = last_seen_at - interval '1 h', dead_after = '0'"
        )
        conn.execute("select queue.reap()")


class Jobs:
    """queue.jobs, seen over one connection."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._cursor = conn.cursor(row_factory=dict_row)

    def __call__(self) -> list[dict[str, Any]]:
        return self._cursor.execute("select * from queue.jobs order by id").fetchall()

    def states(self) -> dict[int, str]:
        return {row["id"]: row["state"] for row in self()}

    def attempts(self) -> list[dict[str, Any]]:
        """All but those that never started: a slow worker gives back what it has claimed ahead."""
        return self._cursor.execute(
            "select * from queue.attempts where outcome <> 'released' or details is not null"
            " order by job_id, claim"
        ).fetchall()

    async def end(self, *ids: int, seconds: float = 300.0) -> list[dict[str, Any]]:
        """Wait until these jobs, or all, have ended, and return them."""

        def ended() -> list[dict[str, Any]] | None:
            rows = [row for row in self() if not ids or row["id"] in ids]
            final = ("succeeded", "failed", "cancelled")
            return rows if all(row["state"] in final for row in rows) else None

        found: list[dict[str, Any]] = await until(ended, seconds)
        return found


@pytest.fixture
def jobs(conn: psycopg.Connection[Any]) -> Jobs:
    return Jobs(conn)


@pytest.fixture(params=["async", "sync"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Whether a handler is a coroutine: a test that asks runs with both."""
    return bool(request.param == "async")


def steps(conn: psycopg.Connection[Any], id: int) -> dict[str, Any]:
    """Return the finished steps of a job."""
    query = "select name, value from queue.steps where job_id = %s"
    return dict(conn.execute(query, [id]).fetchall())


class Program:
    """Workers in processes of a program, whose handlers wait until the file `release` exists."""

    def __init__(self, text: str, dsn: str, folder: Path) -> None:
        self.release = folder / "release"
        self._ran, self._path = folder / "ran", folder / "program.py"
        text = text.format(dsn=dsn, ran=str(self._ran), release=str(self.release))
        self._path.write_text(text)
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *, lines: int = 0, **options: Any) -> subprocess.Popen[str]:
        """Start a worker; wait until handlers have written so many lines."""
        command = [sys.executable, str(self._path), json.dumps(options)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._started.append(process)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(lines)] == ["started\n"] * lines
        return process

    def ran(self) -> list[int]:
        """Return the numbers that handlers have noted."""
        return list(map(int, self._ran.read_text().split()))

    def close(self) -> None:
        """Kill the workers."""
        for process in self._started:
            process.kill()
            process.communicate()


class Tenants:
    """Databases of the tests' server, each with the queue installed."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self._names: list[str] = []

    def new(self, name: str, *, template: str = "pgdefer_base") -> str:
        create_database(self.server, name, template)
        self._names.append(name)
        return self.dsn(name)

    def dsn(self, name: str) -> str:
        return make_conninfo(self.server.dsn(name))

    def connections(self) -> int:
        """Return how many there are to tenants' databases."""
        with psycopg.connect(self.server.dsn("postgres"), autocommit=True) as connection:
            row = connection.execute(
                "select count(*) from pg_stat_activity where datname like 'tenant_%'"
            ).fetchone()
        assert row is not None
        return int(row[0])

    def close(self) -> None:
        with psycopg.connect(self.server.dsn("postgres"), autocommit=True) as connection:
            for name in self._names:
                connection.execute(
                    sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
                )


@pytest.fixture
def tenants(server: EmbeddedServer, dsn: str) -> Iterator[Tenants]:
    found = Tenants(server)
    yield found
    found.close()


@pytest.fixture
def dsns(tenants: Tenants) -> list[str]:
    return [tenants.new(f"tenant_{letter}") for letter in "abc"]

"""Databases in encodings other than UTF8: every outcome is stored, as well as possible."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from pgdefer import App, Retry, RetryLater, current_job
from pgdefer.database.embedded import EmbeddedServer
from support import install, install_as, server_program

pytestmark = pytest.mark.client


@pytest.fixture(params=["SQL_ASCII", "LATIN1"])
def encoding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def database(server: EmbeddedServer, encoding: str) -> Iterator[str]:
    """A database in that encoding with pgdefer installed."""
    name = f"in_{encoding}".lower()
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute(
            sql.SQL("create database {} template template0 encoding {} locale 'C'").format(
                sql.Identifier(name), sql.Literal(encoding)
            )
        )
        install(server, name)
        yield server.dsn(name)
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def test_outcomes(database: str, encoding: str) -> None:
    app = App(database)

    @app.task(name="fails")
    def fails() -> None:
        raise ValueError("é → 5 €")

    @app.task(name="returns")
    def returns(text: str) -> str:
        return {"e": "é", "euro": "5 €"}[text]

    runs = []

    @app.task(name="yields", retry=Retry(None))
    def yields() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise RetryLater("é → €")

    @app.task(name="in a transaction", transactional=True)
    def in_transaction(connection: psycopg.Connection[Any]) -> str:
        connection.execute("select 1")
        return "5 €"

    app.defer("fails")
    app.defer("returns", {"text": "e"})
    app.defer("returns", {"text": "euro"})
    app.defer("yields")
    app.defer("in a transaction")
    app.run_worker(drain=True)
    app.close()
    with psycopg.connect(database, autocommit=True, row_factory=dict_row) as connection:
        connection.execute("set client_encoding = 'UTF8'")
        shown = connection.execute("select * from queue.jobs order by id").fetchall()
        yielded = connection.execute(
            "select error from queue.attempts where outcome = 'yielded'"
        ).fetchone()
        assert connection.execute("select * from queue.check()").fetchall() == []
    is_lossless = encoding == "SQL_ASCII"
    assert shown[0]["state"] == "failed"
    assert shown[0]["error"] == (
        "ValueError: é → 5 €" if is_lossless else r"ValueError: é \u2192 5 \u20ac"
    )
    assert [row["state"] for row in shown[1:4]] == ["succeeded"] * 3
    assert shown[1]["result"] == "é"
    # a result is unchanged, or there is none
    note = {"__pgdefer__": "unencodable", "value": "JSON, which this database can't hold"}
    assert shown[2]["result"] == ("5 €" if is_lossless else note)
    assert yielded == {"error": "é → €" if is_lossless else r"é \u2192 \u20ac"}
    # there the outcome is part of the transaction, which is rolled back
    assert shown[4]["state"] == ("succeeded" if is_lossless else "failed")


def test_failed_steps(database: str, encoding: str) -> None:
    app = App(database)

    def ask() -> None:
        raise ValueError("é → 5 €")

    @app.task(name="sync")
    def function() -> None:
        current_job().step("ask", ask, retry=2)

    @app.task(name="async")
    async def coroutine() -> None:
        await current_job().step_async("ask", ask, retry=2)

    app.defer("sync")
    app.defer("async")
    app.run_worker(drain=True)
    app.close()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("set client_encoding = 'UTF8'")
        found = connection.execute("select failures, error from queue.steps").fetchall()
        attempts = "select details ->> 'message' from queue.attempts where attempt = 1"
        message = "é → 5 €" if encoding == "SQL_ASCII" else r"é \u2192 5 \u20ac"
        assert connection.execute(attempts).fetchall() == [(message,)] * 2
        assert connection.execute("select * from queue.check()").fetchall() == []
    assert found == [(2, f"ValueError: {message}")] * 2


@pytest.mark.parametrize("encoding", ["SQL_ASCII"])
def test_bytes_that_no_worker_can_read(database: str) -> None:
    """They are refused at the call: a single fetch of them would fail, and each one after it."""
    app = App(database)
    ran: list[str] = []

    @app.task(name="reads")
    def reads(text: str) -> None:
        ran.append(text)

    job = app.defer("reads", {"text": "é"})
    with psycopg.connect(database, autocommit=True, client_encoding="SQL_ASCII") as connection:
        for call in (
            b"defer(E'\\xff')",
            b"defer('reads', queue => E'\\xff')",
            b"defer('reads', lock => E'\\xff')",
            b"defer('reads', jsonb_build_object('text', E'\\xff'))",
            b"register_task('reads', jsonb_build_object('queue', E'\\xff'))",
            b"schedule('s', '@daily', 'reads', jsonb_build_object('text', E'\\xff'))",
            b"move(array[%d], E'\\xff')" % job.id,
            b"set_args(%d, jsonb_build_object('text', E'\\xff'))" % job.id,
            b"signal(%d, 's', jsonb_build_object('text', E'\\xff'))" % job.id,
            b"publish('e', jsonb_build_object('text', E'\\xff'))",
        ):
            with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
                connection.execute(b"select queue." + call)
        assert connection.execute("select * from queue.check()").fetchall() == []
    app.run_worker(drain=True)
    app.close()
    assert ran == ["é"]


@pytest.mark.parametrize("encoding", ["SQL_ASCII"])
def test_a_restore_from_utf8(database: str, server: EmbeddedServer, blank_dsn: str) -> None:
    """install refuses such bytes there as well, but no job of the dump."""
    tools = [server_program(server, name) for name in ("pg_dump", "psql")]
    if None in tools:
        pytest.skip("pg_dump or psql is missing")
    dump, psql = map(str, tools)
    with psycopg.connect(blank_dsn, autocommit=True) as connection:
        install_as(connection, "plain")
        connection.execute("select queue.defer('reads', '{\"text\": \"é\"}')")
    made = subprocess.run([dump, "-d", blank_dsn], capture_output=True, check=True).stdout
    with psycopg.connect(database, autocommit=True, client_encoding="SQL_ASCII") as connection:
        connection.execute("drop extension if exists pgdefer")
        connection.execute("drop schema queue cascade")
        command = [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", os.devnull, "-d", database]
        subprocess.run(command, input=made, check=True)
        connection.execute("select queue.install(), queue.install()")
        with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
            connection.execute(b"select queue.defer(E'\\xff')")
        connection.execute("select queue.register_worker('w')")
        claimed = "select f.task from queue.workers w, queue.fetch(w.id) f"
        assert connection.execute(claimed.encode()).fetchall() == [(b"reads",)]

"""Claiming jobs by hand, as a shell script does."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from pgdefer.cli import Exit
from pgdefer.database import sql
from pgdefer.database.source import PsycopgConnection

from .command_line import Run, defer, run
from .conftest import Jobs

__all__ = ["run"]

pytestmark = pytest.mark.client


def test_next(run: Run, jobs: Jobs, conn: PsycopgConnection) -> None:
    assert run("job", "next").code == Exit.NOTHING
    one, two = defer(run, "t", "-q", "q", "-p", 1), defer(run, "t", "-q", "q")
    before = conn.execute("select * from queue.jobs order by id").fetchall()
    peeked = run("job", "next", "q", "--peek")
    assert (peeked.code, f"id: {one}\n" in peeked.out) == (0, True)
    assert conn.execute("select * from queue.jobs order by id").fetchall() == before
    assert run("job", "next", "other", "--peek").code == Exit.NOTHING
    taken = run("job", "next", "q", "--json").json
    assert taken["id"] == one
    conn.execute("select queue.succeed(%s, %s)", [one, taken["claim"]])
    assert f"id: {two}\n" in run("job", "next", "--ack").out
    assert set(jobs.states().values()) == {"succeeded"}
    assert run("job", "next", "--ack", "--peek").code == Exit.USAGE


def test_peek_changes_nothing_when_killed(run: Run, dsn: str, conn: PsycopgConnection) -> None:
    for _ in range(3):
        defer(run, "t")
    conn.execute("select queue.tick()")
    tables = "active_job", "job", "lane", "cursor", "waiting", "worker", "attempt"

    def contents() -> list[Any]:
        return [
            conn.execute(f"select t::text from queue.{table} t order by 1").fetchall()
            for table in tables
        ]

    before = contents()
    with psycopg.connect(dsn) as peeking:
        assert len(peeking.execute(sql.PEEK.psycopg, {"queues": None, "n": 3}).fetchall()) == 3
        pid = peeking.info.backend_pid
        conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
        peeking.close()
    assert contents() == before
    assert len(run("job", "ls", "-s", "ready", "--json").json) == 3


def test_next_ack_by_fifty_callers(dsn: str, conn: PsycopgConnection, jobs: Jobs) -> None:
    conn.execute("select queue.defer('t', queue => 'q') from generate_series(1, 200)")
    taken: list[int] = []
    failures: list[BaseException] = []
    begin = threading.Barrier(50)

    def take() -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                begin.wait()
                asked = {"queues": ["q"], "ack": True, "lease": "1 minute"}
                while row := connection.execute(sql.NEXT.psycopg, asked).fetchone():
                    taken.append(row[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=take) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(taken) == sorted(jobs.states()), "each job once"
    assert set(jobs.states().values()) == {"succeeded"}

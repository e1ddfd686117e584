"""Open transactions that register a task hold neither workers nor the defers of other tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool

from pgdefer import App, InvalidParameter, PgDeferError, Worker

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]


@pytest.fixture
def holder(connect: Connect) -> Connection:
    """A connection whose open transaction has registered the task `changed`."""
    holder = connect(autocommit=False)
    holder.execute("""select queue.register_task('changed', '{"priority": 7}')""")
    return holder


def defaults_of(conn: Connection, task: str) -> object:
    row = conn.execute("select defaults from queue.task where name = %s", (task,)).fetchone()
    return row and row[0]


async def test_a_worker_starts_and_registers_the_task_later(
    app: App, conn: Connection, holder: Connection, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgdefer.worker")

    @app.task(name="changed", priority=3)
    async def changed() -> None: ...

    @app.task(name="another", priority=5)
    async def another() -> None: ...

    conn.execute("select queue.defer('another')")
    async with running(app, heartbeat_every=0.2):
        await jobs.end()
        assert defaults_of(conn, "another") == {"priority": 5}
        assert "the worker's defaults have no effect for 'changed'" in caplog.text
        assert "registered now" not in caplog.text
        holder.commit()
        await until(lambda: "registered now: 'changed'" in caplog.text)
    assert defaults_of(conn, "changed") == {"priority": 3}


@pytest.mark.parametrize("name", ["bad", "wrong"])
async def test_a_worker_refuses_a_wrong_task_meanwhile(
    app: App, holder: Connection, name: str
) -> None:
    @app.task(name="changed")
    def changed() -> None: ...

    @app.task(name=name, lock="x" * 3000)
    def wrong() -> None: ...

    with pytest.raises(InvalidParameter, match=rf"^the task '{name}': lock is too long"):
        await Worker(app).run_async()


async def test_a_worker_may_lack_the_right_for_one_of_its_tasks_meanwhile(
    conn: Connection, holder: Connection, dsn: str, jobs: Jobs
) -> None:
    conn.execute("""
        create role serving login;
        select queue.grant_access('serving', 'worker');
        create function public.f(args jsonb) returns int language sql as 'select 1';
        select queue.register_task('function', '{"function": "public.f"}')
    """)
    try:
        app = App(make_conninfo(dsn, user="serving", options="-c statement_timeout=400ms"))

        @app.task(name="changed")
        def changed() -> None: ...

        @app.task(name="function")
        def function() -> None: ...

        async with running(app):
            conn.execute("select queue.defer('function')")
            await jobs.end()
    finally:
        conn.execute("select queue.revoke_access('serving'); drop role serving")


def test_a_registration_that_is_rolled_back_is_made_again(
    dsn: str, conn: Connection, holder: Connection
) -> None:
    with ConnectionPool(dsn, min_size=1, max_size=1, open=True) as pool:
        app = App(connection=pool)

        @app.task(name="changed")
        def changed() -> None: ...

        @app.task(name="another", priority=5)
        def another() -> None: ...

        with pytest.raises(PgDeferError):
            another.configure(needs=[1 << 40]).defer()
        another.defer()
        assert conn.execute("select priority from queue.jobs").fetchall() == [(5,)]


async def test_only_defers_of_that_task_wait(
    app: App, conn: Connection, holder: Connection, *, is_async: bool
) -> None:
    @app.task(name="changed")
    def changed() -> None: ...

    @app.task(name="another", priority=5)
    def another() -> None: ...

    job = await another.defer_async() if is_async else another.defer()
    assert defaults_of(conn, "another") == {"priority": 5}
    assert conn.execute("select priority from queue.jobs where id = %s", (job.id,)).fetchone() == (
        5,
    )
    holder.commit()
    changed.defer()
    assert defaults_of(conn, "changed") == {}


async def test_a_task_that_is_refused_later_disturbs_no_fetch(
    app: App, conn: Connection, holder: Connection, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker registers it on the connection on which it fetches."""
    ran: list[int] = []

    @app.task(name="work")
    async def work(i: int) -> None:
        ran.append(i)

    @app.task(name="changed", lock="{card}", sensitive=["card"])
    async def changed(card: str) -> None: ...

    async with running(app, heartbeat_every=0.05) as worker:
        await until(lambda: worker.id is not None)
        holder.rollback()
        deferred = 0
        while "tasks are not registered yet" not in caplog.text or deferred < 2000:
            work.defer_many([{"i": deferred + i} for i in range(20)])
            deferred += 20
            await asyncio.sleep(0)
        await jobs.end()
    assert sorted(ran) == list(range(deferred))
    assert caplog.text.count("tasks are not registered yet") == 1

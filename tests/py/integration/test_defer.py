"""Deferring: queue.jobs shows what Python sent, in the transaction in which it was sent."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

from pgdefer import (
    AlreadyQueued,
    App,
    InvalidParameter,
    Job,
    JobNotFound,
    NotInstalled,
    Retry,
)
from support import url_of

Connection = psycopg.Connection[Any]
HOUR = dt.timedelta(hours=1)


def about_an_hour(time: dt.timedelta) -> bool:
    return abs(time - HOUR) < dt.timedelta(seconds=1)


def jobs(conn: Connection) -> list[dict[str, Any]]:
    cursor = conn.cursor(row_factory=dict_row)
    return cursor.execute("select * from queue.jobs order by id").fetchall()


def test_a_job_with_everything(app: App, conn: Connection) -> None:
    @app.task(name="t")
    def task(account: int, note: str = "none") -> None: ...

    first = task.defer(account=1)
    at = dt.datetime(2040, 1, 2, 3, tzinfo=dt.UTC)
    job = task.configure(
        queue="mail",
        priority=-3,
        lock="account:{account}",
        queueing_lock="note:{note}",
        scheduled_at=at,
        deadline=at + HOUR,
        concurrency_key="k:{account}",
        concurrency_limit=2,
        expires_at=at + 2 * HOUR,
        description="a job",
        headers={"traceparent": "00-1"},
        timeout=dt.timedelta(seconds=9),
        retry=Retry(4, backoff="linear", base=HOUR),
    ).defer(7, note="x")
    shown = {row["id"]: row for row in jobs(conn)}
    assert shown[first.id]["queue"] == "default"
    assert shown[first.id]["args"] == {"account": 1}
    row = shown[job.id]
    assert {
        key: row[key]
        for key in (
            "task",
            "queue",
            "args",
            "priority",
            "lock",
            "queueing_lock",
            "scheduled_at",
            "deadline",
            "concurrency_key",
            "expires_at",
            "description",
            "headers",
        )
    } == {
        "task": "t",
        "queue": "mail",
        "args": {"account": 7, "note": "x"},
        "priority": -3,
        "lock": "account:7",
        "queueing_lock": "note:x",
        "scheduled_at": at,
        "deadline": at + HOUR,
        "concurrency_key": "k:7",
        "expires_at": at + 2 * HOUR,
        "description": "a job",
        "headers": {"traceparent": "00-1"},
    }


def test_registered_defaults_hold_for_sql_too(app: App, conn: Connection) -> None:
    @app.task(name="t", queue="mail", priority=4, lock="account:{account}", deadline=HOUR)
    def task(account: int) -> None: ...

    app.open()
    conn.execute("select queue.defer('t', '{\"account\": 5}')")
    task.defer(account=6)
    task.configure(lock="", queue="other").defer(account=7)
    shown = jobs(conn)
    assert [(r["queue"], r["priority"], r["lock"]) for r in shown] == [
        ("mail", 4, "account:5"),
        ("mail", 4, "account:6"),
        ("other", 4, None),
    ]
    assert all(about_an_hour(row["deadline"] - row["created_at"]) for row in shown)


def test_an_app_that_moves_may_register_again(app: App, dsn: str, conn: Connection) -> None:
    """Its role in the former database could not."""

    @app.task(name="t", queue="mail")
    def task() -> None: ...

    app.client.forbidden_to_register()
    app.move(dsn)
    task.defer()
    assert [row["queue"] for row in jobs(conn)] == ["mail"]
    assert conn.execute("select name from queue.tasks").fetchall() == [("t",)]


def test_defaults_of_an_app_hold_for_its_tasks(dsn: str, conn: Connection) -> None:
    with App(dsn, defaults={"deadline": HOUR, "queue": "mail", "retry": 4}) as app:

        @app.task
        def plain() -> None: ...

        @app.task(queue="own", deadline=None)
        def own() -> None: ...

        app.open()
        for task in (plain, own):
            conn.execute("select queue.defer(%s)", (task.name,))
    shown = jobs(conn)
    assert [row["queue"] for row in shown] == ["mail", "own"]
    assert about_an_hour(shown[0]["deadline"] - shown[0]["created_at"])
    assert shown[1]["deadline"] is None
    rows = conn.execute("select defaults -> 'retry' from queue.tasks").fetchall()
    assert rows == [({"max_attempts": 4},), ({"max_attempts": 4},)]
    with pytest.raises(TypeError, match="defaults must be a dict"):
        App(dsn, defaults=["queue"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes no option colour"):
        App(dsn, defaults={"colour": "red"})  # type: ignore[typeddict-unknown-key]


def test_tasks_are_registered_once(app: App, conn: Connection) -> None:
    @app.task(name="t", queue="a")
    def task() -> None: ...

    task.defer()
    conn.execute("select queue.register_task('t', '{\"queue\": \"b\"}')")
    task.defer()

    @app.task(name="later", queue="c")
    def later() -> None: ...

    later.defer()
    assert [row["queue"] for row in jobs(conn)] == ["a", "b", "c"]


async def test_async(app: App, conn: Connection) -> None:
    @app.task(name="t")
    async def task(n: int) -> None: ...

    done = await asyncio.gather(*(task.defer_async(n=n) for n in range(20)))
    assert sorted(row["args"]["n"] for row in jobs(conn)) == list(range(20))
    assert len({job.id for job in done}) == 20
    many = await task.defer_many_async([{"n": n} for n in range(100, 103)])
    shown = {row["id"]: row["args"]["n"] for row in jobs(conn)}
    assert [shown[job.id] for job in many] == [100, 101, 102]
    await app.close_async()


def test_many(app: App, conn: Connection) -> None:
    @app.task(name="a")
    def task(n: int) -> None: ...

    @app.task(name="b", queue="other")
    def other(n: int) -> None: ...

    assert task.defer_many([]) == []
    made = app.defer_many(
        [
            task.prepare(1),
            other.prepare(2),
            task.configure(priority=9).prepare(3),
            app.prepare("unknown", {"z": 4}),
        ]
    )
    shown = {row["id"]: row for row in jobs(conn)}
    assert [(shown[j.id]["task"], shown[j.id]["queue"], shown[j.id]["priority"]) for j in made] == [
        ("a", "default", 0),
        ("b", "other", 0),
        ("a", "default", 9),
        ("unknown", "default", 0),
    ]
    with pytest.raises(InvalidParameter):
        app.defer_many([task.prepare(5), task.configure(queue="x*").prepare(6)])
    assert len(jobs(conn)) == 4


def test_a_parameter_may_have_any_name(app: App, conn: Connection) -> None:
    named = app.task(lambda self, connection: f"{self}{connection}", name="named")
    assert named(self="a", connection="b") == "ab"
    named.defer(self="a", connection="b")
    named.defer_many([named.prepare(self="a", connection="b")])
    named.defer_with(conn, self="a", connection="b")
    asyncio.run(named.defer_async(self="a", connection="b"))
    assert [row["args"] for row in jobs(conn)] == [{"self": "a", "connection": "b"}] * 4


def test_a_task_that_is_not_known_here(app: App, conn: Connection) -> None:
    job: Job[Any] = app.defer("elsewhere", {"a": dt.date(2020, 1, 1)}, queue="q", delay=HOUR)
    (row,) = jobs(conn)
    assert (row["id"], row["task"], row["queue"]) == (job.id, "elsewhere", "q")
    assert row["args"] == {"a": {"__pgdefer__": "date", "value": "2020-01-01"}}
    assert about_an_hour(row["scheduled_at"] - row["created_at"])


def test_a_wrong_task_is_named(app: App, conn: Connection) -> None:
    app.task(name="good")(lambda: None)
    bad = app.task(name="bad", lock="x" * 2000)(lambda: None)
    with pytest.raises(InvalidParameter, match="the task 'bad': lock is too long"):
        bad.defer()
    assert conn.execute("select name from queue.tasks").fetchall() == []


def test_errors(app: App) -> None:
    @app.task(name="t", queueing_lock="only")
    def task() -> None: ...

    first = task.defer()
    with pytest.raises(AlreadyQueued) as caught:
        task.defer()
    assert str(first.id) in (caught.value.detail or "")
    assert caught.value.sqlstate == "QJ004"
    assert task.configure(on_conflict="ignore").defer() == first
    with pytest.raises(InvalidParameter) as refused:
        app.defer("t", queue="bad*")
    assert refused.value.hint
    with pytest.raises(JobNotFound):
        app.defer("t", needs=[999_999])
    with pytest.raises(ValueError, match="scheduled_at has no time zone"):
        app.defer("t", scheduled_at=dt.datetime(2030, 1, 1))  # noqa: DTZ001


async def test_idempotency_keys(app: App, conn: Connection) -> None:
    @app.task(name="t", idempotency_key="order:{order}", unique_for=dt.timedelta(days=3))
    def task(order: int, note: str = "") -> str:
        return note

    first = task.defer(1, "first")
    assert await task.defer_async(1, "second") == first
    await app.close_async()
    assert task.configure(unique_for=dt.timedelta(hours=1)).defer(1) == first
    assert app.defer_many([task.prepare(2), task.prepare(1), task.prepare(2)])[1] == first
    other = task.configure(idempotency_key="other:{order}", unique_for=HOUR)
    assert other.defer(1) == other.defer(1) != first
    assert task.configure(idempotency_key="").defer(1) != first
    found = [(row["idempotency_key"], row["args"]) for row in jobs(conn)]
    assert found == [
        ("order:1", {"order": 1, "note": "first"}),
        ("order:2", {"order": 2}),
        ("other:1", {"order": 1}),
        (None, {"order": 1}),
    ]
    with pytest.raises(InvalidParameter, match="unique_for needs an idempotency_key"):
        app.defer("u", unique_for=HOUR)
    with pytest.raises(ValueError, match="unique_for must be longer than 0"):
        app.defer("u", idempotency_key="k", unique_for=dt.timedelta())


@pytest.mark.unchecked("there is nothing to check")
@pytest.mark.parametrize("options", [{"lock": "a\0"}, {"description": "a\0"}, {"queue": "a\0"}])
def test_a_text_that_cannot_be_stored_is_a_bad_argument(app: App, options: Any) -> None:
    with pytest.raises(InvalidParameter):
        app.defer("t", **options)
    with pytest.raises(InvalidParameter):
        app.defer_many([app.prepare("t", **options)])


def test_not_installed(blank_dsn: str) -> None:
    app = App(blank_dsn)
    with pytest.raises(NotInstalled, match="pgdefer install"):
        app.defer("t")
    app.close()


def test_connections_are_kept_and_found_dead(app: App, conn: Connection) -> None:
    others = "from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    for _ in range(5):
        app.defer("t")
    assert conn.execute(f"select count(*) {others}").fetchone() == (1,)
    conn.execute(f"select pg_terminate_backend(pid, 5000) {others}")
    app.defer("t")
    assert len(jobs(conn)) == 6


def test_threads_and_forks(app: App, conn: Connection) -> None:
    threads = [threading.Thread(target=app.defer, args=("t",)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork()
    if child == 0:
        try:
            app.defer("t")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    app.defer("t")
    assert len(jobs(conn)) == 12


# In the caller's transaction


@pytest.fixture(params=["own", "caller's"])
def anywhere(request: pytest.FixtureRequest, dsn: str) -> Iterator[App]:
    """An app with a database of its own to register tasks in, or only the caller's."""
    if request.param == "own":
        app = App(dsn)
    else:
        app = App()
        assert app.source.kind == "embedded"
        # It must never be used.
        app.source.conninfo = None  # type: ignore[assignment,method-assign]
    yield app
    app.close()


@pytest.mark.parametrize("is_committed", [True, False])
def test_psycopg(
    anywhere: App, conn: Connection, connect: Callable[..., Connection], is_committed: bool
) -> None:
    @anywhere.task(name="t", queue="q")
    def task(n: int) -> None: ...

    mine = connect(autocommit=False, row_factory=dict_row)
    task.defer_with(mine, 1)
    task.configure(connection=mine, priority=1).defer(2)
    task.configure(connection=mine).defer_many([{"n": 3}, {"n": 4}])
    anywhere.defer("u", {"n": 5}, connection=mine)
    assert jobs(conn) == []
    (mine.commit if is_committed else mine.rollback)()
    expected = [("q", 1), ("q", 2), ("q", 3), ("q", 4), ("default", 5)]
    assert [(row["queue"], row["args"]["n"]) for row in jobs(conn)] == expected * is_committed


def test_an_error_leaves_the_transaction_to_its_owner(
    app: App, conn: Connection, connect: Callable[..., Connection]
) -> None:
    mine = connect(autocommit=False)
    with pytest.raises(InvalidParameter), mine.transaction():
        app.defer("t", queue="x*", connection=mine)
    app.defer("t", connection=mine)
    mine.commit()
    assert len(jobs(conn)) == 1


async def test_psycopg_async(anywhere: App, dsn: str, conn: Connection) -> None:
    @anywhere.task(name="t", queue="q")
    def task(n: int) -> None: ...

    async with await psycopg.AsyncConnection.connect(dsn) as mine:
        await task.defer_with_async(mine, 1)
        await task.configure(connection=mine).defer_many_async([{"n": 2}])
        await anywhere.defer_async("u", {"n": 3}, connection=mine)
        assert jobs(conn) == []
    assert [row["args"]["n"] for row in jobs(conn)] == [1, 2, 3]
    await anywhere.close_async()


@pytest.mark.parametrize("is_committed", [True, False])
def test_sqlalchemy(anywhere: App, engine: sa.Engine, conn: Connection, is_committed: bool) -> None:
    @anywhere.task(name="t", queue="q", lock="n:{n}")
    def task(n: int) -> None: ...

    at = dt.datetime(2040, 1, 1, tzinfo=dt.UTC)
    with orm.Session(engine) as session:
        first = task.defer_with(session, 1)
        task.configure(connection=session, scheduled_at=at, needs=[first]).defer(2)
        assert jobs(conn) == []
        (session.commit if is_committed else session.rollback)()
    with engine.connect() as connection:
        task.configure(connection=connection, description="a :colon and a 100 %").defer(3)
        (connection.commit if is_committed else connection.rollback)()
    scoped = orm.scoped_session(orm.sessionmaker(engine))
    task.configure(connection=scoped).defer_many([{"n": 4}, {"n": 5}])
    (scoped.commit if is_committed else scoped.rollback)()
    scoped.remove()
    shown = [(row["lock"], row["scheduled_at"]) for row in jobs(conn)]
    expected = [("n:1", None), ("n:2", at), ("n:3", None), ("n:4", None), ("n:5", None)]
    assert shown == expected * is_committed


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_sqlalchemy_async(
    anywhere: App, dsn: str, conn: Connection, driver: str, is_committed: bool
) -> None:
    @anywhere.task(name="t", lock="n:{n}")
    async def task(n: int) -> None: ...

    at = dt.datetime(2040, 1, 1, tzinfo=dt.UTC)
    mine = sa_async.create_async_engine(url_of(dsn, driver))
    async with sa_async.AsyncSession(mine) as session:
        first = await task.defer_with_async(session, 1)
        await task.configure(connection=session, scheduled_at=at, needs=[first]).defer_async(2)
        await task.configure(connection=session).defer_many_async([{"n": 3}])
        await anywhere.defer_async("t", {"n": 4}, connection=session)
        with pytest.raises(InvalidParameter) as refused:
            async with session.begin_nested():
                await anywhere.defer_async("t", queue="x*", connection=session)
        assert refused.value.detail == "queue: x*"
        assert str(refused.value.hint).endswith("plain name.")
        assert jobs(conn) == []
        await (session.commit if is_committed else session.rollback)()
    async with mine.connect() as connection:
        await task.defer_with_async(connection, 5)
        await (connection.commit if is_committed else connection.rollback)()
    scoped = sa_async.async_scoped_session(
        sa_async.async_sessionmaker(mine), scopefunc=asyncio.current_task
    )
    await task.configure(connection=scoped, description="a :colon and a 100 %").defer_async(6)
    await (scoped.commit if is_committed else scoped.rollback)()
    await scoped.remove()
    await mine.dispose()
    shown = [(row["lock"], row["scheduled_at"]) for row in jobs(conn)]
    locks = [("n:1", None), ("n:2", at), ("n:3", None), ("n:4", None), ("n:5", None), ("n:6", None)]
    assert shown == locks * is_committed
    await anywhere.close_async()


async def test_wrong_kinds_of_connection(app: App, dsn: str, engine: sa.Engine) -> None:
    @app.task(name="t")
    def task() -> None: ...

    async with await psycopg.AsyncConnection.connect(dsn) as mine:
        with pytest.raises(TypeError, match=r"this call can't use a psycopg.*AsyncConnection"):
            task.defer_with(mine)  # type: ignore[arg-type]
    with (
        orm.Session(engine) as session,
        pytest.raises(TypeError, match="this call can't use a sqlalchemy"),
    ):
        await task.defer_with_async(session)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"builtins\.str"):
        task.defer_with("x")  # type: ignore[arg-type]
    await app.close_async()

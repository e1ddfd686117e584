"""Transactional tasks: a handler's writes and its job's end commit together, or neither."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from psycopg.types.json import set_json_dumps, set_json_loads
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

from pgdefer import App, JobContext, Retry, RetryLater, current_job
from support import url_of

from .conftest import Jobs, running, until

Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]


@pytest.fixture(autouse=True)
def table(conn: Connection) -> None:
    conn.execute("create table effect (n integer, check (n < 100))")


def effects(conn: Connection) -> list[int]:
    return [row[0] for row in conn.execute("select n from effect order by n").fetchall()]


@pytest.mark.parametrize("is_async", [True, False])
async def test_what_a_handler_sets_on_its_connection_reaches_no_other(
    app: App, jobs: Jobs, is_async: bool
) -> None:
    if is_async:

        @app.task(name="t", transactional=True)
        async def coroutine(connection: AsyncConnection) -> str:
            found = await (await connection.execute("select 1 as a")).fetchone()
            connection.row_factory = dict_row
            return repr(found)
    else:

        @app.task(name="t", transactional=True)
        def function(connection: Connection) -> str:
            found = connection.execute("select 1 as a").fetchone()
            connection.row_factory = dict_row
            return repr(found)

    async with running(app, concurrency=1):
        for _ in range(2):
            app.defer("t")
        rows = await jobs.end()
    assert [row["result"] for row in rows] == ["(1,)"] * 2


async def test_what_a_handler_registers_on_its_connection_reaches_no_other(
    app: App, jobs: Jobs, is_async: bool
) -> None:
    query = """select '{"a": 1}'::jsonb, pg_backend_pid()"""
    heard: list[object] = []

    def change(connection: Any) -> None:
        set_json_loads(lambda _: "changed", connection)
        set_json_dumps(lambda _: '"changed"', connection)
        connection.prepare_threshold = connection.prepared_max = 1
        connection.server_cursor_factory = None
        connection.add_notice_handler(heard.append)
        connection.add_notify_handler(heard.append)

    def threshold(connection: Any) -> list[int]:
        return [connection.prepare_threshold, connection.prepared_max]

    @app.task(name="async", transactional=True)
    async def coroutine(connection: AsyncConnection) -> Any:
        row = await (await connection.execute(query)).fetchone()
        await connection.execute("do $$begin raise notice 'n'; end$$")
        found = threshold(connection)
        change(connection)
        return [*(row or ()), *found]

    @app.task(name="sync", transactional=True)
    def function(connection: Connection) -> Any:
        row = connection.execute(query).fetchone()
        connection.execute("do $$begin raise notice 'n'; end$$")
        found = threshold(connection)
        change(connection)
        return [*(row or ()), *found]

    async with running(app, concurrency=1):
        for _ in range(2):
            app.defer("async" if is_async else "sync")
        first, second = [row["result"] for row in await jobs.end()]
    assert first[0] == {"a": 1}
    assert second == first
    assert heard == []


@pytest.fixture
def low(conn: Connection) -> Iterator[str]:
    """Return the name of a role that may do a worker's work."""
    name = f"low_{secrets.token_hex(4)}"
    conn.execute(f"create role {name}")
    conn.execute("select queue.grant_access(%s, 'worker')", [name])
    yield name
    conn.execute(f"drop owned by {name}; drop role {name}")


LEFT = """
    set search_path = nowhere; set statement_timeout = '1min'; set application_name = 'other';
    set default_transaction_read_only = on; set default_transaction_isolation = serializable;
"""
FOUND = """
    select pg_backend_pid(), current_user::text, current_setting('search_path'),
      current_setting('statement_timeout'), current_setting('application_name'),
      current_setting('default_transaction_read_only'),
      current_setting('default_transaction_isolation')
"""


async def test_what_a_handler_sets_in_its_session_reaches_no_other(
    dsn: str, jobs: Jobs, is_async: bool, low: str
) -> None:
    options = "-c statement_timeout=50s -c search_path=public,queue"
    app = App(psycopg.conninfo.make_conninfo(dsn, options=options, application_name="mine"))
    if is_async:

        @app.task(name="t", transactional=True)
        async def coroutine(connection: AsyncConnection) -> Any:
            row = await (await connection.execute(FOUND)).fetchone()
            await connection.execute(f"{LEFT}; set role {low}")
            return list(row or [])
    else:

        @app.task(name="t", transactional=True)
        def function(connection: Connection) -> Any:
            row = connection.execute(FOUND).fetchone()
            connection.execute(f"{LEFT}; set role {low}")
            return list(row or [])

    async with running(app, concurrency=1):
        for _ in range(3):
            app.defer("t")
        rows = await jobs.end()
    app.close()
    first, *others = (row["result"] for row in rows)
    assert first[2:] == ["public,queue", "50s", "mine", "off", "read committed"]
    assert others == [first] * 2  # in the same session


async def test_what_a_step_sets_in_its_session_reaches_no_other(
    app: App, is_async: bool, low: str
) -> None:
    @app.task(name="async")
    async def coroutine() -> list[Any]:
        found = []
        for name in "ab":
            async with current_job().transaction_async(name) as connection:
                assert connection is not None
                query = "select pg_backend_pid(), current_user::text"
                found.append(await (await connection.execute(query)).fetchone())
                await connection.execute(f"set role {low}")
        return found

    @app.task(name="sync")
    def function() -> list[Any]:
        found = []
        for name in "ab":
            with current_job().transaction(name) as connection:
                assert connection is not None
                query = "select pg_backend_pid(), current_user::text"
                found.append(connection.execute(query).fetchone())
                connection.execute(f"set role {low}")
        return found

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        first, second = await job.result_async(60)
    assert first == second


async def test_a_connection_without_autocommit_is_not_lent_again(
    app: App, jobs: Jobs, is_async: bool
) -> None:
    """What the next call defers on it would never be committed."""
    app.task(name="child")(lambda: None)

    @app.task(name="async")
    async def coroutine() -> None:
        async with current_job().transaction_async("step") as connection:
            assert connection is not None
            await connection.execute("commit")
            await connection.set_autocommit(False)
        await app.defer_async("child")

    @app.task(name="sync")
    def function() -> None:
        with current_job().transaction("step") as connection:
            assert connection is not None
            connection.execute("commit")
            connection.autocommit = False
        app.defer("child")

    app.defer("async" if is_async else "sync")
    async with running(app):
        rows = await jobs.end()
    assert [(row["task"], row["state"]) for row in rows[1:]] == [("child", "succeeded")]


async def test_both_or_neither(app: App, jobs: Jobs, conn: Connection) -> None:
    @app.task(transactional=True)
    async def coroutine(connection: AsyncConnection, n: int) -> int:
        await connection.execute("insert into effect values (%s)", (n,))
        if n % 2:
            raise ValueError(n)
        return n

    @app.task(transactional=True)
    def function(connection: Connection, n: int) -> int:
        connection.execute("insert into effect values (%s)", (n,))
        if n % 2:
            raise ValueError(n)
        return n

    async with running(app):
        made = [await coroutine.defer_async(n) for n in range(10)]
        made += [await function.defer_async(n) for n in range(10, 20)]
        await jobs.end()
    shown = {row["id"]: row for row in jobs()}
    for n, job in enumerate(made):
        row = shown[job.id]
        if n % 2:
            assert (row["state"], row["error"]) == ("failed", f"ValueError: {n}")
        else:
            assert (row["state"], row["result"], row["attempts"]) == ("succeeded", n, 1)
    assert effects(conn) == list(range(0, 20, 2))


# What a handler may not do: SQL, or "close", and the error of its job.
MISTAKES = [
    ("select 1/0", "has failed, which has ended the transaction"),
    ("set transaction read only", "read-only transaction"),
    ("insert into late values (1); set local statement_timeout = 1", "statement timeout"),
    ("insert into busy values (1); set local lock_timeout = 1", "lock timeout"),
    ("insert into torn values ('40P01')", "torn by 40P01"),
    ("insert into torn values ('40001')", "torn by 40001"),
    ("rollback", "has ended its transaction"),
    ("commit", "has ended its transaction"),
    ("close", "has closed its connection"),
]


async def test_what_the_handler_may_not_do(
    app: App, jobs: Jobs, conn: Connection, is_async: bool
) -> None:
    conn.execute("""
        create table late (n integer);
        create function sleep() returns trigger language plpgsql as $$
        begin
          perform pg_sleep(600);
          return null;
        end $$;
        create constraint trigger sleep after insert on late initially deferred
        for each row execute function sleep();
        create table busy (n integer);
        create table held (n integer);
        create function read_held() returns trigger language plpgsql as $$
        begin
          perform from held;
          return null;
        end $$;
        create constraint trigger read_held after insert on busy initially deferred
        for each row execute function read_held();
        create table torn (code text);
        create function tear() returns trigger language plpgsql as $$
        begin
          raise 'torn by %', new.code using errcode = new.code;
        end $$;
        create constraint trigger tear after insert on torn initially deferred
        for each row execute function tear();
    """)
    crashes = []
    app.on("crash")(crashes.append)
    if is_async:

        @app.task(transactional=True, name="t")
        async def coroutine(connection: AsyncConnection, what: str) -> None:
            await connection.execute("insert into effect values (1)")
            with contextlib.suppress(psycopg.Error):
                await (connection.close() if what == "close" else connection.execute(what))
    else:

        @app.task(transactional=True, name="t")
        def function(connection: Connection, what: str) -> None:
            connection.execute("insert into effect values (1)")
            with contextlib.suppress(psycopg.Error):
                connection.close() if what == "close" else connection.execute(what)

    with conn.transaction():
        conn.execute("lock table held")
        async with running(app):
            for what, _ in MISTAKES:
                app.defer("t", {"what": what})
            rows = await jobs.end()
    for row, (_, error) in zip(rows, MISTAKES, strict=True):
        assert error in row["error"]
    assert [(row["state"], row["failures"], row["crashes"]) for row in rows] == [
        ("failed", 1, 0)
    ] * len(MISTAKES)
    assert (effects(conn), crashes) == ([1], [])  # of the one that commits


async def leave_open_async(connection: AsyncConnection, what: str, kept: list[Any]) -> None:
    """Leave something open that is kept, or that the traceback of an error has."""
    if what == "pipeline":
        kept.append(connection.pipeline())
        await kept[-1].__aenter__()
        await connection.execute("insert into effect values (2)")
    elif what != "nothing":
        stream = connection.cursor().stream("select generate_series(1, 1000)")
        await anext(stream)
        if what == "raises":
            raise ValueError(what)
        kept.append(stream)


def leave_open(connection: Connection, what: str, kept: list[Any]) -> None:
    """Leave something open, as leave_open_async."""
    if what == "pipeline":
        kept.append(connection.pipeline())
        kept[-1].__enter__()
        connection.execute("insert into effect values (2)")
    elif what != "nothing":
        stream = connection.cursor().stream("select generate_series(1, 1000)")
        next(stream)
        if what == "raises":
            raise ValueError(what)
        kept.append(stream)


async def test_what_the_handler_may_not_leave_open(
    app: App, jobs: Jobs, conn: Connection, is_async: bool
) -> None:
    kept: list[Any] = []
    if is_async:

        @app.task(transactional=True, name="t")
        async def coroutine(connection: AsyncConnection, what: str) -> None:
            await connection.execute("insert into effect values (1)")
            await leave_open_async(connection, what, kept)
    else:

        @app.task(transactional=True, name="t")
        def function(connection: Connection, what: str) -> None:
            connection.execute("insert into effect values (1)")
            leave_open(connection, what, kept)

    async with running(app):
        for what in ("pipeline", "stream", "raises", "nothing"):
            app.defer("t", {"what": what})
        *rows, last = await jobs.end()
    open_left = "has left a stream, a copy or a pipeline open"
    for row, error in zip(rows, (open_left, open_left, "ValueError: raises"), strict=True):
        assert (row["state"], row["failures"], row["crashes"]) == ("failed", 1, 0)
        assert error in row["error"]
    assert (last["state"], effects(conn)) == ("succeeded", [1])


@pytest.fixture
async def sessions(url: sa.URL, is_async: bool) -> AsyncIterator[Any]:
    """A sessionmaker, for a coroutine or for a function."""
    if is_async:
        async_engine = sa_async.create_async_engine(url)
        yield sa_async.async_sessionmaker(async_engine)
        await async_engine.dispose()
    else:
        engine = sa.create_engine(url)
        yield orm.sessionmaker(engine)
        engine.dispose()


async def test_an_error_that_a_session_swallows(
    app: App, jobs: Jobs, sessions: Any, is_async: bool
) -> None:
    if is_async:

        @app.task(transactional=sessions, name="t")
        async def coroutine(session: sa_async.AsyncSession) -> None:
            with contextlib.suppress(sa.exc.DBAPIError):
                await session.execute(sa.text("select 1/0"))
    else:

        @app.task(transactional=sessions, name="t")
        def function(session: orm.Session) -> None:
            with contextlib.suppress(sa.exc.DBAPIError):
                session.execute(sa.text("select 1/0"))

    async with running(app):
        app.defer("t")
        (row,) = await jobs.end()
    assert (row["state"], row["failures"], row["crashes"]) == ("failed", 1, 0)
    assert "has failed, which has ended the transaction" in row["error"]


async def test_what_a_handler_may_not_do_with_its_session(
    app: App, jobs: Jobs, sessions: Any, is_async: bool
) -> None:
    if is_async:

        @app.task(transactional=sessions, name="t")
        async def coroutine(session: sa_async.AsyncSession, what: str) -> None:
            await session.execute(sa.text("select 1"))
            await getattr(session, what)()
    else:

        @app.task(transactional=sessions, name="t")
        def function(session: orm.Session, what: str) -> None:
            session.execute(sa.text("select 1"))
            getattr(session, what)()

    async with running(app):
        for what in ("commit", "rollback", "close"):
            app.defer("t", {"what": what})
        rows = await jobs.end()
    for row in rows:
        assert (row["state"], row["failures"], row["crashes"]) == ("failed", 1, 0)
        assert "has ended its transaction" in row["error"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", None])
async def test_a_session_that_commits_each_statement(
    app: App, jobs: Jobs, dsn: str, driver: str | None
) -> None:
    if driver is not None:
        async_engine = sa_async.create_async_engine(
            url_of(dsn, driver), isolation_level="AUTOCOMMIT"
        )

        @app.task(transactional=sa_async.async_sessionmaker(async_engine), name="t")
        async def coroutine(session: sa_async.AsyncSession) -> None:
            await session.execute(sa.text("insert into effect values (1)"))
    else:
        engine = sa.create_engine(url_of(dsn)).execution_options(isolation_level="AUTOCOMMIT")

        @app.task(transactional=orm.sessionmaker(engine), name="t")
        def function(session: orm.Session) -> None:
            session.execute(sa.text("insert into effect values (1)"))

    async with running(app):
        app.defer("t")
        (row,) = await jobs.end()
    assert (row["state"], row["failures"], row["crashes"]) == ("failed", 1, 0)
    assert "AUTOCOMMIT" in row["error"]
    if driver is not None:
        await async_engine.dispose()
    else:
        engine.dispose()


async def test_a_claim_that_was_lost_rolls_back(app: App, jobs: Jobs, conn: Connection) -> None:
    claims = []
    release = asyncio.Event()

    @app.task(transactional=True)
    async def task(connection: AsyncConnection) -> None:
        claims.append(current_job().claim)
        await connection.execute("insert into effect values (%s)", (len(claims),))
        if len(claims) == 1:
            await release.wait()

    async with running(app):
        job = await task.defer_async()
        await until(lambda: claims)
        conn.execute("select * from queue.retry(array[%s]::bigint[], force => true)", (job.id,))
        await until(lambda: len(claims) == 2)
        release.set()
        (row,) = await jobs.end()
    assert row["state"] == "succeeded"
    assert effects(conn) == [2]


async def test_yields_commit(app: App, jobs: Jobs, conn: Connection) -> None:
    @app.task(name="child")
    async def child() -> None: ...

    @app.task(transactional=True)
    async def parent(connection: AsyncConnection) -> str:
        attempt = current_job().attempt
        await connection.execute("insert into effect values (%s)", (attempt,))
        if attempt == 1:
            needed = await child.configure(connection=connection).defer_async()
            raise RetryLater("children first", needs=[needed])
        return "done"

    async with running(app):
        job = await parent.defer_async()
        assert await job.result_async(300) == "done"
    assert effects(conn) == [1, 2]
    assert [a["outcome"] for a in jobs.attempts()] == ["yielded"]


async def test_aborted_ones_roll_back(app: App, jobs: Jobs, conn: Connection) -> None:
    begun = asyncio.Event()

    @app.task(transactional=True)
    async def task(connection: AsyncConnection) -> None:
        await connection.execute("insert into effect values (1)")
        begun.set()
        await connection.execute("select pg_sleep(30)")

    async with running(app):
        job = await task.defer_async()
        await begun.wait()
        conn.execute("select queue.cancel(%s, abort => true)", (job.id,))
        (row,) = await jobs.end()
    assert (row["state"], effects(conn)) == ("cancelled", [])


async def test_a_lost_connection_is_no_failure_of_the_job(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    runs = []

    @app.task(transactional=True, retry=Retry(1))
    async def task(connection: AsyncConnection) -> None:
        runs.append(current_job().attempt)
        await connection.execute("insert into effect values (%s)", (len(runs),))
        if len(runs) == 1:
            conn.execute("select pg_terminate_backend(%s)", (connection.info.backend_pid,))

    async with running(app):
        await task.defer_async()
        (row,) = await jobs.end()
    assert (row["state"], row["crashes"], row["failures"]) == ("succeeded", 1, 0)
    assert [(a["outcome"], a["error"].split(":")[0]) for a in jobs.attempts()] == [
        ("crashed", "TransactionLost")
    ]
    assert effects(conn) == [2]


async def test_the_default_isolation_does_not_matter(
    app: App, jobs: Jobs, conn: Connection, dsn: str
) -> None:
    name = conn.info.dbname
    conn.execute(f'alter database "{name}" set default_transaction_isolation = serializable')
    own = App(dsn)

    @own.task(transactional=True)
    async def task(connection: AsyncConnection) -> None:
        await connection.execute("insert into effect values (1)")

    conn.execute("select queue.defer(%s)", (task.name,))
    conn.execute(f'alter database "{name}" reset default_transaction_isolation')
    async with running(own):
        (row,) = await jobs.end()
    assert (row["state"], effects(conn)) == ("succeeded", [1])


# SQLAlchemy


class Base(orm.DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "row_effect"
    n: orm.Mapped[int] = orm.mapped_column(primary_key=True)


@pytest.fixture
def url(dsn: str) -> sa.URL:
    url = url_of(dsn)
    engine = sa.create_engine(url)
    Base.metadata.create_all(engine)
    engine.dispose()
    return url


async def test_sessions_of_sqlalchemy(app: App, jobs: Jobs, conn: Connection, url: sa.URL) -> None:
    engine = sa.create_engine(url)
    async_engine = sa_async.create_async_engine(url)

    @app.task(transactional=orm.sessionmaker(engine))
    def function(session: orm.Session, n: int) -> int:
        session.add(Effect(n=n))
        if n % 2:
            raise ValueError(n)
        return n

    @app.task(transactional=sa_async.async_sessionmaker(async_engine))
    async def coroutine(session: sa_async.AsyncSession, n: int) -> int:
        session.add(Effect(n=n))
        if n % 2:
            raise ValueError(n)
        return n

    async with running(app):
        for n in range(4):
            await function.defer_async(n)
            await coroutine.defer_async(n + 10)
        await jobs.end()
        await function.defer_async(0)  # taken: found at the flush
        rows = await jobs.end()
    await async_engine.dispose()
    engine.dispose()
    states = [row["state"] for row in rows]
    assert states == ["succeeded"] * 2 + ["failed"] * 2 + ["succeeded"] * 2 + ["failed"] * 3
    found = conn.execute("select n from row_effect order by n").fetchall()
    assert found == [(0,), (2,), (10,), (12,)]
    assert "IntegrityError" in rows[-1]["error"]


async def test_a_session_of_a_scope_that_middleware_opens(
    app: App, jobs: Jobs, conn: Connection, url: sa.URL
) -> None:
    """As Flask's: its application context is the scope of the session."""
    scope: contextvars.ContextVar[int] = contextvars.ContextVar("scope")
    engine = sa.create_engine(url)
    sessions = orm.scoped_session(orm.sessionmaker(engine), scopefunc=scope.get)

    @contextlib.contextmanager
    def opened(job: JobContext) -> Iterator[None]:
        token = scope.set(job.id)
        yield
        sessions.remove()
        scope.reset(token)

    @app.task(transactional=sessions, middleware=[opened])
    def function(session: orm.Session) -> None:
        assert session is sessions()
        sessions.add(Effect(n=scope.get()))

    async with running(app):
        made = [await function.defer_async() for _ in range(3)]
        rows = await jobs.end()
    assert [row["error"] for row in rows] == [None] * 3
    found = conn.execute("select n from row_effect order by n").fetchall()
    assert found == [(job.id,) for job in made]
    engine.dispose()


# The example of mode `any`: a sort whose jobs partition, and wait for the part that comes first


async def test_a_sort_whose_jobs_wait_for_any_of_their_parts(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    """Jobs sort partitions and defer more jobs; a part has ended when its job has.

    A job that is woken checks which of its parts are done: it may run while others are not.
    """
    conn.execute(
        "create table part (id bigint primary key, numbers int[], is_sorted bool not null)"
    )
    runs = 0

    @app.task(name="sort", transactional=True, needs_mode="any", max_progress=None)
    async def sort(connection: AsyncConnection, part: int) -> RetryLater | None:
        nonlocal runs
        runs += 1
        found = await connection.execute("select numbers from part where id = %s", (part,))
        ((numbers,),) = await found.fetchall()
        found = await connection.execute(
            "select id, numbers, is_sorted from part where id = any (%s) order by id",
            ([2 * part, 2 * part + 1],),
        )
        parts = await found.fetchall()
        if not parts and len(numbers) > 4:
            pivot, *others = numbers
            lower = [n for n in others if n < pivot]
            upper = [n for n in others if n >= pivot]
            needed = []
            for id, some in ((2 * part, lower), (2 * part + 1, upper)):
                await connection.execute("insert into part values (%s, %s, false)", (id, some))
                call = sort.configure(connection=connection)
                needed.append(await call.defer_async(id))
            return RetryLater("partitioned", needs=needed)
        if not all(is_sorted for _, _, is_sorted in parts):
            return RetryLater("one part is not sorted yet")
        if parts:
            (_, lower, _), (_, upper, _) = parts
            numbers = [*lower, numbers[0], *upper]
        await connection.execute(
            "update part set numbers = %s, is_sorted = true where id = %s",
            (sorted(numbers) if not parts else numbers, part),
        )
        return None

    numbers = [random.randrange(1000) for _ in range(200)]
    conn.execute("insert into part values (1, %s, false)", (numbers,))
    async with running(app, concurrency=3), running(app, concurrency=3):
        job = await sort.defer_async(1)
        await job.result_async(300)
        rows = await jobs.end()
    assert conn.execute("select numbers from part where id = 1").fetchone() == (sorted(numbers),)
    assert {row["state"] for row in rows} == {"succeeded"}
    assert runs > len(rows) > 50

"""Calls on the application's own pools of psycopg_pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from psycopg_pool import (
    AsyncConnectionPool,
    AsyncNullConnectionPool,
    ConnectionPool,
    NullConnectionPool,
    PoolClosed,
    PoolTimeout,
)

from pgdefer import App, InvalidParameter, Worker, current_job
from pgdefer.database.source import LAST

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]

KINDS = ["plain", "autocommit", "null"]


def settings(kind: str) -> dict[str, Any]:
    return {"kwargs": {"autocommit": kind == "autocommit", "row_factory": dict_row}}


@contextlib.contextmanager
def pool_of(dsn: str, kind: str = "plain", size: int = 1, **options: Any) -> Iterator[Any]:
    """A pool, which has all its connections again at the end."""
    made = NullConnectionPool if kind == "null" else ConnectionPool
    least = 0 if kind == "null" else size
    options = {"min_size": least, "max_size": size, "open": False, **settings(kind), **options}
    with made(dsn, **options) as pool:
        yield pool
        stats = pool.get_stats()
        assert stats["pool_available"] == (stats["pool_size"] if least else 0)
        assert stats["requests_waiting"] == 0


@contextlib.asynccontextmanager
async def async_pool_of(dsn: str, kind: str = "plain", **options: Any) -> AsyncIterator[Any]:
    made = AsyncNullConnectionPool if kind == "null" else AsyncConnectionPool
    least = 0 if kind == "null" else 1
    options = {"min_size": least, "max_size": 1, "open": False, **settings(kind), **options}
    async with made(dsn, **options) as pool:
        yield pool
        stats = pool.get_stats()
        assert stats["pool_available"] == (stats["pool_size"] if least else 0)
        assert stats["requests_waiting"] == 0


def own_connections(app: App) -> int:
    client = app.client
    loops = list(client.own_pool_async._loops.values())
    return len(client.own_pool._idle.items) + sum(len(idle.items) for idle, _ in loops)


@pytest.mark.parametrize("kind", KINDS)
def test_all_calls_of_an_app(dsn: str, jobs: Jobs, kind: str) -> None:
    with pool_of(dsn, kind) as pool, App(connection=pool) as app:

        @app.task(name="t", queue="q")
        def task(n: int) -> int:
            return n

        task.defer(1)
        task.defer_many([{"n": 2}, {"n": 3}])
        app.chain([task.prepare(4), app.prepare("u")])
        app.group([task.prepare(5)]).then(task.prepare(6))
        with app.open_group("g"):
            task.configure(group="g").defer(7)
        assert app.pause("q") == 7
        assert app.resume("q") == 7
        first = app.list_jobs("t")[-1]
        assert app.job(first).cancel() == "cancelled"
        assert app.job(first).retry() == "ready"
        with pytest.raises(InvalidParameter):
            app.defer("t", queue="x*")
        assert own_connections(app) == 0
        app.run_worker(["q"], drain=True)
        assert app.result(first, 60) == 1
    assert len(jobs()) == 8
    assert {row["queue"] for row in jobs()} == {"q", "default"}


@pytest.mark.parametrize("kind", KINDS)
async def test_all_asynchronous_calls_of_an_app(dsn: str, jobs: Jobs, kind: str) -> None:
    async with async_pool_of(dsn, kind) as pool, App(connection=pool) as app:

        @app.task(name="t", queue="q")
        def task(n: int) -> int:
            return n

        await asyncio.gather(*(task.defer_async(n) for n in range(5)))
        await task.defer_many_async([{"n": 5}])
        await app.group([task.prepare(6)]).then_async(app.prepare("u"))
        assert await app.pause_async("q") == 7
        assert await app.resume_async("q") == 7
        first = (await app.list_jobs_async("t", pattern='{"n": 5}'))[0]
        assert await app.job(first).cancel_async() == "cancelled"
        assert await app.job(first).retry_async() == "ready"
        with pytest.raises(InvalidParameter):
            await app.defer_async("t", queue="x*")
        assert own_connections(app) == 0
        await app.run_worker_async(["q"], drain=True)
        assert await app.result_async(first, 60) == 5
    assert {row["queue"] for row in jobs()} == {"q", "default"}


@pytest.fixture(params=["own", "callers"])
def anywhere(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch) -> App:
    """An app of this database, or one that knows only what is passed."""
    app = App(dsn)
    if request.param == "callers":
        app = App()
        assert app.source.kind == "embedded"
        monkeypatch.setattr(app.source, "conninfo", None)  # it must never be used
    return app


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_for_one_call(anywhere: App, dsn: str, jobs: Jobs, kind: str) -> None:
    @anywhere.task(name="t", queue="q")
    def task(n: int) -> None: ...

    with pool_of(dsn, kind) as pool:
        task.configure(connection=pool, priority=1).defer(1)
        task.defer_with(pool, 2)
        task.configure(connection=pool).defer_many([{"n": 3}])
        anywhere.group([task.prepare(4)], connection=pool).then(task.prepare(5))
        job = anywhere.defer("t", {"n": 6}, connection=pool)
        assert job.hold(connection=pool) == "held"
        assert [info.id for info in anywhere.list_jobs(state="held", connection=pool)] == [job.id]
    assert [(row["args"]["n"], row["queue"]) for row in jobs()] == [(n, "q") for n in range(1, 7)]
    anywhere.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_asynchronous_pool_for_one_call(
    anywhere: App, dsn: str, jobs: Jobs, kind: str
) -> None:
    @anywhere.task(name="t", queue="q")
    def task(n: int) -> None: ...

    async with async_pool_of(dsn, kind) as pool:
        await task.configure(connection=pool).defer_async(1)
        await task.defer_with_async(pool, 2)
        await anywhere.defer_many_async([task.prepare(3)], connection=pool)
        job = await anywhere.defer_async("t", {"n": 4}, connection=pool)
        assert await job.hold_async(connection=pool) == "held"
    assert [(row["args"]["n"], row["queue"]) for row in jobs()] == [(n, "q") for n in range(1, 5)]
    await anywhere.close_async()


def test_threads_share_a_pool(dsn: str, jobs: Jobs) -> None:
    with pool_of(dsn, size=2) as pool, ThreadPoolExecutor(8) as threads:
        list(threads.map(App(connection=pool).defer, ["t"] * 100))
    assert len(jobs()) == 100


def test_who_holds_the_last_connection(dsn: str, jobs: Jobs) -> None:
    """Registering the task does not wait for a second one."""
    with pool_of(dsn, timeout=0.1) as pool:
        app = App(connection=pool)

        @app.task(name="t", queue="q")
        def task() -> None: ...

        said = r"couldn't get a connection after 0.10 sec: .* all 1 connections.*connection=connec"
        with pool.connection(timeout=300) as mine:
            with pytest.raises(PoolTimeout, match=said):
                task.defer()
            task.defer_with(mine)
        app.close()
    assert [row["queue"] for row in jobs()] == ["q"]


async def test_who_holds_the_last_asynchronous_connection(dsn: str, jobs: Jobs) -> None:
    async with async_pool_of(dsn, timeout=0.1) as pool:
        app = App(connection=pool)

        @app.task(name="t", queue="q")
        def task() -> None: ...

        async with pool.connection(timeout=300) as mine:
            with pytest.raises(PoolTimeout, match="connection=connection"):
                await task.defer_async()
            await task.defer_with_async(mine)
        await app.close_async()
    assert [row["queue"] for row in jobs()] == ["q"]


async def test_closed_pools(dsn: str, jobs: Jobs) -> None:
    pool: Any = ConnectionPool(dsn, min_size=1, open=False)
    async_pool: Any = AsyncConnectionPool(dsn, min_size=1, open=False)
    app = App(connection=(pool, async_pool))
    for state in ("not open yet", "already closed"):
        said = f"{state}: open it before the call"
        for options in ({}, {"connection": pool}):
            with pytest.raises(PoolClosed, match=said):
                app.defer("t", **options)
        for options in ({}, {"connection": async_pool}):
            with pytest.raises(PoolClosed, match=said):
                await app.defer_async("t", **options)
        if state == "not open yet":
            with pool:
                app.defer("t")
            async with async_pool:
                await app.defer_async("t")
    assert len(jobs()) == 2


async def test_pools_of_the_other_kind(dsn: str) -> None:
    app = App(dsn)
    synchronous = "this call is synchronous, and its pool is an AsyncConnectionPool: await"
    asynchronous = "this call is asynchronous, and its pool is a ConnectionPool, which would block"
    with pool_of(dsn) as pool:
        async with async_pool_of(dsn) as async_pool:
            with pytest.raises(TypeError, match=synchronous):
                app.defer("t", connection=async_pool)
            with pytest.raises(TypeError, match=synchronous):
                App(connection=async_pool).defer("t")
            with pytest.raises(TypeError, match=asynchronous):
                await app.defer_async("t", connection=pool)
            with pytest.raises(TypeError, match=asynchronous):
                await App(connection=pool).defer_async("t")
            for both in ((pool, async_pool), (async_pool, pool)):
                App(connection=both).defer("t")
                await App(connection=both).defer_async("t")


async def test_handlers_use_the_pools(dsn: str, jobs: Jobs) -> None:
    """Five at once, with one connection of each kind."""
    with pool_of(dsn) as pool:
        async with async_pool_of(dsn) as async_pool:
            app = App(connection=(pool, async_pool))

            @app.task(name="sync", queue="q")
            def sync(n: int) -> int:
                job = current_job()
                assert job.step("n", lambda: n) == n
                with job.transaction("write") as connection:
                    if connection is not None:
                        child.defer_with(connection)
                (found,) = job.gather([child.prepare()])
                child.defer()
                return int(found)

            @app.task(name="async", queue="q")
            async def coroutine(n: int) -> int:
                job = current_job()
                assert await job.step_async("n", lambda: n) == n
                async with job.transaction_async("write") as connection:
                    if connection is not None:
                        await child.defer_with_async(connection)
                (found,) = await job.gather_async([child.prepare()])
                await child.defer_async()
                return int(found)

            @app.task(name="child", queue="q")
            def child() -> int:
                return 7

            deferred = [await task.defer_async(n) for task in (sync, coroutine) for n in range(5)]
            async with running(app, ["q"]):
                assert [await job.result_async(300) for job in deferred] == [7] * 10
                await jobs.end()
            assert own_connections(app) == 0
    rows = [row for row in jobs() if row["task"] == "child"]
    assert [row["state"] for row in rows] == ["succeeded"] * 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_role_that_may_not_register(
    dsn: str, conn: Connection, jobs: Jobs, kind: str, connect: Callable[..., Connection]
) -> None:
    conn.execute("create role pooled login")
    conn.execute("select queue.grant_access('pooled', 'producer')")
    with pool_of(make_conninfo(dsn, user="pooled"), kind) as pool:
        app = App(connection=pool)

        @app.task(name="t", queue="q")
        def task() -> None: ...

        assert [task.defer().id for _ in range(2)] == list(jobs.states())
    conn.execute("select queue.revoke_access('pooled')")
    conn.execute("drop role pooled")


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_task_is_named(dsn: str, kind: str) -> None:
    with pool_of(dsn, kind) as pool:
        app = App(connection=pool)
        app.task(name="bad", queue="x*")(lambda: None)
        app.defer("t")
        with pytest.raises(InvalidParameter, match="the task 'bad'"):
            app.defer("bad")


def test_times_that_a_datetime_can_not_hold(dsn: str, conn: Connection) -> None:
    conn.execute("select queue.create_queue('q'), queue.pause('q', 'infinity')")
    with pool_of(dsn) as pool:
        assert [info.paused_until for info in App(connection=pool).list_queues()] == [LAST]


def test_the_pools_database(dsn: str, jobs: Jobs) -> None:
    """It is also that of results and workers, however the pool names it."""
    parts = conninfo_to_dict(dsn)
    named = {"dbname": parts.pop("dbname"), "autocommit": True, "prepare_threshold": None}
    rest = make_conninfo(**parts)
    for place, kwargs in ((rest, named), (lambda: rest, named), (rest, lambda: named)):
        with pool_of(place, kwargs=kwargs) as pool:  # type: ignore[arg-type]
            app = App(connection=pool)
            assert (
                conninfo_to_dict(app.source.conninfo()).items()
                >= {**parts, "dbname": named["dbname"]}.items()
            )
            app.task(name="t")(lambda: 5)
            job = app.defer("t")
            app.run_worker(drain=True)
            assert job.result(60) == 5
            app.close()
    assert len(jobs()) == 3


async def test_a_pool_that_awaits_its_dsn(dsn: str, jobs: Jobs) -> None:
    async def find() -> str:
        return dsn

    async with async_pool_of(find) as pool:  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="the pool awaits its DSN: give the App a dsn, too"):
            App(connection=pool)
        app = App(dsn, connection=pool)
        app.task(name="t")(lambda: 5)
        job = await app.defer_async("t")
        await app.run_worker_async(drain=True)
        assert await job.result_async(60) == 5
        await app.close_async()


async def until_beating(worker: Worker, condition: Callable[[], Any]) -> Any:
    """Wait until the condition holds, while heartbeats follow each other."""

    def holds() -> Any:
        worker.heartbeat.poke()
        return condition()

    return await until(holds)


async def test_a_dsn_that_can_not_be_found_for_a_while(
    dsn: str, jobs: Jobs, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """As while a service that issues passwords is down: the worker and its heartbeats go on."""
    is_down = False

    def find() -> str:
        if is_down:
            raise RuntimeError("no answer from the service")
        return dsn

    pool: Any = ConnectionPool(find, min_size=1, open=False)  # type: ignore[arg-type]
    app = App(connection=pool)
    app.task(name="t")(lambda: 5)
    others = (
        "from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and backend_type = 'client backend'"
    )
    with pool:
        # So long may an answer take. They are sent earlier, as they are asked for.
        async with running(app, heartbeat_every=60, dead_after=600) as worker:
            await until(lambda: worker.state.is_waiting)
            # the pool's, and the worker's three
            await until_beating(
                worker, lambda: len(conn.execute(f"select {others}").fetchall()) == 4
            )
            is_down = True
            conn.execute(f"select pg_terminate_backend(pid) {others}")
            for said in ("of their own: no answer from", "the connection was lost: no answer from"):
                await until_beating(worker, lambda said=said: said in caplog.text)
            beat = worker.heartbeat.beat_at
            is_down = False
            await until_beating(worker, lambda: worker.heartbeat.beat_at > beat)
            conn.execute("select queue.defer('t')")
            await jobs.end()


async def test_heartbeats_without_a_connection_of_their_own(dsn: str, conn: Connection) -> None:
    """As where the server accepts no more: they go over the one on which the worker listens."""
    is_down = False

    def find() -> str:
        if is_down:
            raise RuntimeError("no answer from the service")
        return dsn

    sessions = (
        "select pid from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()"
    )
    # Not over the worker's first connection, as where the own one did not open in time.
    beats = (
        f"{sessions} and query ~ 'queue.heartbeat' and backend_start > "
        f"(select min(backend_start) from pg_stat_activity where pid in ({sessions}))"
    )
    pool: Any = ConnectionPool(find, open=False)  # type: ignore[arg-type]
    # So long may an answer take. They are sent earlier, as they are asked for.
    async with running(App(connection=pool), heartbeat_every=60, dead_after=600) as worker:
        await until(lambda: worker.state.is_waiting)
        ((own,),) = await until_beating(worker, lambda: conn.execute(beats).fetchall())
        is_down = True
        conn.execute("select pg_terminate_backend(%s)", (own,))
        await until(lambda: (own,) not in conn.execute(sessions).fetchall())
        for _ in range(3):
            beat = worker.heartbeat.beat_at
            await until_beating(worker, lambda beat=beat: worker.heartbeat.beat_at > beat)
        is_down = False


@pytest.mark.parametrize("error", [RuntimeError("no answer"), psycopg.ProgrammingError("bad DSN")])
async def test_a_dsn_that_can_not_be_found_at_first(dsn: str, error: Exception) -> None:
    """The worker ends, as it may never be found."""

    def find() -> str:
        raise error

    pool: Any = ConnectionPool(find, open=False)  # type: ignore[arg-type]
    with pytest.raises(type(error), match=str(error)):
        await Worker(App(connection=pool)).run_async()


def test_another_database_has_other_connections(dsn: str, jobs: Jobs) -> None:
    pool: Any = ConnectionPool("host=/nowhere", open=False)
    app = App(connection=pool)
    with app.bind(dsn).active():
        app.defer("t")
    app.move(dsn)
    app.defer("t")
    app.close()
    assert len(jobs()) == 2


@pytest.mark.parametrize("given", [None, "dsn", "connection", ("pool", "pool"), ()])
def test_what_is_no_pool(dsn: str, given: Any) -> None:
    pool: Any = ConnectionPool(dsn, open=False)
    given = (pool, pool) if given == ("pool", "pool") else given
    with pytest.raises(TypeError, match="connection of an App must be a ConnectionPool or an A"):
        App(dsn, connection=given)


async def test_a_hook_opens_the_pool_of_a_worker(dsn: str, jobs: Jobs) -> None:
    pool: Any = AsyncConnectionPool(dsn, min_size=1, open=False)
    app = App(connection=pool)

    @app.task(name="outer")
    async def outer() -> None:
        await app.defer_async("inner", held=True)

    @app.on("worker_start")
    async def start(_: Any) -> None:
        await pool.open()

    @app.on("worker_stop")
    async def stop(_: Any) -> None:
        await pool.close()

    first = App(dsn).defer("outer")
    await app.run_worker_async(drain=True)
    assert pool.closed
    assert jobs.states() == {first.id: "succeeded", first.id + 1: "held"}

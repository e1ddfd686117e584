"""Workers whose connections are cut or half open, answers that are lost, servers that go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
import sqlalchemy as sa
import sqlalchemy.ext.asyncio as sa_async
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import orm

from pgdefer import App
from pgdefer.client.client import Client
from pgdefer.database import connection, sql
from pgdefer.database.embedded import EmbeddedServer, temporary_server
from pgdefer.tasks.registry import Registry
from pgdefer.worker.listener import Sleep, SleepListener
from support import install, url_of

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


@pytest.mark.long
async def test_connections_that_are_cut(app: App, jobs: Jobs, conn: Connection) -> None:
    runs: dict[int, int] = {}

    @app.task
    async def task(n: int) -> int:
        runs[n] = runs.get(n, 0) + 1
        await asyncio.sleep(0.002)
        return n

    async with running(app, concurrency=10) as worker:
        made = task.defer_many([{"n": n} for n in range(1000)])
        for _ in range(8):
            done = worker.finished
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
            await until(lambda done=done: worker.finished > done)
        rows = await jobs.end()
    names = ("id", "result", "state", "attempts", "crashes")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (job.id, n, "succeeded", 1, 0) for n, job in enumerate(made)
    ]
    # A claim whose answer was cut off is given back and made again; no job runs twice.
    assert runs == dict.fromkeys(range(1000), 1)


async def test_a_connection_that_is_cut_at_the_start(
    app: App, jobs: Jobs, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = []

    def cutting(kind: type, name: str) -> None:
        real = getattr(kind, name)

        async def cut(self: Any, connection: Any, **options: Any) -> Any:
            if cuts.count(name) < 2:
                cuts.append(name)
                conn.execute("select pg_terminate_backend(%s)", (connection.info.backend_pid,))
            return await real(self, connection, **options)

        monkeypatch.setattr(kind, name, cut)

    @app.recurring("@yearly", name="s")
    @app.task
    async def task() -> None: ...

    job = await task.defer_async()
    cutting(Client, "register_async")
    cutting(Registry, "_register_schedules")
    async with running(app):
        await jobs.end()
    assert len(cuts) == 4
    assert jobs.states() == {job.id: "succeeded"}
    assert conn.execute("select name from queue.schedules").fetchall() == [("s",)]


async def test_a_worker_that_cannot_say_that_it_is_busy(
    dsn: str, conn: psycopg.Connection[Any], jobs: Jobs
) -> None:
    app = App(make_conninfo(dsn, options="-c lock_timeout=50ms"))
    may_end = asyncio.Event()

    @app.task(name="waiting")
    async def waiting() -> None:
        await may_end.wait()

    async with running(app, concurrency=1) as worker:
        await until(lambda: worker.id is not None and worker.listener.is_first)
        session = worker.listener._connection
        with conn.transaction():
            conn.execute("lock table queue.sleeper in access exclusive mode")
            with psycopg.connect(dsn, autocommit=True) as producer:
                producer.execute("select queue.defer('waiting')")
            # The session has gone, and its lock with it.
            await until(lambda: worker.listener._connection is not session)
        may_end.set()
        assert [row["state"] for row in await jobs.end()] == ["succeeded"]
        app.defer("waiting")
        assert [row["state"] for row in await jobs.end()] == ["succeeded"] * 2


async def test_going_to_sleep_while_the_connection_is_cut(
    app: App, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that listens is the one that called before_sleep."""
    (worker,) = conn.execute("select queue.register_worker('w')").fetchone() or ()
    real, cuts = SleepListener.listen, []

    async def listen(self: SleepListener, channel: str) -> None:
        if len(cuts) < 2:
            cuts.append(channel)
            assert self._connection is not None
            session = [self._connection.info.backend_pid]
            self.close()
            # until its session has ended it keeps the sleep lock from the next one
            alive = "select from pg_stat_activity where pid = %s"
            await until(lambda: conn.execute(alive, session).fetchone() is None)
        await real(self, channel)

    monkeypatch.setattr(SleepListener, "listen", listen)
    names = ["on_work", "on_message", "on_pause", "on_connection_lost"]
    ignored = dict.fromkeys(names, lambda: None)
    listener = SleepListener(app.source, **ignored)
    await listener.before_sleep(worker, None)
    assert len(cuts) == 2
    assert listener._connection is not None
    listening = await (
        await listener._connection.execute("select pg_listening_channels() order by 1")
    ).fetchall()
    assert listening == [("pgdefer",), (f"pgdefer_worker_{worker}",)]
    held = conn.execute(
        "select pid from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock'"
        " and classid = 1885824102 and objid = 1 and granted"
    ).fetchall()
    assert held == [(listener._connection.info.backend_pid,)]
    listener.close()


async def test_jobs_run_beside_a_flood_of_pauses(app: App, dsn: str, conn: Connection) -> None:
    """Any role can send what queue.pause sends."""

    @app.task(name="short")
    async def short() -> None:
        await asyncio.sleep(0.02)

    def flood() -> None:
        every = "select pg_notify('pgdefer_worker_' || w.id, 'pause') from queue.workers w"
        with psycopg.connect(dsn, autocommit=True) as other:
            while not has_ended.is_set():
                other.execute(every)

    has_ended = threading.Event()
    await short.defer_many_async([{}] * 200)
    flooding = asyncio.create_task(asyncio.to_thread(flood))
    rest = "select from queue.jobs where state <> 'succeeded'"
    try:
        async with running(app, concurrency=2):
            await until(lambda: conn.execute(rest).fetchone() is None, 120)
    finally:
        has_ended.set()
        await flooding


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_listening_connection_that_is_cut(
    app: App, jobs: Jobs, conn: Connection, is_busy: bool
) -> None:
    started = asyncio.Event()

    @app.task
    async def slow() -> None:
        started.set()
        await asyncio.sleep(60)

    def session() -> int | None:
        connection = worker.listener._connection
        return None if connection is None else connection.info.backend_pid

    async with running(app, concurrency=1, heartbeat_every=60.0, dead_after=300.0) as worker:
        if is_busy:
            job = await slow.defer_async()
            await started.wait()
        else:
            await until(
                lambda: worker.id and worker.listener.holds_sleep_lock and worker.state.is_waiting
            )
        first = session()
        assert first is not None
        conn.execute("select pg_terminate_backend(%s)", (first,))
        await until(lambda: session() not in (None, first))
        if not is_busy:
            await until(lambda: worker.listener.holds_sleep_lock and worker.state.is_waiting)
            job = await slow.defer_async()
            await started.wait()
        # The next heartbeat is a minute away: only a notification reports this.
        await until(lambda: len(worker.listener._channels) == 2)
        conn.execute("select queue.cancel(%s, abort => true)", (job.id,))
        await jobs.end()
    assert jobs.states() == {job.id: "cancelled"}


class Line:
    """A socket between worker and server that can hold back or drop data."""

    def __init__(self, server: Path, folder: Path) -> None:
        self._server = server
        self.folder = folder
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.answers_to_drop = 0
        self.dropped = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_unix_server(
            self._connected, self.folder / ".s.PGSQL.5432"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_unix_connection(self._server / ".s.PGSQL.5432")
        self._writers += [writer, there]
        await asyncio.gather(
            self._pass(reader, there, is_answer=False),
            self._pass(there_reader, writer, is_answer=True),
        )

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if is_answer and self.answers_to_drop and b"lost-job" in data:
                    self.answers_to_drop -= 1
                    self.dropped += 1
                    self.cut()
                    return
                await self.is_open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
async def line(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Line]:
    async with Line(server.socket_folder, tmp_path) as line:
        yield line


def through(line: Line, dsn: str) -> App:
    return App(make_conninfo(**(conninfo_to_dict(dsn) | {"host": str(line.folder)})))


async def test_claims_whose_answer_was_lost_go_back(
    dsn: str, jobs: Jobs, line: Line, conn: Connection
) -> None:
    app = through(line, dsn)
    seen = []

    @app.task(name="lost-job")
    async def task(n: int) -> None:
        seen.append(n)

    line.answers_to_drop = 2
    async with running(app):
        for n in range(3):
            conn.execute("select queue.defer('lost-job', jsonb_build_object('n', %s::int))", (n,))
            await jobs.end()
    assert line.dropped == 2
    assert seen == [0, 1, 2]
    assert [row["attempts"] for row in jobs()] == [1, 1, 1]


@pytest.mark.parametrize("refused", ["CLAIMS", "FINISH_MANY"])
async def test_lost_claims_that_cannot_be_given_back_at_once(
    app: App, jobs: Jobs, conn: Connection, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker tries again, and does not end."""
    monkeypatch.setattr("pgdefer.worker.fetcher.LOST_CLAIM_CHECKS", (0.0,))
    monkeypatch.setattr("pgdefer.worker.fetcher.LOST_CLAIM_AGAIN", 0.05)
    real = connection.Connection.call
    refusals = []

    async def call(self: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
        if statement is getattr(sql, refused) and len(refusals) < 2:
            refusals.append(statement)
            raise psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")
        return await real(self, statement, **given)

    async with running(app, ["a"], poll_every=0.05) as worker:
        await until(lambda: worker.id is not None)
        conn.execute("select queue.defer('t', queue => 'b')")
        # As for a fetch whose answer was lost.
        conn.execute("select queue.fetch(%s, '{b}', 1)", [worker.id])
        monkeypatch.setattr(connection.Connection, "call", call)
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        await until(lambda: list(jobs.states().values()) == ["ready"])
        assert worker.id is not None
    assert len(refusals) == 2


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "asleep"])
async def test_lost_claims_are_looked_for_again(
    app: App, jobs: Jobs, conn: Connection, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while all slots are taken, or nothing wakes the worker."""
    monkeypatch.setattr("pgdefer.worker.fetcher.LOST_CLAIM_CHECKS", (0.0, 1.0))
    real_call, real_sleep = connection.Connection.call, SleepListener.before_sleep
    checks = 0

    async def call(self: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
        nonlocal checks
        rows = await real_call(self, statement, **given)
        if statement is sql.CLAIMS and not checks:
            # As for a fetch that the network delivers late.
            conn.execute("select queue.fetch(%s, '{b}', 1)", [given["worker"]])
        checks += statement is sql.CLAIMS
        return rows

    async def before_sleep(self: SleepListener, *given: Any) -> Sleep:
        return (await real_sleep(self, *given))._replace(seconds=3600.0)

    monkeypatch.setattr(connection.Connection, "call", call)
    monkeypatch.setattr(SleepListener, "before_sleep", before_sleep)
    begun, end = asyncio.Event(), asyncio.Event()

    @app.task(name="busy", queue="a")
    async def busy() -> None:
        begun.set()
        await end.wait()

    app.defer("t", queue="b")
    app.close()
    async with running(app, ["a"], concurrency=1) as worker:
        await until(lambda: worker.id is not None)
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        if is_busy:
            busy.defer()
            await begun.wait()
        try:
            await until(lambda: checks >= 2, 60)
        finally:
            end.set()
        await until(lambda: next(iter(jobs.states().values())) == "ready")


async def test_a_half_open_connection(
    jobs: Jobs,
    line: Line,
    conn: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pgdefer.database.watchdog.CALL_TIMEOUT", 0.5)
    app = through(line, conn.info.dsn)

    @app.task(name="t")
    async def task() -> None: ...

    async with running(app, heartbeat_every=0.5) as worker:
        await until(lambda: worker.id)
        conn.execute("select queue.defer('t')")
        await jobs.end()
        line.is_open.clear()
        conn.execute("select queue.defer('t')")
        await until(lambda: "the connection was lost: " in caplog.text)
        line.is_open.set()
        await jobs.end()
    assert worker.finished == 2
    names = ("id", "state", "attempts", "crashes")
    assert [tuple(row[name] for name in names) for row in jobs()] == [
        (1, "succeeded", 1, 0),
        (2, "succeeded", 1, 0),
    ]


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "restarted"])
async def test_a_server_that_goes_comes_back(how: str) -> None:
    with temporary_server(durable=True) as server:
        install(server, "postgres")
        app = App(server.dsn("postgres"))
        runs: dict[int, int] = {}

        @app.task
        async def task(n: int) -> None:
            runs[n] = runs.get(n, 0) + 1
            await asyncio.sleep(0.01)

        async with running(app, concurrency=5) as worker:
            made = task.defer_many([{"n": n} for n in range(200)])
            await until(lambda: len(runs) > 50)
            if how == "killed":
                pid = server.status().pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.5)
            else:
                await asyncio.to_thread(server._stop, "fast")
            await asyncio.to_thread(server.ensure_running)
            await until(lambda: worker.finished >= 200)
            app.close()
            made += task.defer_many([{"n": n} for n in range(200, 210)])
            await until(lambda: worker.finished >= 210)
        app.close()
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
            shown = conn.execute(
                "select id, (args ->> 'n')::int, state, attempts, crashes"
                " from queue.jobs order by id"
            ).fetchall()
            assert conn.execute("select * from queue.check()").fetchall() == []
    # No job is lost and none runs twice: the worker is alive, and its claims are valid.
    assert shown == [(job.id, n, "succeeded", 1, 0) for n, job in enumerate(made)]
    assert runs == dict.fromkeys(range(210), 1)


@pytest.mark.parametrize("how", ["sync", "async", "session", "async session"])
async def test_a_half_open_connection_of_a_handler(
    jobs: Jobs,
    line: Line,
    conn: Connection,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """Its last statement has a time limit: the transaction is lost then, and the job runs again."""
    monkeypatch.setattr("pgdefer.database.watchdog.CALL_TIMEOUT", 0.5)
    app = through(line, conn.info.dsn)
    runs: list[int] = []
    url = url_of(app.source.conninfo())

    async def close() -> None:
        runs.append(1)
        if len(runs) == 1:
            line.is_open.clear()

    loop = asyncio.get_running_loop()

    def sync(connection: Any) -> None:
        connection.execute(sa.text("select 1") if "session" in how else "select 1")
        asyncio.run_coroutine_threadsafe(close(), loop).result()

    async def coroutine(connection: Any) -> None:
        await connection.execute(sa.text("select 1") if "session" in how else "select 1")
        await close()

    engine, async_engine = sa.create_engine(url), sa_async.create_async_engine(url)
    makers: dict[str, Any] = {
        "session": orm.sessionmaker(engine),
        "async session": sa_async.async_sessionmaker(async_engine),
    }
    function: Any = coroutine if "async" in how else sync
    app.task(function, name="t", transactional=makers.get(how, True))
    async with running(app) as worker:
        conn.execute("select queue.defer('t')")
        await until(lambda: worker.finished)
        line.is_open.set()
        await jobs.end()
    engine.dispose()
    await async_engine.dispose()
    (row,) = jobs()
    assert (row["state"], row["failures"], row["crashes"], len(runs)) == ("succeeded", 0, 1, 2)


@pytest.mark.parametrize("when", ["the last statement", "commit"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_server_that_can_not_end_a_transaction(
    app: App, jobs: Jobs, conn: Connection, when: str, is_async: bool
) -> None:
    """As with a full disk: this does not count as a failure of the job."""
    conn.execute(
        """
        create sequence public.tries;
        grant all on sequence public.tries to public;
        create function public.refuse() returns trigger language plpgsql as $$
        begin
          if nextval('public.tries') = 1 then
            raise exception 'no space left on device' using errcode = '53100';
          end if;
          return null;
        end $$
        """
    )
    conn.execute(
        "create constraint trigger refuse after insert on queue.finished deferrable initially "
        + ("immediate" if when == "the last statement" else "deferred")
        + " for each row execute function public.refuse()"
    )

    @app.task(name="sync", transactional=True)
    def sync(connection: psycopg.Connection[Any]) -> None:
        connection.execute("select 1")

    @app.task(name="async", transactional=True)
    async def coroutine(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("select 1")

    app.defer("async" if is_async else "sync")
    async with running(app):
        (row,) = await jobs.end()
    assert (row["state"], row["failures"], row["crashes"]) == ("succeeded", 0, 1)
    conn.execute("drop trigger refuse on queue.finished")

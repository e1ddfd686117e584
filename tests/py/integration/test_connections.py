"""The number of connections, and the fate of jobs if no connection is available."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgdefer import App, JobAborted, JobContext, Worker, current_job
from pgdefer.database import connection, pool
from pgdefer.database.source import Source
from pgdefer.errors import POOLER_HINT, describe, translated

from .conftest import Jobs, running, until, wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


@pytest.fixture
def narrow(dsn: str, conn: Connection) -> Iterator[str]:
    """A role that may open five connections."""
    conn.execute("create role narrow login connection limit 5")
    for kind in ("worker", "producer"):
        conn.execute("select queue.grant_access('narrow', %s)", (kind,))
    yield make_conninfo(dsn, user="narrow")
    conn.execute("select queue.revoke_access('narrow')")
    conn.execute("drop role narrow")


async def test_a_job_waits_for_the_connection_of_its_transaction(narrow: str, jobs: Jobs) -> None:
    """The job is not to blame: the worker already has three."""
    app = App(narrow)

    @app.task(transactional=True, name="sync")
    def sync(connection: Connection) -> None:
        connection.execute("select pg_sleep(0.02)")

    @app.task(transactional=True, name="async")
    async def coroutine(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("select pg_sleep(0.02)")

    await app.defer_many_async([sync.prepare() for _ in range(10)])
    await app.defer_many_async([coroutine.prepare() for _ in range(10)])
    await app.close_async()
    async with running(app, concurrency=20):
        rows = await jobs.end()
    assert {(row["state"], row["failures"], row["claims"]) for row in rows} == {("succeeded", 0, 1)}


MODULE = """
from pgdefer import App

app = App({dsn!r})

@app.task(transactional=True, name="process", run_in="process")
def process(connection) -> None: ...

@app.task(transactional=True, name="sync")
def sync(connection) -> None: ...

@app.task(transactional=True, name="async")
async def coroutine(connection) -> None: ...
"""


@pytest.fixture
def waiting(narrow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """An app whose tasks need a connection; a task that it does not know is the database's."""
    (tmp_path / "waiting_tasks.py").write_text(MODULE.format(dsn=narrow))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("waiting_tasks").app
    del sys.modules["waiting_tasks"]


@contextlib.asynccontextmanager
async def used_up(narrow: str, conn: Connection) -> AsyncIterator[None]:
    """Take the connections that a worker, which has started, leaves of those of the role."""
    own = "select count(*) from pg_stat_activity where usename = 'narrow'"
    await until(lambda: conn.execute(own).fetchone() == (3,))
    with contextlib.ExitStack() as taken:
        # A session that has just ended may count a moment longer than it is seen.
        while conn.execute(own).fetchone() != (5,):
            with contextlib.suppress(psycopg.OperationalError):
                taken.enter_context(contextlib.closing(psycopg.connect(narrow)))
            await asyncio.sleep(0)
        yield


WAITING = pytest.mark.parametrize("task", ["async", "sync", "process", "unknown"])


@WAITING
async def test_a_job_that_waits_for_a_connection_goes_back_at_a_stop(
    waiting: App,
    jobs: Jobs,
    conn: Connection,
    caplog: pytest.LogCaptureFixture,
    task: str,
) -> None:
    def waits() -> bool:
        begun = any(process.jobs for process in worker._processes._busy.values())
        return begun or "waits for a connection" in caplog.text

    worker = Worker(waiting, max_jobs=5)
    ends = asyncio.create_task(worker.run_async())
    async with used_up(waiting.source.conninfo(), conn):
        conn.execute("select queue.defer(%s)", [task])
        await until(waits)
        worker.stop()
        await asyncio.wait_for(ends, 300)
    (row,) = jobs()
    assert (row["state"], row["attempts"], row["failures"]) == ("ready", 0, 0)
    assert (worker.given_back, worker.state.jobs_left) == (0, 5)


@WAITING
async def test_a_job_whose_timeout_passes_while_it_waits_for_a_connection_goes_back(
    waiting: App, narrow: str, jobs: Jobs, conn: Connection, task: str
) -> None:
    async with running(waiting), used_up(narrow, conn):
        defer = 'select queue.defer(%s, options => \'{"timeout": "300 ms"}\')'
        conn.execute(defer, [task])
        await until(lambda: jobs()[0]["claims"] > 1 or jobs()[0]["failures"])
        (row,) = jobs()
        assert (row["failures"], row["error"]) == (0, None)


async def test_a_middleware_that_swallows_that_a_job_goes_back(
    narrow: str,
    jobs: Jobs,
    conn: Connection,
    is_async: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    @contextlib.contextmanager
    def swallow(_job: JobContext) -> Iterator[None]:
        with contextlib.suppress(JobAborted):
            yield

    app = App(narrow, middleware=[swallow])

    @app.task(transactional=True, name="sync")
    def sync(connection: Connection) -> None: ...

    @app.task(transactional=True, name="async")
    async def coroutine(connection: psycopg.AsyncConnection[Any]) -> None: ...

    async with running(app) as worker, used_up(narrow, conn):
        conn.execute("select queue.defer(%s)", ["async" if is_async else "sync"])
        await until(lambda: "waits for a connection" in caplog.text)
        worker.stop()
        await until(lambda: worker.id is None)
    assert list(jobs.states().values()) == ["ready"]


async def test_a_job_that_waits_for_a_connection_may_be_cancelled(
    narrow: str, jobs: Jobs, conn: Connection
) -> None:
    app = App(narrow)

    @app.task(transactional=True, name="t")
    def task(connection: Connection) -> None:
        raise AssertionError("there is no connection")

    async with running(app), used_up(narrow, conn):
        (id,) = conn.execute("select queue.defer('t')").fetchone() or ()
        await until(lambda: jobs()[0]["state"] == "running")
        conn.execute("select queue.cancel(%s, true)", [id])
        (row,) = await jobs.end()
    assert (row["state"], row["failures"]) == ("cancelled", 0)


async def test_many_calls_at_once_share_connections(narrow: str, jobs: Jobs) -> None:
    async with App(narrow, max_connections=2) as app:
        deferred = await asyncio.gather(*(app.defer_async("t") for _ in range(100)))
        with ThreadPoolExecutor(20) as pool:
            deferred += list(pool.map(app.defer, ["t"] * 100))
    assert len({job.id for job in deferred}) == len(jobs()) == 200


async def defer_many_at_once(app: App, kind: str) -> None:
    if kind == "coroutines":
        await asyncio.gather(*(app.defer_async("t") for _ in range(50)))
    else:
        with ThreadPoolExecutor(50) as threads:
            await asyncio.gather(
                *(asyncio.wrap_future(threads.submit(app.defer, "t")) for _ in range(50))
            )


KINDS = ["threads", "coroutines"]


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep spare connections for a minute, and wait as long for the end of their sessions."""
    monkeypatch.setattr(pool, "_MAKING_ROOM", 60.0)
    spare = pool._Spare()
    spare.REST = 60.0
    monkeypatch.setattr(pool, "_SPARE", spare)


@pytest.mark.usefixtures("lasting")
@pytest.mark.parametrize("kind", KINDS)
async def test_connections_stay_open_while_many_calls_use_them(
    dsn: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    opened: list[str] = []
    connect = "_connect" if kind == "threads" else "_connect_async"
    real = getattr(Source, connect)

    def counted(source: Source, conninfo: str) -> Any:
        opened.append(conninfo)
        return real(source, conninfo)

    monkeypatch.setattr(Source, connect, counted)
    async with App(dsn, max_connections=12) as app:
        for _ in range(20):
            await defer_many_at_once(app, kind)
        assert len(opened) <= 12


async def test_spare_connections_are_closed_soon(dsn: str, conn: Connection) -> None:
    own = "select count(*) from pg_stat_activity where application_name = 'spare'"
    async with App(make_conninfo(dsn, application_name="spare")) as app:
        for kind in KINDS:
            await defer_many_at_once(app, kind)
        await until(lambda: conn.execute(own).fetchone() == (8,))
    await until(lambda: conn.execute(own).fetchone() == (0,))


@pytest.mark.usefixtures("lasting")
@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]])
async def test_spare_connections_make_room_for_others(
    narrow: str, conn: Connection, jobs: Jobs, kinds: list[str]
) -> None:
    """Else the second would be refused: 4 + 20 are as many as there may be."""
    conn.execute("alter role narrow connection limit 24")
    async with App(narrow) as app:
        for kind in kinds:
            await defer_many_at_once(app, kind)
    assert len(jobs()) == 100


@pytest.mark.usefixtures("lasting")
@pytest.mark.parametrize("kind", KINDS)
async def test_one_call_fails_when_the_server_comes_to_only_read(
    dsn: str, conn: Connection, kind: str
) -> None:
    """Not one for each idle connection: new ones find the server that writes."""
    own = "select count(*) from pg_stat_activity where application_name = 'former'"

    def read_only(value: str) -> None:
        conn.execute(f"alter system set default_transaction_read_only = {value}".encode())
        conn.execute("select pg_reload_conf()")

    app = App(make_conninfo(dsn, application_name="former"))
    await defer_many_at_once(app, kind)
    assert conn.execute(own).fetchone() > (4,)
    try:
        read_only("on")
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await _defer_for_ever(app, kind)
    finally:
        read_only("off")
    await until(lambda: conn.execute(own).fetchone() == (0,))


async def _defer_for_ever(app: App, kind: str) -> None:
    while True:
        if kind == "coroutines":
            await app.defer_async("t")
        else:
            await asyncio.to_thread(app.defer, "t")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_database_that_is_down_is_refused_though_others_have_spare_connections(
    dsn: str, kind: str
) -> None:
    down = App("host=127.0.0.1 port=1")  # nothing listens there
    async with App(dsn) as busy:

        async def keep_busy() -> None:
            while True:
                await defer_many_at_once(busy, kind)

        others = asyncio.create_task(keep_busy())
        try:
            for _ in range(3):
                await until(lambda: pool._SPARE._items)
                async with asyncio.timeout(60):
                    with pytest.raises(psycopg.OperationalError):
                        await down.defer_async("t")
                with pytest.raises(psycopg.OperationalError):
                    await asyncio.to_thread(down.defer, "t")
        finally:
            others.cancel()
            await asyncio.gather(others, return_exceptions=True)


def test_event_loops_that_have_ended_leave_no_connections(narrow: str, conn: Connection) -> None:
    app = App(narrow, max_connections=2)

    async def defer() -> None:
        await asyncio.gather(*(app.defer_async("t") for _ in range(10)))

    own = "select count(*) from pg_stat_activity where usename = 'narrow'"
    for _ in range(3):
        asyncio.run(defer())
        assert len(app.client.own_pool_async._loops) == 1
        wait_for(lambda: conn.execute(own).fetchone() == (2,))
    app.client.own_pool_async.close_idle()


async def test_an_app_that_is_forgotten_leaves_no_connection(
    app: App, dsn: str, conn: Connection
) -> None:
    """The event loop watches one, for notifications of results."""
    named = make_conninfo(dsn, application_name="forgotten")
    sessions = "select count(*) from pg_stat_activity where application_name = 'forgotten'"
    id = app.defer("t").id
    for _ in range(2):  # the next one has the same file descriptor
        bound = app.bind(named)
        waiting = asyncio.create_task(bound.result_async(id, 300))
        await until(lambda: conn.execute(sessions).fetchone() == (1,))
        await cancelled(waiting)
        del bound, waiting
        gc.collect()
        await until(lambda: conn.execute(sessions).fetchone() == (0,))


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_who_waits_for_results_keeps_no_one_from_deferring(app: App, jobs: Jobs) -> None:
    """As many as possible wait, for jobs that are yet to be deferred."""
    few = App(app.source.conninfo(), max_connections=1)

    @few.task(name="outer")
    def outer() -> int:
        return few.defer("inner").result(300)

    @few.task(name="inner")
    def inner() -> int:
        return current_job().id

    async with running(few, concurrency=8):
        first = [few.defer("outer") for _ in range(4)]
        assert len({await job.result_async(300) for job in first}) == 4


async def test_calls_within_as_many_transactions_as_there_are_connections(
    app: App, conn: Connection, jobs: Jobs, is_async: bool
) -> None:
    """All have begun before one makes a call; to register a task takes another connection."""
    few = App(app.source.conninfo(), max_connections=2)
    begun, all_begun = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def begin() -> None:
        begun.append(current_job().id)
        if len(begun) == 4:
            loop.call_soon_threadsafe(all_begun.set)

    def late() -> int:
        return 1

    @few.task(name="sync")
    def sync() -> None:
        job = current_job()
        with job.transaction("one") as connection:
            begin()
            asyncio.run_coroutine_threadsafe(all_begun.wait(), loop).result(300)
            job.progress(50)
            few.defer("t")
            few.task(name=f"late{job.id}")(late)
            few.defer(f"late{job.id}", connection=connection)

    @few.task(name="async")
    async def coroutine() -> None:
        job = current_job()
        async with job.transaction_async("one") as connection:
            begin()
            await all_begun.wait()
            await job.progress_async(50)
            await few.defer_async("t")
            few.task(name=f"late{job.id}")(late)
            await few.defer_async(f"late{job.id}", connection=connection)

    ids = [few.defer("async" if is_async else "sync").id for _ in range(4)]
    few.close()
    async with running(few, concurrency=4):
        rows = await jobs.end(*ids)
    assert [row["state"] for row in rows] == ["succeeded"] * 4
    assert conn.execute("select count(*) from queue.jobs where task = 't'").fetchone() == (4,)


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_a_role_whose_transactions_are_of_another_level(
    narrow: str, jobs: Jobs, conn: Connection, level: str
) -> None:
    """A queue needs each statement to see new rows, so all sessions set their level."""
    conn.execute(f"alter role narrow set default_transaction_isolation to '{level}'")
    conn.execute("alter role narrow set default_transaction_deferrable to on")
    app = App(narrow)

    @app.task(transactional=True, name="sync")
    def sync(connection: Connection) -> None:
        connection.execute("select 1")

    @app.task(transactional=True, name="async")
    async def coroutine(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("select 1")

    ids = [app.defer("sync").id, app.defer("async").id]
    app.run_worker(drain=True)
    app.close()
    assert jobs.states() == dict.fromkeys(ids, "succeeded")


def test_a_limit_below_one(dsn: str) -> None:
    with pytest.raises(ValueError, match="max_connections must be at least 1"):
        App(dsn, max_connections=0)


async def test_whether_a_session_is_busy(narrow: str, conn: Connection) -> None:
    """One that waits, too; but none that waits for its client, which may be gone."""
    lock = "select pg_advisory_lock(4711)"
    conn.execute(lock)
    with (
        psycopg.connect(narrow, autocommit=True) as asking,
        psycopg.connect(narrow, autocommit=True) as idle,
        contextlib.closing(psycopg.connect(narrow, autocommit=True)) as waiting,
        contextlib.closing(psycopg.connect(narrow, autocommit=True)) as talking,
    ):

        def is_busy(session: Connection) -> bool:
            call = "select queue.is_busy(%s)"
            ((answer,),) = asking.execute(call, [session.info.backend_pid]).fetchall()
            return bool(answer)

        waiting.pgconn.send_query(lock.encode())
        talking.pgconn.send_query(
            b"copy (select repeat('x', 1000000) from generate_series(1, 1000)) to stdout"
        )
        talks = "select from pg_stat_activity where pid = %s and wait_event = 'ClientWrite'"
        await until(lambda: is_busy(waiting))
        await until(lambda: conn.execute(talks, [talking.info.backend_pid]).rowcount)
        assert is_busy(asking)
        assert not any(map(is_busy, (idle, talking, conn)))
        conn.execute("select pg_advisory_unlock(4711)")
        await until(lambda: not is_busy(waiting))


FORKS = """
import asyncio, contextlib, os, sys
from pgdefer import App
from pgdefer.database.results import Waiter

app = App(sys.argv[1])
client = app.client
waiter = Waiter(client.source)
loop = asyncio.new_event_loop()


def fork():
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0


async def use():
    await app.defer_async("t")
    return await waiter.open()


app.defer("t")
waits = loop.run_until_complete(use())
fork()
(idle,) = client.own_pool._idle.items
((others, _),) = client.own_pool_async._loops.values()
idle.execute("select")
for connection in (*others.items, waits):
    loop.run_until_complete(connection.execute("select"))
with contextlib.ExitStack() as stack:
    lent = [stack.enter_context(client.own_pool.connection()) for _ in range(6)]
    fork()
    for connection in lent:
        connection.execute("select")
print(len(others.items), len(lent))
"""


def test_a_forked_process_that_ends_leaves_connections_alone(dsn: str) -> None:
    """Those that are not in use, those that are lent, and the one that waits for results."""
    program = [sys.executable, "-c", FORKS, dsn]
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=300)
    assert (done.stdout.split(), done.stderr) == (["1", "6"], "")


DEADLINES = """
import os
from pgdefer.database.watchdog import watchdog

with watchdog.watching(object()):
    child = os.fork()
    if not child:
        os._exit(len(watchdog._deadlines))
    print(os.waitpid(child, 0)[1], len(watchdog._deadlines))
"""


def test_a_forked_process_watches_no_connection_of_the_other() -> None:
    """It would cut that at the other process's deadline."""
    done = subprocess.run(
        [sys.executable, "-c", DEADLINES], check=True, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["0", "1"]


@pytest.mark.parametrize("statement", ["execute nowhere", "prepare twice as select 1"])
def test_prepared_statements_of_others_hint_at_a_pooler(conn: Connection, statement: str) -> None:
    conn.execute("prepare twice as select 1")
    with pytest.raises(psycopg.Error) as raised, translated():
        conn.execute(statement.encode())
    assert raised.value.__notes__ == [POOLER_HINT]
    assert describe(raised.value).endswith(f"); {POOLER_HINT}")


def test_only_a_protocol_violation_by_a_prepared_statement_hints_at_a_pooler() -> None:
    for said, is_hint in (("prepared statement did not exist", True), ("bad packet", False)):
        with pytest.raises(psycopg.Error) as raised, translated():
            raise psycopg.errors.ProtocolViolation(said)
        assert hasattr(raised.value, "__notes__") == is_hint


async def test_two_that_open_a_connection_at_once(dsn: str) -> None:
    """A second session would take the place of the one that listens."""
    shared = connection.Connection(Source(dsn))
    one, other = await asyncio.gather(shared.open(), shared.open())
    assert one is other
    shared.close()

"""Through a real pgbouncer in transaction mode: by polling, or with a direct connection."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext import asyncio as sa_async

from bouncer import PROGRAM, Bouncer, bouncing
from pgdefer import App, RetryLater, current_job
from support import url_of
from workers import running, until

Connection = psycopg.Connection[Any]
if PROGRAM is None and os.environ.get("PGDEFER_TEST_STRICT"):
    pytest.fail("there is no pgbouncer here", pytrace=False)
pytestmark = [
    pytest.mark.client,
    pytest.mark.skipif(PROGRAM is None, reason="there is no pgbouncer here"),
]


@pytest.fixture
def bouncer(dsn: str) -> Iterator[Bouncer]:
    with bouncing(dsn) as bouncer:
        yield bouncer


def held(conn: Connection) -> int:
    """The number of held advisory locks: only sleeping listeners hold any."""
    ((count,),) = conn.execute(
        "select count(*) from pg_locks l join pg_database d on d.oid = l.database"
        " where l.locktype = 'advisory' and d.datname = current_database()"
    )
    return int(count)


def states(conn: Connection) -> set[str]:
    return {row[0] for row in conn.execute("select state from queue.jobs")}


@pytest.mark.parametrize("hears", [False, True])
async def test_an_app_works_through_a_pool_of_transactions(
    dsn: str, bouncer: Bouncer, conn: Connection, hears: bool
) -> None:
    app = App(bouncer.dsn, pgbouncer=True, listen_dsn=dsn if hears else None)
    url = url_of(bouncer.dsn)
    engine = sa_async.create_async_engine(
        url, poolclass=sa.NullPool, connect_args={"prepare_threshold": None}
    )
    conn.execute("create table done (n integer)")
    tried: set[int] = set()

    @app.task(name="add", lock="sum:{a}")
    async def add(a: int, b: int) -> int:
        if a not in tried:
            tried.add(a)
            raise RetryLater(message="once more")
        return a + b

    @app.task(name="threaded")
    def threaded(n: int) -> str:
        return threading.current_thread().name

    @app.task(name="own", transactional=True)
    def own(connection: psycopg.Connection[Any], n: int) -> None:
        connection.execute("insert into done values (%s)", [n])

    @app.task(name="session", transactional=sa_async.async_sessionmaker(engine))
    async def session(session: sa_async.AsyncSession, n: int) -> None:
        await session.execute(sa.text("insert into done values (:n)"), {"n": n})

    async with running(app) as worker:
        await until(lambda: worker.id)
        # More at once than there are connections, each statement more often than it takes to be
        # prepared.
        with ThreadPoolExecutor(12) as pool:
            jobs = list(pool.map(threaded.defer, range(60)))
        jobs += [await own.defer_async(n) for n in range(10)]
        async with sa_async.AsyncSession(engine) as mine:
            await session.defer_with_async(mine, 99)
            await mine.rollback()
            jobs += [await session.defer_with_async(mine, n) for n in range(10, 20)]
            assert not conn.execute("select from queue.jobs where task = 'session'").fetchall()
            await mine.commit()
        sums = [await add.defer_async(a, 1) for a in range(5)]
        assert [await job.result_async(300) for job in sums] == [1, 2, 3, 4, 5]
        for job in jobs:
            await job.result_async(300)
        late = await asyncio.to_thread(lambda: threaded.defer(0).result(300))
        assert late.startswith("pgdefer")
        assert states(conn) == {"succeeded"}
        found = conn.execute("select n from done order by n").fetchall()
        assert found == [(n,) for n in range(20)]
        # Asleep: no session state was left in a connection that others use.
        if hears:
            await until(lambda: held(conn) == 1)
        else:
            assert held(conn) == 0
        with psycopg.connect(bouncer.dsn, autocommit=True, prepare_threshold=None) as other:
            for _ in range(10):
                row = other.execute("""
                    select current_setting('pgdefer.sleeper', true),
                      (select count(*) from pg_listening_channels()),
                      (select count(*) from pg_prepared_statements)
                """).fetchone()
                assert row is not None
                assert (row[0] or "", row[1:]) == ("", (0, 0))
    await engine.dispose()
    assert held(conn) == 0


async def test_it_is_woken_past_pgbouncer(dsn: str, bouncer: Bouncer, conn: Connection) -> None:
    app = App(bouncer.dsn, pgbouncer=True, listen_dsn=dsn)
    heard: list[str] = []
    started = asyncio.Event()

    @app.task(name="quick")
    async def quick() -> None: ...

    @app.task(name="endless")
    async def endless() -> None:
        started.set()
        await asyncio.sleep(60)

    async with running(app) as worker:
        await until(lambda: worker.id)
        listener = worker.listener
        on_work, on_message = listener._on_work, listener._on_message
        listener._on_work = lambda: (heard.append("work"), on_work())  # type: ignore[assignment]
        listener._on_message = lambda: (heard.append("message"), on_message())  # type: ignore[assignment]
        for _ in range(5):
            await until(lambda: listener.holds_sleep_lock and worker.state.is_waiting)
            await until(lambda: held(conn) == 1)  # a heartbeat may hold one for a moment
            heard.clear()
            await (await quick.defer_async()).result_async(300)
            await until(lambda: "work" in heard)
        job = await endless.defer_async()
        await started.wait()
        heard.clear()
        conn.execute("select queue.cancel(%s, abort => true)", [job.id])
        await until(lambda: "cancelled" in states(conn))
        assert "message" in heard


@pytest.mark.parametrize("hears", [False, True])
def test_the_command_line(
    dsn: str, bouncer: Bouncer, conn: Connection, tmp_path: Path, hears: bool
) -> None:
    (tmp_path / "shop.py").write_text(
        "import pgdefer\napp = pgdefer.App()\n@app.task(name='quick')\ndef quick(): ...\n"
    )
    conn.execute("select queue.defer('quick') from generate_series(1, 3)")
    command = [sys.executable, "-m", "pgdefer", "worker", "-A", "shop", "--drain", "--pgbouncer"]
    way_past = ["--listen-dsn", dsn] if hears else []
    plain = {name: value for name, value in os.environ.items() if name != "PGDEFER_DSN"}
    refused = subprocess.run(
        [*command, *way_past], cwd=tmp_path, env=plain, capture_output=True, check=False
    )
    assert refused.returncode == 2
    assert b"--dsn" in refused.stderr
    subprocess.run(
        [*command, "--dsn", bouncer.dsn, *way_past], cwd=tmp_path, timeout=300, check=True
    )
    assert states(conn) == {"succeeded"}
    [listens] = conn.execute("select info -> 'listen' from queue.worker").fetchall()
    assert listens == (hears,)


@pytest.mark.parametrize("hears", [False, True])
async def test_pgbouncer_is_restarted(
    dsn: str, bouncer: Bouncer, conn: Connection, hears: bool
) -> None:
    app = App(bouncer.dsn, pgbouncer=True, listen_dsn=dsn if hears else None)
    release = asyncio.Event()
    runs: list[int] = []

    @app.task(name="waits")
    async def waits() -> int:
        runs.append(current_job().id)
        await release.wait()
        return 1

    async with running(app) as worker:
        await until(lambda: worker.id)
        before = await waits.defer_async()
        await until(lambda: states(conn) == {"running"})
        bouncer.stop()
        ((during,),) = conn.execute("select queue.defer('waits')")
        release.set()
        bouncer.start()
        assert await before.result_async(300) == 1
        assert await app.result_async(during, 300) == 1
        after = await waits.defer_async()
        assert await after.result_async(300) == 1
    # The outcome of the first was sent once the way was open again: nothing ran twice. (A claim
    # whose answer was lost with the way is given back, and is no run.)
    assert runs == [before.id, during, after.id]
    assert (
        conn.execute("select state, attempts from queue.jobs").fetchall() == [("succeeded", 1)] * 3
    )

"""Without a DSN: the embedded server starts, gets the queue, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal

import psycopg
import pytest

from pgdefer import App
from pgdefer.database import embedded
from pgdefer.database.embedded import ServerError, temporary_server
from pgdefer.database.pool import is_usable
from pgdefer.database.source import DSN, LOCATING

from .conftest import running, until

pytestmark = pytest.mark.client


async def test_nothing_needs_to_be_set_up() -> None:
    with temporary_server(durable=True) as server:
        app = App(embedded=server)

        @app.task
        async def add(a: int, b: int) -> int:
            return a + b

        first = add.defer(1, 2)
        pid = server.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        (idle,) = app.client.pool._idle.items
        await until(lambda: not is_usable(idle))
        second = add.defer(3, 4)
        await app.run_worker_async(drain=True)
        await app.close_async()
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            rows = conn.execute("select id, state, result from queue.jobs order by id").fetchall()
        assert rows == [(first.id, "succeeded", 3), (second.id, "succeeded", 7)]


@pytest.mark.parametrize("is_set", [False, True])
def test_a_variable_that_is_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_set: bool
) -> None:
    for name in (DSN, *LOCATING, "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    if is_set:
        monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/shop")
    with temporary_server() as server:
        monkeypatch.setattr(embedded, "EmbeddedServer", lambda: server)
        with App() as app:
            app.defer("t")
            said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert any("DATABASE_URL is not used" in each for each in said) == is_set


@pytest.mark.long
async def test_a_server_that_cannot_be_started_again_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with temporary_server(durable=True) as server:
        app = App(embedded=server)
        go_on = asyncio.Event()

        @app.task
        async def wait() -> str:
            await go_on.wait()
            return "done"

        async with running(app, heartbeat_every=1.0) as worker:
            job = wait.defer()
            await until(lambda: worker.executor.running)
            settings = server.data_folder / "postgresql.auto.conf"
            before = settings.read_text()
            settings.write_text("shared_buffers = 'never'")
            pid = server.status().pid
            assert pid is not None
            os.kill(pid, signal.SIGINT)
            for what in ("the connection was lost: pg_ctl", "no heartbeat: pg_ctl"):
                await until(lambda what=what: what in caplog.text)
            with pytest.raises(psycopg.OperationalError, match="never"):
                wait.defer()
            settings.write_text(before)
            go_on.set()
            assert await job.result_async(300) == "done"
            assert job.state() == "succeeded"
            with psycopg.connect(server.dsn(), autocommit=True) as conn:
                seen = conn.execute("select id, last_seen_at from queue.workers").fetchall()
                assert [row[0] for row in seen] == [worker.id]
                later = "select from queue.workers where last_seen_at > %s"
                await until(lambda: conn.execute(later, [seen[0][1]]).fetchall())
                assert conn.execute("select from queue.attempts").fetchall() == []


async def test_a_server_that_cannot_be_started_at_first() -> None:
    with temporary_server() as server:
        pid = server.status().pid
        assert pid is not None
        (server.data_folder / "postgresql.auto.conf").write_text("shared_buffers = 'never'")
        os.kill(pid, signal.SIGINT)
        await until(lambda: server.status().pid is None)
        with pytest.raises(ServerError, match="never"):
            await App(embedded=server).run_worker_async()

"""Without a DSN: the embedded server is started, has the queue installed, and comes back."""

from __future__ import annotations

import os
import signal

import psycopg

from pgdefer import App
from pgdefer._connect import _is_usable
from pgdefer._server import temporary_server

from .conftest import until


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
        (idle,) = app._pool._idle.items
        await until(lambda: not _is_usable(idle))
        second = add.defer(3, 4)
        await app.run_worker_async(drain=True)
        await app.close_async()
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            rows = conn.execute("select id, state, result from queue.jobs order by id").fetchall()
        assert rows == [(first.id, "succeeded", 3), (second.id, "succeeded", 7)]

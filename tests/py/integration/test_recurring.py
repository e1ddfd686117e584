"""Workers register the schedules of @app.recurring, and run them."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App, InvalidParameter, Worker, current_job

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


def schedules(conn: Connection) -> list[tuple[str, str]]:
    return conn.execute("select name, cron from queue.schedules order by name").fetchall()


async def test_runs(app: App, conn: Connection, jobs: Jobs) -> None:
    seen: list[tuple[str, dt.datetime]] = []

    @app.recurring("every 1 second", args={"what": "moment"}, timezone="Europe/Paris")
    @app.recurring("every 1 second", args={"what": "again"})
    @app.task
    async def note(what: str, scheduled_for: dt.datetime) -> None:
        assert current_job().scheduled_for == scheduled_for
        seen.append((what, scheduled_for))

    @app.recurring("* * * * * *")
    def plain() -> None:
        moment = current_job().scheduled_for
        assert moment is not None
        seen.append(("plain", moment))

    async with running(app):
        await until(lambda: len(seen) >= 6)
        for name, _ in schedules(conn):
            conn.execute("select queue.unschedule(%s)", (name,))
        await jobs.end()
    assert {row["state"] for row in jobs()} == {"succeeded"}
    assert len(set(seen)) == len(seen)
    assert {what for what, _ in seen} == {"moment", "again", "plain"}
    delays = [
        (row["started_at"] - dt.datetime.fromisoformat(row["args"]["scheduled_for"]))
        for row in jobs()
    ]
    assert sorted(delays)[len(delays) // 2] < dt.timedelta(seconds=2)
    assert min(delays) > dt.timedelta(0)


async def test_a_job_deferred_by_hand_has_no_moment(app: App, jobs: Jobs) -> None:
    moments: list[dt.datetime | None] = []

    @app.task
    async def note(scheduled_for: dt.datetime | None = None) -> None:
        moments.append(current_job().scheduled_for)

    async with running(app):
        await note.defer_async()
        await jobs.end()
    assert moments == [None]


async def test_changes_in_the_code(
    dsn: str, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    conn.execute("select queue.schedule('by hand', '@daily', 't')")
    conn.execute("select queue.schedule('b', '@daily', 't', options => '{\"source\": \"other\"}')")

    def make(**crons: str) -> App:
        app = App(dsn, name="shop")
        for name, cron in crons.items():
            app.recurring(cron, name=name)(app.task(name="t")(lambda: None))
        return app

    async def start(app: App, **options: Any) -> None:
        async with running(app, **options) as worker:
            await until(lambda: worker.id is not None)

    await start(make(x="@daily", y="@daily"))
    assert schedules(conn) == [(n, "@daily") for n in ("b", "by hand", "x", "y")]
    before = conn.execute("select * from queue.schedules order by name").fetchall()
    await start(make(x="@daily", y="@daily"))
    assert conn.execute("select * from queue.schedules order by name").fetchall() == before
    assert not caplog.records or "no longer" not in caplog.text

    await start(make(y="@hourly"))
    assert schedules(conn)[2:] == [("x", "@daily"), ("y", "@hourly")]
    assert "'x' goes on though this code does not have it" in caplog.text
    await start(make(y="@hourly"), prune_schedules=True)
    assert schedules(conn) == [("b", "@daily"), ("by hand", "@daily"), ("y", "@hourly")]
    assert "'x' was removed" in caplog.text
    await start(make(), prune_schedules=True)
    assert schedules(conn) == [("b", "@daily"), ("by hand", "@daily")]


async def test_what_was_removed_by_hand_stays_so(app: App, conn: Connection) -> None:
    @app.recurring("@daily", name="s")
    async def task() -> None: ...

    async with running(app) as worker:
        first = await until(lambda: worker.id)
        conn.execute("select queue.unschedule('s')")
        # In this order: any call on its next connection then shows that.
        conn.execute("update queue.worker set gone_at = now() where id = %s", (first,))
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where pid <> pg_backend_pid() and datname = current_database()"
        )
        await until(lambda: worker.id not in (None, first))
        assert schedules(conn) == []


@pytest.mark.parametrize(
    ("cron", "options", "message"),
    [
        ("30 2 31 2 *", {}, "invalid cron expression|never"),
        ("@daily", {"timezone": "Mars/Olympus"}, "unknown time zone"),
        ("@daily", {"lock": "{nothing}"}, "lock names a field that args do not fill"),
    ],
)
async def test_what_is_refused(
    app: App, conn: Connection, cron: str, options: dict[str, Any], message: str
) -> None:
    app.recurring("@daily", name="good")(app.task(name="t")(lambda: None))
    app.recurring(cron, name="bad", **options)(app.tasks["t"])
    with pytest.raises(InvalidParameter, match=message):
        await Worker(app).run_async()
    assert schedules(conn) == []


async def test_a_role_that_may_not(
    app: App, dsn: str, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    conn.execute("create role pgdefer_plain login")
    try:
        conn.execute("select queue.grant_access('pgdefer_plain', 'worker')")
        conn.execute(
            "revoke execute on function queue.schedule(text, text, text, jsonb, text, jsonb)"
            " from pgdefer_plain"
        )
        limited = App(f"{dsn} user=pgdefer_plain")

        @limited.recurring("@daily")
        @limited.task(name="t")
        async def task() -> None: ...

        async with running(limited) as worker:
            await until(lambda: worker.id)
        assert "may not register recurring runs" in caplog.text
        conn.execute("select queue.grant_access('pgdefer_plain', 'worker')")
        async with running(limited) as worker:
            await until(lambda: worker.id)
        assert schedules(conn) == [("t", "@daily")]
    finally:
        conn.execute("select queue.revoke_access('pgdefer_plain')")
        conn.execute("drop role pgdefer_plain")


async def test_the_command_line(dsn: str, conn: Connection, tmp_path: Path) -> None:
    module = tmp_path / "shop.py"
    module.write_text(
        "from pgdefer import App\n"
        "app = App()\n"
        "@app.recurring('@daily', name='new')\n"
        "async def task() -> None: ...\n"
    )
    conn.execute("select queue.schedule('old', '@daily', 't', options => '{\"source\": \"shop\"}')")

    async def worker(*options: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pgdefer", "worker", "-A", "shop", "--dsn", dsn, "--drain"),
            *options,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=asyncio.subprocess.PIPE,
        )
        _, error = await process.communicate()
        assert process.returncode == 0
        return error.decode()

    assert "'old' goes on though this code does not have it" in await worker()
    assert [name for name, _ in schedules(conn)] == ["new", "old"]
    assert "'old' was removed" in await worker("--prune-schedules")
    assert [name for name, _ in schedules(conn)] == ["new"]

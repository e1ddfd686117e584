"""A worker with `poll_every`, which asks more often than queue.before_sleep says."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from pgdefer import App, Worker
from pgdefer.cli import _worker

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


def sleeps_of(worker: Worker) -> list[float]:
    """How long each later wait of the worker may last."""
    found: list[float] = []
    wait = worker.state.wait

    async def spied(seconds: float | None) -> bool:
        if seconds is not None:
            found.append(seconds)
        return await wait(seconds)

    worker.state.wait = spied  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("pgbouncer", [False, True])
async def test_no_sleep_is_longer(dsn: str, conn: Connection, jobs: Jobs, pgbouncer: bool) -> None:
    """So it finds the jobs of a session that notifies nobody."""
    app = App(dsn, pgbouncer=pgbouncer)
    app.task(name="t")(lambda: None)
    async with running(app, poll_every=0.05) as worker:
        sleeps = sleeps_of(worker)
        await until(lambda: len(sleeps) >= 5)
        conn.execute("set pgdefer.notify = off")
        conn.execute("select queue.defer('t')")
        await jobs.end()
        sleeping = len(sleeps)
        await until(lambda: len(sleeps) >= sleeping + 5)
    assert max(sleeps) <= 0.05


async def test_of_many_workers_each_polls(app: App, conn: Connection, jobs: Jobs) -> None:
    """Also those that the database would let sleep, because others are before them in the line."""
    app.task(name="t")(lambda: None)
    async with (
        running(app, poll_every=0.05) as first,
        running(app, poll_every=0.05) as second,
        running(app, poll_every=0.05) as third,
    ):
        found = [sleeps_of(worker) for worker in (first, second, third)]
        await until(lambda: min(map(len, found)) >= 5)
        conn.execute("set pgdefer.notify = off")
        conn.execute("select queue.defer('t') from generate_series(1, 50)")
        await jobs.end()
    assert max(map(max, found)) <= 0.05


async def test_no_sleep_is_longer_than_the_database_says(dsn: str) -> None:
    async with running(App(dsn, pgbouncer=True), poll_every=60) as worker:
        sleeps = sleeps_of(worker)
        await until(lambda: len(sleeps) >= 2)
    assert max(sleeps) <= 1


@pytest.mark.parametrize(("arguments", "found"), [(["--poll-every", "0.2"], 0.2), ([], None)])
def test_the_option_of_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, arguments: list[str], found: float | None
) -> None:
    (tmp_path / "polling_app.py").write_text("import pgdefer\napp = pgdefer.App('host=/nowhere')\n")
    monkeypatch.chdir(tmp_path)
    workers: list[Any] = []
    monkeypatch.setattr(_worker, "_run", workers.append)
    _worker.workers(["-A", "polling_app", *arguments], standalone_mode=False)
    assert [worker.poll_every for worker in workers] == [found]

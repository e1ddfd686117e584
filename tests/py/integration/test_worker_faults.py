"""Workers stop as asked, and carry on whatever becomes of the database or the line to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgdefer import App, Retry, Worker, _outcome, current_job
from pgdefer._server import EmbeddedServer, temporary_server
from support import install

from .conftest import Jobs, running, until

Connection = psycopg.Connection[Any]


# Stopping


async def test_a_graceful_stop_lets_jobs_end(app: App, jobs: Jobs) -> None:
    release = asyncio.Event()
    begun = []

    @app.task
    async def slow() -> str:
        begun.append(1)
        await release.wait()
        return "ended"

    @app.task
    def slow_thread() -> str:
        begun.append(1)
        time.sleep(0.3)
        return "ended"

    worker = Worker(app, concurrency=2)
    task = asyncio.create_task(worker.run_async())
    await slow.defer_async()
    await slow_thread.defer_async()
    await until(lambda: len(begun) == 2)
    worker.stop()
    late = await slow.defer_async()
    await asyncio.sleep(0.1)
    assert not task.done()
    release.set()
    await task
    await app.close_async()
    assert [(r["state"], r["result"]) for r in jobs()] == [("succeeded", "ended")] * 2 + [
        ("ready", None)
    ]
    assert late.id in jobs.states()
    assert worker.given_back == 0


async def test_what_did_not_begin_goes_back(app: App, jobs: Jobs) -> None:
    @app.task
    async def first() -> None:
        worker.stop()

    first.defer_many([{}] * 500)
    worker = Worker(app, concurrency=500)
    await worker.run_async()
    await app.close_async()
    states = list(jobs.states().values())
    assert states.count("succeeded") + states.count("ready") == 500
    assert states.count("ready") == worker.given_back > 0
    assert {row["attempts"] for row in jobs() if row["state"] == "ready"} == {0}


@pytest.mark.parametrize("how", ["timeout", "at once", "cancelled"])
async def test_jobs_that_do_not_end_go_back(app: App, jobs: Jobs, how: str) -> None:
    is_over = False
    begun_jobs = []
    unwound = []
    asked = []

    @app.task
    async def polite() -> None:
        begun_jobs.append(1)
        try:
            await asyncio.sleep(60)
        finally:
            unwound.append(1)

    @app.task
    async def deaf() -> None:
        begun_jobs.append(1)
        while not is_over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    @app.task
    def asks() -> None:
        begun_jobs.append(1)
        while not current_job().should_abort():
            time.sleep(0.005)
        asked.append(1)
        current_job().check_abort()

    @app.task
    def stuck() -> None:
        begun_jobs.append(1)
        time.sleep(4)

    worker = Worker(app, shutdown_timeout=0.1 if how == "timeout" else None)
    task = asyncio.create_task(worker.run_async())
    for one in (polite, deaf, asks, stuck):
        await one.defer_async()
    await until(lambda: len(begun_jobs) == 4)
    begun = time.monotonic()
    if how == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        (worker.stop if how == "timeout" else worker.stop_at_once)()
        await task
    assert time.monotonic() - begun < 3
    await app.close_async()
    assert list(jobs.states().values()) == ["ready"] * 4
    assert {row["attempts"] for row in jobs()} == {0}
    assert (unwound, asked) == ([1], [1])
    assert worker.given_back == 4
    is_over = True  # the deaf one would keep the loop from ending


PROGRAM = """
import asyncio, sys, time
from pgdefer import App
app = App({dsn!r})

@app.task(name="slow")
async def slow(seconds: float) -> None:
    print("started", flush=True)
    await asyncio.sleep(seconds)

@app.task(name="deaf")
async def deaf() -> None:
    print("started", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

@app.task(name="stuck")
def stuck() -> None:
    print("started", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    app.run_worker()
    print("ended", flush=True)
"""


@pytest.fixture
def program(dsn: str, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(dsn=dsn))
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_gracefully(
    app: App, jobs: Jobs, program: Callable[[], subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = program()
    assert process.stdout is not None
    app.defer("slow", {"seconds": 0.4})
    assert process.stdout.readline() == "started\n"
    process.send_signal(number)
    assert process.stdout.readline() == "ended\n"
    assert process.wait(5) == 0
    assert list(jobs.states().values()) == ["succeeded"]


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGINT] * 2, [signal.SIGQUIT]]
)
@pytest.mark.parametrize("task", ["slow", "deaf", "stuck"])
def test_signals_that_stop_at_once(
    app: App,
    jobs: Jobs,
    program: Callable[[], subprocess.Popen[str]],
    numbers: list[signal.Signals],
    task: str,
) -> None:
    process = program()
    assert process.stdout is not None
    app.defer(task, {"seconds": 60} if task == "slow" else {})
    assert process.stdout.readline() == "started\n"
    begun = time.monotonic()
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    assert process.wait(5) == 0
    assert time.monotonic() - begun < 3
    assert list(jobs.states().values()) == ["ready"]


def test_a_killed_worker_is_given_up(
    app: App, jobs: Jobs, conn: Connection, program: Callable[[], subprocess.Popen[str]]
) -> None:
    process = program()
    assert process.stdout is not None
    app.defer("slow", {"seconds": 0.2})
    assert process.stdout.readline() == "started\n"
    process.kill()
    process.wait()
    conn.execute("update queue.worker set last_seen_at = last_seen_at - interval '30 s'")
    conn.execute("select queue.reap()")
    (row,) = jobs()
    assert row["crashes"] == 1
    assert [a["outcome"] for a in jobs.attempts()] == ["crashed"]


# The line to the database


async def test_connections_that_are_cut(app: App, jobs: Jobs, conn: Connection) -> None:
    runs: dict[int, int] = {}

    @app.task
    async def task(n: int) -> int:
        runs[n] = runs.get(n, 0) + 1
        await asyncio.sleep(0.002)
        return n

    async with running(app, concurrency=10) as worker:
        task.defer_many([{"n": n} for n in range(1000)])
        for _ in range(8):
            done = worker.finished
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
            await until(lambda done=done: worker.finished > done)
        rows = await jobs.end()
    assert {row["state"] for row in rows} == {"succeeded"}
    assert all(row["result"] == row["args"]["n"] for row in rows)
    # A claim whose answer was cut off is given back and made again; no job runs twice for it.
    assert runs == dict.fromkeys(range(1000), 1)


class Line:
    """A socket between worker and server that can hold back or drop what passes."""

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
        with contextlib.suppress(OSError):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, there, is_answer=False))
                group.create_task(self._pass(there_reader, writer, is_answer=True))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
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


async def test_a_half_open_connection(
    dsn: str, jobs: Jobs, line: Line, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgdefer._link.CALL_LIMIT", 0.5)
    app = through(line, dsn)

    @app.task(name="t")
    async def task() -> None: ...

    async with running(app, heartbeat_every=0.5) as worker:
        await until(lambda: worker.id)
        conn.execute("select queue.defer('t')")
        await jobs.end()
        line.is_open.clear()
        conn.execute("select queue.defer('t')")
        await asyncio.sleep(1.5)
        line.is_open.set()
        await jobs.end(seconds=20)
    assert worker.finished == 2


async def test_a_worker_given_up_for_dead_registers_again(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    cancelled = []
    started = asyncio.Event()

    @app.task(retry=Retry(1))
    async def slow(seconds: float) -> None:
        started.set()
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(current_job().claim)
            raise

    async with running(app, heartbeat_every=0.1) as worker:
        await slow.defer_async(30)
        await started.wait()
        first = worker.id
        conn.execute("update queue.worker set last_seen_at = last_seen_at - interval '1 h'")
        conn.execute("select queue.reap()")
        await until(lambda: worker.id not in (None, first))
        await until(lambda: cancelled)
        (job,) = jobs()
        conn.execute("select queue.cancel(%s, true)", (job["id"],))
        again = await slow.defer_async(0)
        await jobs.end(again.id)
    # The late outcome of the first claim was refused: the job was not ended by it.
    assert next(a["outcome"] for a in jobs.attempts() if a["job_id"] == job["id"]) == "crashed"


async def test_a_server_that_is_killed_comes_back(tmp_path: Path) -> None:
    with temporary_server(durable=True) as server:
        install(server, "postgres")
        app = App(server.dsn("postgres"))
        done = []

        @app.task
        async def task(n: int) -> None:
            done.append(n)
            await asyncio.sleep(0.01)

        async with running(app, concurrency=5) as worker:
            task.defer_many([{"n": n} for n in range(200)])
            await until(lambda: len(done) > 50)
            pid = server.status().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.ensure_running)
            await until(lambda: worker.finished >= 200, 30)
            app.close()
            for n in range(200, 210):
                task.defer(n)
            await until(lambda: worker.finished >= 210, 30)
        app.close()
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
            shown = conn.execute("select state, count(*) from queue.jobs group by state").fetchall()
            assert conn.execute("select * from queue.check()").fetchall() == []
        assert shown == [("succeeded", 210)]


async def test_a_job_that_crashed_runs_alone(app: App, jobs: Jobs, conn: Connection) -> None:
    now: set[int] = set()
    beside: dict[int, set[int]] = {}

    @app.task(name="t")
    async def task() -> None:
        me = current_job().id
        now.add(me)
        for other in now:
            beside.setdefault(other, set()).update(now - {other})
        await asyncio.sleep(0.02)
        now.discard(me)

    suspect = await task.defer_async()
    conn.execute("select queue.register_worker('dead')")
    dead = conn.execute("select max(id) from queue.worker").fetchone()
    assert dead is not None
    assert len(conn.execute("select * from queue.fetch(%s)", dead).fetchall()) == 1
    conn.execute("update queue.worker set last_seen_at = last_seen_at - interval '1 h'")
    conn.execute("select queue.reap()")
    task.defer_many([{}] * 20)
    async with running(app, concurrency=4):
        rows = await jobs.end()
    assert {row["state"] for row in rows} == {"succeeded"}
    assert beside.get(suspect.id, set()) == set()
    assert any(beside.values())


async def test_an_outcome_that_cannot_be_stored_spoils_no_other(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="good")
    async def good() -> int:
        return 1

    @app.task(name="bad")
    async def bad() -> int:
        return 2

    real = _outcome.succeeded

    def spoilt(id: int, claim: int, result: Any = None, codec: Any = None) -> str:
        text = real(id, claim, result, codec)
        return text.replace("2}", '"\\u0000"}') if result == 2 else text

    monkeypatch.setattr(_outcome, "succeeded", spoilt)
    app.defer_many([(bad if n == 7 else good).prepare() for n in range(20)])
    async with running(app):
        rows = await jobs.end()
    ends = {row["task"]: (row["state"], row["result"], row["error"]) for row in rows}
    assert ends == {
        "good": ("succeeded", 1, None),
        "bad": ("failed", None, "PgDeferError: the outcome can't be stored"),
    }

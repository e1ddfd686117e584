"""Workers stop as asked, and carry on whatever becomes of the database or the line to it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import threading
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


def give_up(conn: Connection) -> None:
    """Have all workers taken for dead."""
    with conn.transaction():  # or a heartbeat comes between
        conn.execute("update queue.worker set last_seen_at = last_seen_at - interval '1 h'")
        conn.execute("select queue.reap()")


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
import asyncio, json, sys, time
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
    app.run_worker(**json.loads(sys.argv[1]))
    print("ended", flush=True)
"""

Program = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def program(dsn: str, tmp_path: Path) -> Iterator[Program]:
    """Start the program, with options for its worker."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(dsn=dsn))
    started: list[subprocess.Popen[str]] = []

    def start(**options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, str(path), json.dumps(options)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_gracefully(
    app: App, jobs: Jobs, program: Program, number: signal.Signals
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
    program: Program,
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
    app: App, jobs: Jobs, conn: Connection, program: Program
) -> None:
    process = program()
    assert process.stdout is not None
    app.defer("slow", {"seconds": 0.2})
    assert process.stdout.readline() == "started\n"
    process.kill()
    process.wait()
    give_up(conn)
    (row,) = jobs()
    assert (row["state"], row["crashes"]) == ("ready", 1)
    assert [a["outcome"] for a in jobs.attempts()] == ["crashed"]


async def test_a_graceful_stop_goes_on_to_say_that_it_lives(app: App, jobs: Jobs) -> None:
    begun = asyncio.Event()

    @app.task
    async def slow() -> str:
        begun.set()
        await asyncio.sleep(3.5)
        return "ended"

    worker = Worker(app, heartbeat_every=0.3, dead_after=1.5)
    task = asyncio.create_task(worker.run_async())
    job = await slow.defer_async()
    await begun.wait()
    worker.stop()
    async with running(app, ["other"], heartbeat_every=0.3):  # reaps what is dead
        await task
    (row,) = jobs()
    assert (row["id"], row["state"], row["attempts"]) == (job.id, "succeeded", 1)
    assert jobs.attempts() == []


async def test_an_event_loop_that_is_blocked(app: App, jobs: Jobs, conn: Connection) -> None:
    """As for a minute of the default's 30 s: the heart has a thread of its own."""
    is_over = False

    @app.task
    async def blocks() -> None:
        time.sleep(3.5)  # noqa: ASYNC251

    @app.task
    async def beside() -> None:
        await asyncio.sleep(0.1)

    def reap() -> None:
        while not is_over:
            conn.execute("select queue.reap()")
            time.sleep(0.1)

    reaper = asyncio.create_task(asyncio.to_thread(reap))
    async with running(app, heartbeat_every=0.3, dead_after=1.5) as worker:
        first = await beside.defer_async()
        second = await blocks.defer_async()
        await until(lambda: worker.finished == 2, 20)
        number = worker.id
        is_over = True
        await reaper
        rows = await jobs.end()
        assert worker.id == number
    assert [(row["id"], row["state"], row["attempts"], row["crashes"]) for row in rows] == [
        (first.id, "succeeded", 1, 0),
        (second.id, "succeeded", 1, 0),
    ]


def test_a_zombie_that_wakes_late(app: App, jobs: Jobs, program: Program) -> None:
    options = {"heartbeat_every": 0.3, "dead_after": 1.5, "concurrency": 2}
    zombie = program(**options)
    assert zombie.stdout is not None
    slow = app.defer("slow", {"seconds": 1.0})
    quick = app.defer("slow", {"seconds": 0.0})
    for _ in range(2):
        assert zombie.stdout.readline() == "started\n"
    wait_for(lambda: jobs.states()[quick.id] == "succeeded")
    zombie.send_signal(signal.SIGSTOP)
    successor = program(**options)
    assert successor.stdout is not None
    assert successor.stdout.readline() == "started\n"  # slow, again
    zombie.send_signal(signal.SIGCONT)
    wait_for(lambda: jobs.states()[slow.id] == "succeeded")
    successor.send_signal(signal.SIGTERM)
    assert successor.wait(10) == 0
    # The zombie has registered again.
    after = app.defer("slow", {"seconds": 0.0})
    wait_for(lambda: jobs.states()[after.id] == "succeeded")
    zombie.send_signal(signal.SIGTERM)
    assert zombie.wait(10) == 0
    shown = {row["id"]: row for row in jobs()}
    ends = {id: (row["state"], row["attempts"], row["crashes"]) for id, row in shown.items()}
    assert ends == {
        slow.id: ("succeeded", 2, 1),
        quick.id: ("succeeded", 1, 0),
        after.id: ("succeeded", 1, 0),
    }
    assert [(a["job_id"], a["outcome"]) for a in jobs.attempts()] == [(slow.id, "crashed")]
    assert len({shown[id]["worker_id"] for id in (slow.id, quick.id, after.id)}) == 3


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


async def test_a_thread_that_does_not_heed_its_timeout(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    """It is told; 10 s later its claim is lost, and what it says afterwards is refused."""
    told = threading.Event()
    release = threading.Event()
    runs = []

    @app.task(timeout=dt.timedelta(milliseconds=50), retry=Retry(2))
    def deaf() -> None:
        runs.append(1)
        if len(runs) == 1:
            while not current_job().should_abort():
                time.sleep(0.005)
            told.set()
            release.wait(20)

    async with running(app) as worker:
        job = await deaf.defer_async()
        await asyncio.to_thread(told.wait, 10)
        assert jobs.states()[job.id] == "running"
        late = "interval '11 s'"
        conn.execute(f"update queue.live set claimed_at = claimed_at - {late}")  # type: ignore[arg-type]
        conn.execute(f"update queue.lease set expires_at = expires_at - {late}")  # type: ignore[arg-type]
        conn.execute("select queue.reap()")
        await until(lambda: len(runs) == 2)
        await jobs.end()
        release.set()
        await until(lambda: worker.finished == 2)
    (row,) = jobs()
    assert (row["state"], row["attempts"], row["failures"]) == ("succeeded", 2, 1)
    assert [a["outcome"] for a in jobs.attempts()] == ["timed_out"]


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
    assert [(row["state"], row["attempts"], row["crashes"]) for row in jobs()] == [
        ("succeeded", 1, 0)
    ] * 2


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
        give_up(conn)
        await until(lambda: worker.id not in (None, first))
        await until(lambda: cancelled)
        (job,) = jobs()
        conn.execute("select queue.cancel(%s, true)", (job["id"],))
        again = await slow.defer_async(0)
        await jobs.end(again.id)
    # The late outcome of the first claim was refused: the job was not ended by it.
    assert next(a["outcome"] for a in jobs.attempts() if a["job_id"] == job["id"]) == "crashed"


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
            await until(lambda: len(runs) > 50, 30)
            if how == "killed":
                pid = server.status().pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.5)
            else:
                await asyncio.to_thread(server._stop, "fast")
            await asyncio.to_thread(server.ensure_running)
            await until(lambda: worker.finished >= 200, 60)
            app.close()
            made += task.defer_many([{"n": n} for n in range(200, 210)])
            await until(lambda: worker.finished >= 210, 60)
        app.close()
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
            shown = conn.execute(
                "select id, (args ->> 'n')::int, state, attempts, crashes"
                " from queue.jobs order by id"
            ).fetchall()
            assert conn.execute("select * from queue.check()").fetchall() == []
    # No job is lost and none runs twice: its worker lives, and its claims with it.
    assert shown == [(job.id, n, "succeeded", 1, 0) for n, job in enumerate(made)]
    assert runs == dict.fromkeys(range(210), 1)


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
    give_up(conn)
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

"""Workers that stop: by a call, a signal, the end of their event loop or a cancel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgdefer import App, Worker, current_job
from pgdefer.database import connection, sql, watchdog
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.worker.listener import Sleep, SleepListener

from .conftest import Jobs, running, until
from .worker_program import Program

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


async def test_a_worker_that_nobody_awaits_says_why_it_ended(
    blank_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(blank_dsn)
    task = asyncio.create_task(app.run_worker_async())
    await asyncio.wait([task])
    records = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "pgdefer.worker"]
    assert records[-1][0] == "ERROR"
    assert records[-1][1].startswith('the worker has ended: schema "queue" does not exist')
    assert task.exception() is not None
    await app.close_async()


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


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_stop_while_the_database_refuses_all(
    app: App, dsn: str, conn: Connection, is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a failover to a standby: a worker with nothing left to report ends at once."""

    def refuse() -> None:
        conn.execute(f'alter database "{conn.info.dbname}" set default_transaction_read_only = on')
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )

    @app.task(name="t")
    async def task() -> None: ...

    if is_first:
        refuse()
    async with running(app) as worker:
        if not is_first:
            await until(lambda: worker.id is not None)
            refuse()
        await until(lambda: "read-only transaction" in caplog.text)
    said = [record for record in caplog.records if "trying again" in record.message]
    assert len(said) < 50
    conn.execute(f'alter database "{conn.info.dbname}" reset default_transaction_read_only')


async def test_a_stop_ends_the_wait_for_a_server_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(GrowingDelay, "next", lambda _: 3600.0)
    nowhere = App(f"postgresql:///?host={tmp_path}")
    async with running(nowhere):
        await until(lambda: "no connection yet: " in caplog.text)
    assert "stopping, running jobs: 0" in caplog.text


async def test_a_stop_ends_the_wait_for_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "CALL_TIMEOUT", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        port = silent.getsockname()[1]
        app = App(make_conninfo("host=127.0.0.1 connect_timeout=60", port=port))
        async with running(app):
            (from_worker, _) = await asyncio.get_running_loop().sock_accept(silent)
    from_worker.close()
    assert "the server does not answer, and the worker stops" in caplog.text


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_stop_after_the_server_has_ended_the_session(
    app: App, jobs: Jobs, conn: Connection, is_busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As by idle_session_timeout: the worker notices it by its last call, and connects again."""

    @app.task(name="t")
    async def task() -> None:
        await asyncio.Event().wait()

    async with running(app) as worker:
        await until(lambda: worker.state.is_waiting)
        if is_busy:
            app.defer("t")
            await until(lambda: bool(worker.executor.running))
        lost = await worker._connection.open()
        conn.execute("select pg_terminate_backend(%s, 5000)", [lost.info.backend_pid])
        worker.stop_at_once()
    assert "could not" not in caplog.text
    assert conn.execute("select id from queue.worker where gone_at is null").fetchall() == []
    assert list(jobs.states().values()) == ["ready"] * is_busy


async def test_run_within_an_event_loop_names_the_other_call(app: App) -> None:
    with pytest.raises(RuntimeError, match="await run_worker_async"):
        app.run_worker()


async def test_a_stop_from_another_thread(app: App) -> None:
    async with running(app) as worker:
        await until(lambda: worker.state.is_waiting)
        other = threading.Thread(target=worker.stop)
        other.start()
        other.join()
        # The worker's state belongs to its own thread, which has not got there yet.
        assert not worker.state.is_stopping
        await until(lambda: worker.id is None)


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
    # no running job was given back
    assert (states.count("ready") > 0, worker.given_back) == (True, 0)
    assert {row["attempts"] for row in jobs() if row["state"] == "ready"} == {0}


async def test_no_claim_is_lost_by_a_stop(app: App, jobs: Jobs, conn: Connection) -> None:
    """At any moment: before, while and after jobs are fetched."""
    seen: list[int] = []

    @app.task
    async def task() -> None:
        seen.append(current_job().id)
        await asyncio.sleep(0)

    task.defer_many([{}] * 600)
    for turn in range(12):
        worker = Worker(app, concurrency=10)
        running_worker = asyncio.create_task(worker.run_async())
        before = len(seen)
        await until(lambda before=before, turn=turn: len(seen) >= before + turn)
        worker.stop()
        await running_worker
        shown = conn.execute(
            "select state, count(*) from queue.jobs where attempts > 0 or state <> 'ready'"
            " group by state"
        ).fetchall()
        assert shown in ([("succeeded", len(seen))], [])
    await app.run_worker_async(drain=True)
    await app.close_async()
    assert sorted(seen) == sorted(jobs.states())
    assert {row["state"] for row in jobs()} == {"succeeded"}


async def test_jobs_that_go_back_leave_locks_and_slots_in_order(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    is_first = True
    now: set[str] = set()
    order: list[str] = []

    @app.task(name="t")
    async def task(name: str) -> None:
        order.append(name)
        assert sum(other[0] == name[0] for other in now) < (2 if name[0] == "k" else 1)
        now.add(name)
        try:
            await asyncio.sleep(60 if is_first else 0.005)
        finally:
            now.discard(name)

    locked = task.configure(lock="l")
    limited = task.configure(concurrency_key="k", concurrency_limit=2)
    made = {}
    for one, name in [(locked, "l"), (limited, "k")]:
        for n in range(3):
            made[f"{name}{n}"] = (await one.defer_async(f"{name}{n}")).id
    worker = Worker(app, shutdown_timeout=0.05)
    stopping = asyncio.create_task(worker.run_async())
    await until(lambda: len(now) == 3)
    worker.stop()
    await stopping
    assert sorted(order) == ["k0", "k1", "l0"]
    assert worker.given_back == 3
    states = jobs.states()
    shown = {name: states[id] for name, id in made.items()}
    assert [shown[name] for name in ("l0", "l1", "l2")] == ["ready", "blocked", "blocked"]
    assert [shown[name] for name in ("k0", "k1", "k2")] == ["ready", "ready", "blocked"]
    assert {row["attempts"] for row in jobs()} == {0}
    assert conn.execute("select * from queue.check()").fetchall() == []
    is_first = False
    order.clear()
    async with running(app):
        rows = await jobs.end()
    assert {(row["state"], row["attempts"], row["crashes"]) for row in rows} == {
        ("succeeded", 1, 0)
    }
    assert [name for name in order if name[0] == "l"] == ["l0", "l1", "l2"]
    assert len(order) == 6


async def test_a_worker_that_stops_wakes_those_that_sleep_beside_it(
    app: App, jobs: Jobs, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Producers notify only while a lead sleeper sleeps, and one sleeps for all."""

    @app.task
    async def task() -> None: ...

    real = SleepListener.before_sleep

    async def before_sleep(self: SleepListener, *arguments: Any) -> Sleep:
        sleep = await real(self, *arguments)
        return sleep if sleep.seconds < 1 else Sleep(60.0)

    def is_asleep(worker: Worker) -> bool:
        return bool(worker.id and worker.listener.holds_sleep_lock and worker.state.is_waiting)

    monkeypatch.setattr(SleepListener, "before_sleep", before_sleep)
    first = Worker(app)
    stopping = asyncio.create_task(first.run_async())
    await until(lambda: is_asleep(first))
    async with running(app) as second:
        await until(lambda: is_asleep(second))
        first.stop()
        await stopping
        connection = second.listener._connection
        assert connection is not None
        lead = (
            "select pid from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock'"
            " and classid = 1885824102 and objid = 1 and granted"
        )
        await until(lambda: conn.execute(lead).fetchall() == [(connection.info.backend_pid,)])
        await task.defer_async()
        await jobs.end()


async def test_a_worker_that_stops_while_it_goes_to_sleep(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not fetch once more."""
    fetches: list[bool] = []
    real = connection.Connection.call

    async def call(self: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
        if statement is sql.FETCH:
            fetches.append(worker.state.is_stopping)
        return await real(self, statement, **given)

    async def before_sleep(*_: Any) -> Sleep:
        if fetches:
            worker.stop()
        return Sleep(60.0)

    monkeypatch.setattr(connection.Connection, "call", call)
    monkeypatch.setattr(SleepListener, "before_sleep", before_sleep)
    worker = Worker(app)
    await worker.run_async()
    await app.close_async()
    assert fetches == [False]


@pytest.mark.parametrize("how", ["timeout", "at once", "cancelled"])
async def test_jobs_that_do_not_end_go_back(
    app: App, jobs: Jobs, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_over = False
    release = threading.Event()
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
        release.wait(60)

    worker = Worker(app, shutdown_timeout=0.1 if how == "timeout" else None)
    task = asyncio.create_task(worker.run_async())
    for one in (polite, deaf, asks, stuck):
        await one.defer_async()
    await until(lambda: len(begun_jobs) == 4)
    if how == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        (worker.stop if how == "timeout" else worker.stop_at_once)()
        await task
    await app.close_async()
    assert list(jobs.states().values()) == ["ready"] * 4
    assert {row["attempts"] for row in jobs()} == {0}
    assert (unwound, asked) == ([1], [1])
    assert worker.given_back == 4
    warned = [each for each in caplog.records if "giving it back" in each.message]
    assert {each.levelname for each in warned} == {"WARNING"}
    tasks = [vars(each)["task"].rpartition(".")[2] for each in warned]
    assert sorted(tasks) == ["asks", "deaf", "polite", "stuck"]
    release.set()
    is_over = True  # the one that ignores the cancel would keep the loop from ending


@pytest.mark.usefixtures("hangup_is_not_ignored")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("options", [{}, {"handle_signals": True}])
def test_a_signal_stops_gracefully(
    app: App, jobs: Jobs, program: Program, number: signal.Signals, options: dict[str, Any]
) -> None:
    process = program(**options)
    assert process.stdout is not None
    app.defer("slow", {"seconds": 0.4})
    assert process.stdout.readline() == "started\n"
    process.send_signal(number)
    assert process.stdout.readline() == "stopping\n"
    assert process.stdout.readline() == "ended\n"
    assert process.wait(300) == 0
    assert list(jobs.states().values()) == ["succeeded"]


def test_a_worker_in_a_loop_leaves_signals_to_the_program(
    app: App, jobs: Jobs, program: Program
) -> None:
    process = program(handle_signals=False)
    assert process.stdout is not None
    app.defer("slow", {"seconds": 3600})
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == -signal.SIGTERM
    assert list(jobs.states().values()) == ["running"]


@pytest.mark.usefixtures("hangup_is_not_ignored")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_after_a_hangup_does_not_stop_at_once(
    app: App, jobs: Jobs, program: Program, number: signal.Signals
) -> None:
    """Where a terminal closes, the kernel and a shell send SIGHUP, and systemd also SIGTERM."""
    process = program()
    assert process.stdout is not None
    app.defer("slow", {"seconds": 1})
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(number)
    assert process.stdout.read() == "ended\n"
    assert list(jobs.states().values()) == ["succeeded"]


def test_a_hangup_that_is_ignored(app: App, jobs: Jobs, program: Program) -> None:
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = program()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None
    app.defer("slow", {"seconds": 0})
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGHUP)
    app.defer("slow", {"seconds": 0})
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "stopping\nended\n"
    assert list(jobs.states().values()) == ["succeeded"] * 2


@pytest.mark.parametrize(
    ("numbers", "task"),
    [
        ([signal.SIGTERM, signal.SIGTERM], "deaf"),
        ([signal.SIGINT] * 2, "slow"),
        ([signal.SIGQUIT], "slow"),
        ([signal.SIGQUIT], "stuck"),
    ],
)
def test_signals_that_stop_at_once(
    app: App,
    jobs: Jobs,
    program: Program,
    numbers: list[signal.Signals],
    task: str,
) -> None:
    process = program()
    assert process.stdout is not None
    app.defer(task, {"seconds": 3600} if task == "slow" else {})
    assert process.stdout.readline() == "started\n"
    first, *others = numbers
    process.send_signal(first)
    assert process.stdout.readline() == "stopping\n"  # or the kernel may merge the two
    for number in others:
        process.send_signal(number)
    assert process.wait(300) == 0  # the job would take an hour
    assert list(jobs.states().values()) == ["ready"]


def test_no_coroutine_begins_after_a_signal(
    app: App, jobs: Jobs, program: Program, tmp_path: Path
) -> None:
    """Also where the event loop, which a coroutine blocks, has not heard of it yet."""
    release = tmp_path / "release"
    for _ in range(20):
        app.defer("block", {"path": str(release)})
    process = program(concurrency=20)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    release.touch()
    assert process.stdout.read() == "stopping\nended\n"
    assert process.wait(300) == 0
    rows = jobs()
    assert {row["claims"] for row in rows} == {1}
    assert sorted((row["state"], row["attempts"]) for row in rows) == [
        *[("ready", 0)] * 19,
        ("succeeded", 1),
    ]


def test_a_signal_tells_of_a_coroutine_that_blocks_the_loop(
    app: App, jobs: Jobs, program: Program, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    app.defer("block", {"path": str(release)})
    process = program()
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    late = threading.Timer(120, release.touch)  # so that the test fails, and does not hang
    late.start()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "blocked\n"
    late.cancel()
    release.touch()
    assert process.stdout.read() == "stopping\nended\n"
    assert process.wait(300) == 0
    assert list(jobs.states().values()) == ["succeeded"]


@pytest.mark.parametrize("stop", [Worker.stop, Worker.stop_at_once], ids=lambda x: x.__name__)
async def test_no_coroutine_begins_after_a_stop_by_a_thread(
    app: App, jobs: Jobs, stop: Callable[[Worker], None]
) -> None:
    begun = threading.Event()
    release = threading.Event()
    runs: list[int] = []

    @app.task
    async def block() -> None:
        runs.append(1)
        begun.set()
        release.wait(60)

    for _ in range(20):
        await block.defer_async()
    worker = Worker(app, concurrency=20)

    def stop_while_blocked() -> None:
        assert begun.wait(60)
        stop(worker)
        release.set()

    thread = threading.Thread(target=stop_while_blocked)
    thread.start()
    await worker.run_async()
    thread.join()
    await app.close_async()
    assert runs == [1]
    assert sum(state == "ready" for state in jobs.states().values()) >= 19


ENDS = """
import asyncio, sys
from pgdefer import App, JobContext, Worker

app = App({dsn!r})
begun = 0
middleware = []

async def wait() -> None:
    global begun
    begun += 1
    await asyncio.sleep(600)

@app.task(name="alone")
async def alone() -> None:
    await wait()

@app.task(name="transactional", transactional=True)
async def transactional(connection: object) -> None:
    await wait()

@app.task(name="batch", batch=2)
async def batch(jobs: object) -> None:
    await wait()

async def main() -> None:
    options = {{"shutdown_timeout": 600}} if "patient" in sys.argv else {{}}
    working = asyncio.create_task(app.run_worker_async(**options))
    while begun < 4:
        await asyncio.sleep(0.005)
    if "twice" in sys.argv:
        working.cancel()
        await asyncio.sleep(0.02)
    if "raise" in sys.argv:
        raise RuntimeError("main has failed")

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["return", "raise", "patient", "twice"])
async def test_the_end_of_the_event_loop_gives_jobs_back(
    jobs: Jobs, conn: Connection, dsn: str, tmp_path: Path, how: str
) -> None:
    """asyncio.run cancels the handlers as well as the worker."""
    program = tmp_path / "program.py"
    program.write_text(ENDS.format(dsn=dsn))
    for name in ("alone", "alone", "transactional", "batch", "batch"):
        conn.execute("select queue.defer(%s)", (name,))
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, str(program), how], capture_output=True, text=True
    )
    assert ("main has failed" in ended.stderr) is (how == "raise")
    assert list(jobs.states().values()) == ["ready"] * 5
    assert {(row["attempts"], row["crashes"]) for row in jobs()} == {(0, 0)}
    assert conn.execute("select from queue.workers where is_alive").fetchall() == []


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_worker_that_is_cancelled_twice_gives_jobs_back(
    app: App, jobs: Jobs, conn: Connection, goes_on: bool
) -> None:
    """Also with a handler that does not end, for which it waits a moment."""
    release = asyncio.Event()

    @app.task(name="t")
    async def task() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                if not goes_on:
                    raise

    app.defer("t")
    worker = Worker(app)
    working = asyncio.create_task(worker.run_async())
    await until(lambda: bool(worker.executor.running))
    for _ in range(20):
        working.cancel()
        await asyncio.sleep(0.005)
    with pytest.raises(asyncio.CancelledError):
        await working
    release.set()
    assert [(row["state"], row["attempts"]) for row in jobs()] == [("ready", 0)]
    assert conn.execute("select from queue.workers where is_alive").fetchall() == []


async def test_a_worker_that_is_cancelled_waits_for_threads(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job does not go back while its handler cleans up."""
    monkeypatch.setattr("pgdefer.worker.worker.GRACE", 300)
    is_told, may_end = threading.Event(), threading.Event()

    @app.task(name="t")
    def task() -> None:
        while not current_job().should_abort():
            time.sleep(0.005)
        is_told.set()
        may_end.wait()

    app.defer("t")
    worker = Worker(app)
    working = asyncio.create_task(worker.run_async())
    await until(lambda: bool(worker.executor.running))
    working.cancel()
    await until(is_told.is_set)
    for _ in range(20):
        await asyncio.sleep(0.005)
        assert list(jobs.states().values()) == ["running"]
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert list(jobs.states().values()) == ["succeeded"]


async def test_a_handler_that_cancels_itself_fails(app: App, jobs: Jobs) -> None:
    async def cancel() -> None:
        own = asyncio.current_task()
        assert own is not None
        own.cancel()
        await asyncio.sleep(600)

    @app.task
    async def alone() -> None:
        await cancel()

    @app.task(batch=2)
    async def batch(_: Any) -> None:
        await cancel()

    async with running(app):
        alone.defer()
        batch.defer_many([{}, {}])
        rows = await jobs.end()
    assert [(row["state"], row["error"]) for row in rows] == [("failed", "CancelledError")] * 3

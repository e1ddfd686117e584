"""What handlers and hooks leave behind, tasks and threads, does not keep the worker from ending."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App, MultiWorker, Worker
from pgdefer.cli import Exit
from pgdefer.worker import supervisor

from .conftest import Jobs, running, until, wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]

MODULE = """
import asyncio, sys, threading
from pgdefer import App

app = App({dsn!r})
kept = []


async def never_end(*_):
    print("started", flush=True)
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass


@app.task(name="thread")
async def thread() -> None:
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)


@app.task(name="task")
async def task() -> None:
    kept.append(asyncio.create_task(never_end()))
    await asyncio.sleep(0)


@app.task(name="threads")
async def threads() -> None:
    print("started", flush=True)
    await asyncio.gather(*(asyncio.to_thread(threading.Event().wait) for _ in range(99)))


@app.task(name="fails")
async def fails() -> None:
    app.on("exhausted")(never_end)
    raise ValueError("no")


@app.task(name="quick")
async def quick() -> None: ...
"""


@pytest.fixture
async def full() -> AsyncIterator[threading.Event]:
    """Handlers fill the default executor until this is set."""
    release = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    blocked = loop.run_in_executor(None, release.wait)
    yield release
    release.set()
    await blocked


async def test_a_full_executor_keeps_no_worker(
    full: threading.Event, app: App, conn: Connection
) -> None:
    ends: list[str] = []

    @app.on("worker_stop")
    async def stop(worker: Worker) -> None:
        ends.append("stop")

    async with running(app, http="127.0.0.1:0") as worker:
        await until(lambda: worker.id)
    assert not full.is_set()
    assert ends == ["stop"]
    assert conn.execute("select from queue.workers where is_alive").fetchall() == []


async def test_a_full_executor_keeps_no_worker_of_many_databases(
    full: threading.Event, app: App, dsn: str, conn: Connection
) -> None:
    worker = MultiWorker(app, [dsn], http="127.0.0.1:0")
    working = asyncio.create_task(worker.run_async())
    await until(lambda: conn.execute("select from queue.workers where is_alive").fetchall())
    worker.stop()
    await asyncio.wait_for(working, 300)
    assert not full.is_set()


async def test_a_full_executor_keeps_no_stream(full: threading.Event, app: App) -> None:
    app.defer("t")
    async with asyncio.timeout(300), app.stream_jobs() as jobs:
        async for _ in jobs:
            break
    assert not full.is_set()


@pytest.mark.parametrize("in_own_loop", [False, True])
def test_the_handlers_of_the_program_for_signals_are_put_back(app: App, in_own_loop: bool) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)

    def own(number: int, frame: Any) -> None: ...

    before = {number: signal.signal(number, own) for number in numbers}
    try:
        if in_own_loop:
            asyncio.run(app.run_worker_async(drain=True, handle_signals=True))
        else:
            app.run_worker(drain=True)
        assert [signal.getsignal(number) for number in numbers] == [own] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_the_loop_of_the_program_calls_on_a_signal_is_forgotten(app: App) -> None:
    """It can't be put back; without it the signal must not be ignored."""

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, int)
        await app.run_worker_async(drain=True, handle_signals=True)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    asyncio.run(main())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_task_beside_a_handler_does_not_end_the_worker(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    async def leave() -> None:
        raise kind(3)

    @app.task(name="waits")
    async def waits() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(leave())

    @app.task(name="goes on")
    async def goes_on() -> str:
        beside = asyncio.create_task(leave())
        await asyncio.wait([beside])
        return repr(beside.exception())

    app.defer("waits")
    app.defer("goes on")
    app.run_worker(drain=True)
    assert [(row["state"], row["error"], row["result"]) for row in jobs()] == [
        ("failed", f"{kind.__name__}: 3", None),
        ("succeeded", None, f"{kind.__name__}(3)"),
    ]
    assert caplog.text.count("a task that a handler has started raised") == 2


def start(folder: Path, dsn: str, *options: str) -> subprocess.Popen[str]:
    """Run `pgdefer worker`."""
    (folder / "mod.py").write_text(MODULE.format(dsn=dsn))
    command = [sys.executable, "-m", "pgdefer", "worker", "-A", "mod", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)


@pytest.mark.parametrize("name", ["thread", "task", pytest.param("fails", marks=pytest.mark.long)])
def test_what_is_left_does_not_keep_the_process(
    app: App, jobs: Jobs, dsn: str, tmp_path: Path, name: str
) -> None:
    app.defer(name)
    with start(tmp_path, dsn, "--max-jobs", "1") as process:
        try:
            assert process.wait(300) == Exit.DONE
        finally:
            process.kill()
    assert list(jobs.states().values()) == ["failed" if name == "fails" else "succeeded"]


def test_a_job_that_goes_back_though_its_threads_go_on(
    app: App, jobs: Jobs, conn: Connection, dsn: str, tmp_path: Path
) -> None:
    app.defer("threads")
    with start(tmp_path, dsn) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            process.send_signal(signal.SIGQUIT)
            assert process.wait(300) == Exit.GAVE_BACK
        finally:
            process.kill()
    assert list(jobs.states().values()) == ["ready"]
    assert conn.execute("select from queue.workers where is_alive").fetchall() == []


@pytest.mark.long
def test_what_is_left_does_not_keep_the_supervisor(
    app: App, jobs: Jobs, dsn: str, tmp_path: Path
) -> None:
    app.defer("thread")
    app.defer("quick")
    with start(tmp_path, dsn, "--processes", "1", "--max-jobs", "1") as process:
        try:
            wait_for(lambda: set(jobs.states().values()) == {"succeeded"})
            process.terminate()
            assert process.wait(300) == Exit.DONE
        finally:
            process.kill()


STAYS = """
import socket, sys, time
channel = socket.socket(fileno=int(sys.argv[2]))
channel.sendall(b"1\\ndone\\n")
while True:
    channel.sendall(b"\\n")
    time.sleep(0.1)
"""


def test_a_process_that_stays_when_its_worker_has_ended_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "STAYS", 1)
    command = [sys.executable, "-c", STAYS]
    assert supervisor.Supervisor(command, [], 1, is_drain=True).run() == Exit.DONE
    assert "killed" in caplog.text

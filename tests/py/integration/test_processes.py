"""Jobs in separate processes: whatever happens to one, the worker and the others live."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App, DecodeError, JobContext, Worker
from pgdefer.database.source import Source
from pgdefer.worker import memory, process_log, process_main
from pgdefer.worker.memory import resident
from pgdefer.worker.processes import ChildProcess, Processes

from .conftest import Jobs, give_up, running, until, wait_for

pytestmark = pytest.mark.client

PsycopgConnection = psycopg.Connection[Any]

MODULE = """
import contextvars, ctypes, datetime as dt, os, subprocess, sys, time, uuid
import psycopg
from pgdefer import App, JobAborted, Retry, RetryLater, current_job

app = App({dsn!r})
process = dict(run_in="process")

@app.task(**process)
def pid() -> int:
    return os.getpid()

@app.task(**process)
def echo(value: object) -> object:
    print("one line", file=sys.stderr)
    return value

@app.task(**process)
def about_me() -> dict:
    job = current_job()
    child.defer()
    return dict(id=job.id, attempt=job.attempt, headers=dict(job.headers))

@app.task(name="child")
def child() -> None: ...

@app.task(**process, retry=Retry(2), give_up_on=KeyError)
def fail(kind: str) -> None:
    raise dict(key=KeyError, value=ValueError)[kind]("no")

@app.task(**process)
def later(n: int) -> None:
    if current_job().attempt <= n:
        raise RetryLater("soon")

class Strange(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(lambda: one + two)

    def __str__(self) -> str:
        return "neither can be pickled"

@app.task(**process)
def strange(what: str) -> object:
    if what == "error":
        raise Strange(1, two=2)
    return lambda: None

@app.task(**process, retry=Retry(1, max_crashes=2))
def segfault() -> None:
    ctypes.string_at(0)

@app.task(**process, retry=Retry(1, on_crash="fail"))
def leave() -> None:
    os._exit(3)

@app.task(**process, retry=Retry(1, on_crash="fail"))
def signal_itself(number: int) -> None:
    os.kill(os.getpid(), number)

seen = contextvars.ContextVar("seen", default=0)

@app.task(**process)
def count() -> int:
    seen.set(seen.get() + 1)
    return seen.get()

@app.task(**process, retry=Retry(1))
def die_once(path: str) -> str:
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), 9)
    return "second"

@app.task(**process)
def leave_a_child(path: str) -> None:
    # The grandchild holds all that it inherits beyond the child's death, and the end of the job.
    if os.fork() == 0:
        while not os.path.exists(path + ".end") and os.path.exists(os.path.dirname(path)):
            time.sleep(0.05)
        os._exit(0)
    open(path, "w").close()
    os.kill(os.getpid(), 9)

@app.task(**process, max_memory=300 * 2**20)
def use(megabytes: int) -> int:
    data = bytearray(megabytes * 2**20)
    return len(data)

@app.task(**process, timeout=dt.timedelta(seconds=1.5))
def endless() -> None:
    while True:
        pass

@app.task(**process)
def deaf(path: str) -> None:
    open(path, "w").close()
    while True:
        time.sleep(0.01)

@app.task(**process)
def polite(path: str) -> None:
    open(path, "w").close()
    while not current_job().should_abort():
        time.sleep(0.005)
    raise JobAborted("seen")

@app.task(**process)
def slow(path: str, end: str) -> str:
    open(path, "w").close()
    while not os.path.exists(end):
        time.sleep(0.005)
    return "ended"

@app.task(**process, transactional=True)
def insert(connection: psycopg.Connection, n: int) -> int:
    connection.execute("insert into effect values (%s)", (n,))
    return n

@app.task(**process)
def hold_memory(path: str, end: str, megabytes: int) -> int:
    data = bytearray(os.urandom(2**20) * megabytes)
    slow(path, end)
    return len(data)

@app.task(**process)
def extend() -> float:
    until = current_job().extend(dt.timedelta(hours=1))
    return (until - dt.datetime.now(dt.UTC)).total_seconds()
"""

_numbers = iter(range(1000))


@pytest.fixture
def tasks(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module above, with tasks of a separate app."""
    name = f"process_tasks_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(dsn=dsn))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    yield module
    module.app.close()
    del sys.modules[name]


@pytest.fixture
def app(tasks: Any) -> App:
    return tasks.app


def by_id(jobs: Jobs) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in jobs()}


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
async def test_whatever_signal_ends_one(
    tasks: Any, app: App, jobs: Jobs, number: int, name: str
) -> None:
    async with running(app, concurrency=1):
        tasks.signal_itself.defer(number)
        (row,) = await jobs.end()
    assert row["error"] == f"ProcessDied: its process was ended by {name}"


async def test_the_memory_of_a_worker_counts_its_processes(
    tasks: Any, app: App, conn: PsycopgConnection, tmp_path: Path
) -> None:
    def told() -> int:
        (found,) = conn.execute("select memory from queue.workers").fetchone() or (None,)
        return found or 0

    begun, end = tmp_path / "begun", tmp_path / "end"
    async with running(app, concurrency=1, heartbeat_every=0.1):
        await until(told)
        own = resident()
        assert own is not None
        assert own / 2 < told() < own * 2
        tasks.hold_memory.defer(str(begun), str(end), 200)
        await until(begun.exists)
        await until(lambda: told() > own + 200 * 2**20)
        end.touch()


def test_memory_of_what_has_ended_or_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        two = resident([process.pid])
        process.kill()
    one = resident()
    assert one is not None
    assert two is not None
    assert two > one + 2**20
    ended = resident([process.pid])
    assert ended is not None
    assert ended < two
    monkeypatch.setattr(memory, "PROC", "/nowhere")
    assert resident([os.getpid()]) is None


async def test_every_job_has_a_context_of_its_own(tasks: Any, app: App, jobs: Jobs) -> None:
    async with running(app, concurrency=1):
        tasks.count.defer_many([{}] * 3)
        rows = await jobs.end()
    assert [row["result"] for row in rows] == [1, 1, 1]


async def test_jobs_run_in_processes_that_are_used_again(tasks: Any, app: App, jobs: Jobs) -> None:
    async with running(app, concurrency=1, jobs_per_process=3):
        tasks.pid.defer_many([{}] * 7)
        rows = await jobs.end()
    pids = [row["result"] for row in rows]
    assert os.getpid() not in pids
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


async def test_arguments_results_and_the_running_job(tasks: Any, app: App, jobs: Jobs) -> None:
    value = {"when": [1, None, "x" * 200_000], "bytes": b"\0"}
    async with running(app, concurrency=2):
        echo = await tasks.echo.defer_async(value)
        about = await tasks.about_me.configure(headers={"trace": "1"}).defer_async()
        assert await echo.result_async(300) == value
        assert await about.result_async(300) == {
            "id": about.id,
            "attempt": 1,
            "headers": {"trace": "1"},
        }
        await jobs.end()
    (child,) = [row for row in jobs() if row["task"] == "child"]
    assert (child["parent"], child["state"]) == (about.id, "succeeded")


async def test_failures_and_yields(tasks: Any, app: App, jobs: Jobs) -> None:
    async with running(app, concurrency=2):
        key = await tasks.fail.defer_async("key")
        value = await tasks.fail.defer_async("value")
        later = await tasks.later.defer_async(2)
        await jobs.end()
    shown = by_id(jobs)
    ends = [
        (shown[j.id]["state"], shown[j.id]["reason"], shown[j.id]["attempts"]) for j in (key, value)
    ]
    assert ends == [("failed", "not_retryable", 1), ("failed", "attempts", 2)]
    assert shown[value.id]["error"] == "ValueError: no"
    assert shown[later.id]["state"] == "succeeded"
    assert "raise dict" in jobs.attempts()[0]["details"]["traceback"]


async def test_what_cannot_be_pickled(tasks: Any, app: App, jobs: Jobs) -> None:
    async with running(app, concurrency=1):
        result = await tasks.strange.defer_async("result")
        error = await tasks.strange.defer_async("error")
        with pytest.raises(DecodeError, match=r"of type builtins\.function, could not be stored"):
            await result.result_async(300)
        await jobs.end()
    shown = by_id(jobs)
    assert (shown[result.id]["state"], shown[result.id]["crashes"]) == ("succeeded", 0)
    assert (shown[error.id]["state"], shown[error.id]["crashes"]) == ("failed", 0)
    assert shown[error.id]["error"] == "Strange: neither can be pickled"


async def test_a_process_that_dies_takes_one_job_with_it(
    tasks: Any, app: App, jobs: Jobs, tmp_path: Path
) -> None:
    async with running(app, concurrency=4) as worker:
        segfault = await tasks.segfault.defer_async()
        leave = await tasks.leave.defer_async()
        killed = await tasks.die_once.defer_async(str(tmp_path / "died"))
        others = await asyncio.to_thread(tasks.echo.defer_many, [{"value": n} for n in range(10)])
        await jobs.end()
        first = worker.id
        assert await (await tasks.echo.defer_async("alive")).result_async(300) == "alive"
        assert worker.id == first
    shown = by_id(jobs)
    assert (shown[segfault.id]["state"], shown[segfault.id]["reason"]) == ("failed", "crash_loop")
    assert shown[segfault.id]["crashes"] == 2
    assert shown[segfault.id]["error"] == "ProcessDied: its process was ended by SIGSEGV"
    assert (shown[leave.id]["state"], shown[leave.id]["reason"]) == ("failed", "crashed")
    assert shown[leave.id]["error"] == "ProcessDied: its process exited with 3"
    assert (shown[killed.id]["state"], shown[killed.id]["result"]) == ("succeeded", "second")
    assert (shown[killed.id]["attempts"], shown[killed.id]["crashes"]) == (2, 1)
    for job in others:
        row = shown[job.id]
        assert (row["state"], row["attempts"], row["crashes"]) == ("succeeded", 1, 0)
    outcomes = [(a["job_id"], a["outcome"]) for a in jobs.attempts()]
    assert sorted(outcomes) == sorted(
        [(segfault.id, "crashed")] * 2 + [(leave.id, "crashed"), (killed.id, "crashed")]
    )


async def test_what_a_handler_started_does_not_hide_its_death(
    tasks: Any, app: App, jobs: Jobs, tmp_path: Path
) -> None:
    job = tasks.leave_a_child.configure(retry={"on_crash": "fail"})
    async with running(app):
        await job.defer_async(str(tmp_path / "left"))
        (row,) = await jobs.end()
        (tmp_path / "left.end").touch()
    assert (row["state"], row["reason"]) == ("failed", "crashed")


@pytest.mark.parametrize("when", ["before", "at the same time"])
async def test_a_process_that_died_while_idle(tasks: Any, app: App, jobs: Jobs, when: str) -> None:
    """The job that it was to run next is not charged."""
    async with running(app) as worker:
        first = await (await tasks.pid.defer_async()).result_async(300)
        os.kill(first, signal.SIGKILL if when == "before" else signal.SIGSTOP)
        second = await tasks.pid.defer_async()
        if when != "before":
            # The job has been sent, but will not be read.
            await until(lambda: jobs.states()[second.id] == "running" and worker.executor.running)
            os.kill(first, signal.SIGKILL)
        assert await second.result_async(300) != first
        await jobs.end()
    assert [(row["attempts"], row["crashes"]) for row in jobs()] == [(1, 0)] * 2


async def test_processes_that_cannot_live(
    tasks: Any, app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(app) as worker:
        with monkeypatch.context() as patch:
            patch.setattr("pgdefer.worker.process_main.main", "".format)  # which ends at once
            await tasks.echo.configure(retry={"on_crash": "fail"}).defer_async(1)
            (row,) = await jobs.end()
        assert (row["state"], row["reason"]) == ("failed", "crashed")
        assert row["error"] == "ProcessDied: its process exited with 0"
        assert await (await tasks.echo.defer_async(2)).result_async(300) == 2
    assert worker.finished == 2


async def test_a_job_above_max_memory_fails_and_its_process_goes_on(
    tasks: Any, app: App, jobs: Jobs
) -> None:
    async with running(app, concurrency=1) as worker:
        small = await tasks.use.defer_async(50)
        large = await tasks.use.defer_async(1000)
        again = await tasks.use.defer_async(50)
        await jobs.end()
        assert worker.finished == 3
    shown = by_id(jobs)
    assert [shown[j.id]["state"] for j in (small, large, again)] == [
        "succeeded",
        "failed",
        "succeeded",
    ]
    assert shown[large.id]["reason"] == "memory"
    assert shown[large.id]["error"] == "MemoryError"


async def test_timeouts_and_aborts(
    tasks: Any, app: App, jobs: Jobs, conn: PsycopgConnection, tmp_path: Path
) -> None:
    deaf_is_running, polite_is_running = tmp_path / "deaf", tmp_path / "polite"
    async with running(app):
        endless = await tasks.endless.defer_async()
        deaf = await tasks.deaf.defer_async(str(deaf_is_running))
        polite = await tasks.polite.defer_async(str(polite_is_running))
        await until(lambda: deaf_is_running.exists() and polite_is_running.exists())
        for job in (deaf, polite):
            conn.execute("select queue.cancel(%s, abort => true)", (job.id,))
        await jobs.end()
    shown = by_id(jobs)
    assert [(shown[j.id]["state"], shown[j.id]["reason"]) for j in (deaf, polite)] == [
        ("cancelled", "aborted")
    ] * 2
    assert shown[endless.id]["state"] == "failed"
    assert shown[endless.id]["error"].startswith("TimeoutError: not done within 0:00:01.5")
    outcomes = {a["job_id"]: a["outcome"] for a in jobs.attempts()}
    assert outcomes == {endless.id: "timed_out", deaf.id: "aborted", polite.id: "aborted"}


@pytest.mark.parametrize("how", ["at once", "time limit"])
async def test_a_stop_that_kills_and_gives_back(
    tasks: Any, app: App, jobs: Jobs, tmp_path: Path, how: str
) -> None:
    is_running = tmp_path / "deaf"
    await tasks.deaf.defer_async(str(is_running))
    worker = Worker(app, shutdown_timeout=0.05)
    task = asyncio.create_task(worker.run_async())
    await until(is_running.exists)
    (worker.stop_at_once if how == "at once" else worker.stop)()
    await task
    await app.close_async()
    (row,) = jobs()
    assert (row["state"], row["attempts"], row["crashes"]) == ("ready", 0, 0)
    assert worker.given_back == 1
    # The process was killed; its thread, for which the worker does not wait, sees it end.
    await until(lambda: not multiprocessing.active_children())


async def test_a_cancel_kills_before_it_gives_back(
    tasks: Any, app: App, jobs: Jobs, tmp_path: Path
) -> None:
    is_running = tmp_path / "deaf"
    seen: list[Any] = []

    @app.on("worker_stop")
    async def stop(worker: Worker) -> None:
        """The jobs have been reported; the worker's processes are closed only later."""
        await until(lambda: not multiprocessing.active_children())
        seen.append(list(jobs.states().values()))

    await tasks.deaf.defer_async(str(is_running))
    working = asyncio.create_task(app.run_worker_async())
    await until(is_running.exists)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await app.close_async()
    assert seen == [["ready"]]


async def test_a_graceful_stop(tasks: Any, app: App, jobs: Jobs, tmp_path: Path) -> None:
    is_running, end = tmp_path / "slow", tmp_path / "end"
    job = await tasks.slow.defer_async(str(is_running), str(end))
    worker = Worker(app)
    task = asyncio.create_task(worker.run_async())
    await until(is_running.exists)
    worker.stop()
    await asyncio.wait([task], timeout=0.3)
    assert not task.done()
    assert jobs.states() == {job.id: "running"}
    end.touch()
    await task
    await app.close_async()
    (row,) = jobs()
    assert (row["state"], row["result"], row["attempts"]) == ("succeeded", "ended", 1)
    assert multiprocessing.active_children() == []


async def test_transactions_and_leases(
    tasks: Any, app: App, jobs: Jobs, conn: PsycopgConnection
) -> None:
    conn.execute("create table effect (n integer)")
    async with running(app):
        inserted = await tasks.insert.defer_async(7)
        extended = await tasks.extend.defer_async()
        assert await inserted.result_async(300) == 7
        assert 3500 < await extended.result_async(300) <= 3600
    assert conn.execute("select n from effect").fetchall() == [(7,)]


async def test_a_task_that_the_process_cannot_find(
    tasks: Any, app: App, jobs: Jobs, tmp_path: Path
) -> None:
    async with running(app):
        (tmp_path / f"{tasks.__name__}.py").write_text("1 / 0\n")
        job = await tasks.echo.configure(retry={"max_attempts": 5}).defer_async(1)
        (row,) = await jobs.end(job.id)
    assert (row["state"], row["error"]) == ("failed", "ZeroDivisionError: division by zero")


PROGRAM = """
import fcntl, os, re
from pgdefer import App
app = App({dsn!r})

@app.task(run_in="process")
def pid() -> int:
    return os.getpid()

@app.task(run_in="process")
def hold(path: str, how: str) -> None:
    global file  # locked for as long as this process lives
    file = open(path, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(path, path + ".held")
    if how == "no thread may run":
        re.match("(a+)+$", "a" * 60 + "b")
    while True:
        pass

if __name__ == "__main__":
    if os.environ.get("DRAIN"):
        pid.defer()
    app.run_worker(drain=bool(os.environ.get("DRAIN")))
"""


async def test_a_program_that_is_its_own_module(dsn: str, tmp_path: Path, jobs: Jobs) -> None:
    path = tmp_path / "its_own.py"
    path.write_text(PROGRAM.format(dsn=dsn))
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(path), env=os.environ | {"DRAIN": "1"}
    )
    assert await process.wait() == 0
    (row,) = jobs()
    assert (row["task"], row["state"]) == ("its_own.pid", "succeeded")
    assert row["result"] != process.pid


def test_a_program_that_starts_its_worker_when_imported(
    dsn: str, tmp_path: Path, conn: PsycopgConnection, jobs: Jobs
) -> None:
    path = tmp_path / "its_own.py"
    text = PROGRAM.format(dsn=dsn).replace("pid.defer()", "pass")
    path.write_text(text.replace('if __name__ == "__main__":', "if True:"))
    options = '{"retry": {"on_crash": "fail"}}'
    conn.execute("select queue.defer('its_own.pid', options => %s)", (options,))
    done = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"DRAIN": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert 'start it below `if __name__ == "__main__":`' in done.stderr
    assert list(jobs.states().values()) == ["failed"]


@pytest.mark.parametrize("how", ["busy", "no thread may run"])
def test_a_worker_that_is_killed_leaves_no_orphan(
    dsn: str, tmp_path: Path, jobs: Jobs, conn: PsycopgConnection, how: str
) -> None:
    if how == "no thread may run" and sys.platform != "linux":
        pytest.skip("only Linux tells a process of its parent's death")
    path = tmp_path / "its_own.py"
    path.write_text(PROGRAM.format(dsn=dsn))
    lock = tmp_path / "lock"
    held = tmp_path / "lock.held"
    args = json.dumps({"path": str(lock), "how": how})
    conn.execute("select queue.defer('its_own.hold', %s::jsonb)", (args,))
    with subprocess.Popen([sys.executable, str(path)]) as worker:
        wait_for(held.exists)
        with held.open("r+") as file:

            def is_free() -> bool:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                return False

            assert not is_free()
            worker.kill()
            wait_for(is_free)
    give_up(conn)
    (row,) = jobs()
    assert (row["state"], row["crashes"]) == ("ready", 1)
    assert [a["outcome"] for a in jobs.attempts()] == ["crashed"]


def test_what_is_said_to_a_job_is_not_heard_by_the_next() -> None:
    ours, theirs = multiprocessing.Pipe()
    line = process_main._Inbox(theirs, process_log.Outbox(theirs))
    reader = threading.Thread(target=line.read)
    reader.start()
    first, second = (JobContext(None, (id, id, "t", b"", "q", 0, *[None] * 8)) for id in (1, 2))  # type: ignore[arg-type]
    received = line.jobs()
    ours.send("first")
    assert next(received) == "first"
    assert isinstance(ours.recv(), process_main.Started)
    line.begin(first)
    line.end(process_main.Result(None, may_go_on=True))
    ours.send(process_main.AbortRequest(first.claim, "too late"))
    ours.send("second")
    assert next(received) == "second"
    line.begin(second)
    assert (first._abort_reason, second._abort_reason) == (None, None)
    ours.send(process_main.AbortRequest(second.claim, "in time"))
    wait_for(lambda: second._abort_reason == "in time")
    line.end(process_main.Result(None, may_go_on=True))
    ours.close()
    reader.join()
    theirs.close()


def test_what_cannot_run_in_a_process() -> None:
    app = App("postgresql://nowhere.invalid/x")

    async def coroutine() -> None: ...

    def inner() -> None: ...

    for function, message in [
        (coroutine, "not for coroutine functions"),
        (inner, "top level of a module"),
    ]:
        with pytest.raises(ValueError, match=message):
            app.task(run_in="process")(function)
    with pytest.raises(ValueError, match="max_memory needs run_in='process'"):
        app.task(max_memory=1)(inner)


def test_idle_processes_end_all_at_once(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not end in time share that time, and are killed after it."""
    monkeypatch.setattr("pgdefer.worker.processes.LINGER", 5.0)
    processes = Processes(Source(dsn), 100)
    idle = [ChildProcess(dsn) for _ in range(4)]
    processes._idle = list(idle)
    for process in idle:
        assert process._process.pid is not None
        os.kill(process._process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    processes.close()
    assert time.monotonic() - begun < 4 * 5.0 - 0.5
    assert [process._process.exitcode for process in idle] == [-signal.SIGKILL] * 4


TWO_APPS = """
from pgdefer import App

former, present = App({dsn!r}), App({dsn!r})

@former.task(name="greet", run_in="process")
def greet() -> str:
    return "from the former"

@present.task(name="greet", run_in="process")
def greet() -> str:
    return "from the present"
"""


@pytest.mark.parametrize("which", ["former", "present"])
async def test_two_apps_of_a_module_have_a_task_of_one_name(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    name = f"two_apps_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(TWO_APPS.format(dsn=dsn))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    app: App = getattr(module, which)
    async with running(app):
        job = await app.defer_async("greet")
        assert await job.result_async(300) == f"from the {which}"
    module.former.close()
    module.present.close()
    del sys.modules[name]

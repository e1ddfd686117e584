"""Workers stop when asked, and survive faults of the database and of the connection."""

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
import sqlalchemy as sa
import sqlalchemy.ext.asyncio as sa_async
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import orm

from pgdefer import App, Job, JobTimeout, Retry, Worker, WorkerOptions, current_job
from pgdefer.client.client import Client
from pgdefer.database import connection, sql
from pgdefer.database.server import EmbeddedServer, temporary_server
from pgdefer.tasks.registry import Registry
from pgdefer.worker import outcomes
from pgdefer.worker.claim import Claim
from pgdefer.worker.executor import Executor
from pgdefer.worker.fetcher import Fetcher
from pgdefer.worker.heartbeat import Heartbeat, clock
from pgdefer.worker.listener import Sleep, SleepListener
from support import install, url_of

from .conftest import Jobs, give_up, running, until, wait_for

pytestmark = pytest.mark.client

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
async def test_jobs_that_do_not_end_go_back(app: App, jobs: Jobs, how: str) -> None:
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
    release.set()
    is_over = True  # the one that ignores the cancel would keep the loop from ending


PROGRAM = """
import asyncio, ctypes, json, logging, os, sys, time
from pgdefer import App, Retry
app = App({dsn!r})

def say(what: str) -> None:
    os.write(1, what.encode() + b"\\n")  # at once, whatever other threads say

class Stopping(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("stopping"):
            say("stopping")

logging.getLogger("pgdefer").addHandler(Stopping())
logging.getLogger("pgdefer").setLevel("INFO")

@app.task(name="slow")
async def slow(seconds: float) -> None:
    say("started")
    await asyncio.sleep(seconds)

@app.task(name="deaf")
async def deaf() -> None:
    say("started")
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

@app.task(name="block")
async def block(path: str) -> None:
    say("started")
    while not os.path.exists(path):
        time.sleep(0.005)

@app.task(name="stuck")
def stuck() -> None:
    say("started")
    time.sleep(60)

@app.task(name="wait", retry=Retry(1, max_crashes=2))
def wait(path: str, how: str) -> None:
    say("started")
    while not os.path.exists(path):
        time.sleep(0.005)
    if how == "kill -9":  # by whomever; the kernel does so, too, where it has no memory left
        os.kill(os.getpid(), 9)
    elif how == "os._exit":
        os._exit(3)
    elif how == "segfault":
        ctypes.string_at(0)

if __name__ == "__main__":
    app.run_worker(**json.loads(sys.argv[1]))
    say("ended")
"""

Program = Callable[..., subprocess.Popen[str]]
Connect = Callable[..., psycopg.Connection[Any]]


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
    assert process.stdout.readline() == "stopping\n"
    assert process.stdout.readline() == "ended\n"
    assert process.wait(300) == 0
    assert list(jobs.states().values()) == ["succeeded"]


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


@pytest.mark.long
@pytest.mark.parametrize(
    "death", [("kill -9", -9), ("os._exit", 3), ("segfault", -signal.SIGSEGV)], ids=lambda x: x[0]
)
def test_a_job_that_kills_its_worker(
    jobs: Jobs, conn: Connection, program: Program, tmp_path: Path, death: tuple[str, int]
) -> None:
    how, code = death
    app = App(conn.info.dsn)

    def defer(task: str, **args: object) -> int:
        return app.defer(task, args).id

    def start(**options: Any) -> tuple[subprocess.Popen[str], Callable[[], str]]:
        process = program(**options)
        assert process.stdout is not None
        return process, process.stdout.readline

    def shown() -> dict[int, tuple[Any, ...]]:
        names = ("state", "reason", "attempts", "crashes")
        return {row["id"]: tuple(row[name] for name in names) for row in jobs()}

    now, later = tmp_path / "now", tmp_path / "later"
    process, says = start(concurrency=2)
    before = defer("slow", seconds=0)
    wait_for(lambda: jobs.states()[before] == "succeeded")
    beside = defer("wait", path=str(later), how="")
    culprit = defer("wait", path=str(now), how=how)
    assert [says() for _ in range(3)] == ["started\n"] * 3
    behind = defer("slow", seconds=0)
    now.touch()
    assert process.wait(300) == code
    give_up(conn)
    assert shown() == {
        before: ("succeeded", None, 1, 0),
        beside: ("ready", None, 1, 1),
        culprit: ("ready", None, 1, 1),
        behind: ("ready", None, 0, 0),
    }
    # Jobs that have crashed run alone, so only the culprit does so again.
    later.touch()
    process, says = start(concurrency=2)
    assert process.wait(300) == code
    give_up(conn)
    process, says = start(drain=True)
    assert process.wait(300) == 0
    assert shown() == {
        before: ("succeeded", None, 1, 0),
        beside: ("succeeded", None, 2, 1),
        culprit: ("failed", "crash_loop", 2, 2),
        behind: ("succeeded", None, 1, 0),
    }
    assert [(a["job_id"], a["outcome"]) for a in jobs.attempts()] == [
        (beside, "crashed"),
        (culprit, "crashed"),
        (culprit, "crashed"),
    ]


async def test_out_of_memory(app: App, jobs: Jobs) -> None:
    """The kernel's reaction when memory runs out is "kill -9" above."""
    release = asyncio.Event()

    @app.task
    async def beside() -> None:
        await release.wait()

    @app.task
    async def coroutine() -> None:
        bytearray(1 << 60)

    @app.task
    def function() -> None:
        bytearray(1 << 60)

    async with running(app) as worker:
        first = await beside.defer_async()
        greedy = [await task.defer_async() for task in (coroutine, function)]
        await jobs.end(*(job.id for job in greedy))
        number = worker.id
        release.set()
        await jobs.end()
        assert worker.id == number
    ends = {row["id"]: (row["state"], row["error"], row["crashes"]) for row in jobs()}
    assert ends == {first.id: ("succeeded", None, 0)} | {
        job.id: ("failed", "MemoryError", 0) for job in greedy
    }


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
    async with running(app, ["other"], heartbeat_every=0.3):  # reaps dead workers
        await task
    (row,) = jobs()
    assert (row["id"], row["state"], row["attempts"]) == (job.id, "succeeded", 1)
    assert jobs.attempts() == []


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        pytest.param(3.5, {"heartbeat_every": 0.3, "dead_after": 1.5}, id="short"),
        pytest.param(60.0, {}, id="as by default", marks=pytest.mark.soak),
    ],
)
async def test_an_event_loop_that_is_blocked(
    app: App, jobs: Jobs, conn: Connection, seconds: float, options: WorkerOptions
) -> None:
    """It is not declared dead: heartbeats have a thread of their own."""
    is_over = False

    @app.task
    async def blocks() -> None:
        time.sleep(seconds)  # noqa: ASYNC251

    @app.task
    async def beside() -> None:
        await asyncio.sleep(0.1)

    def reap() -> None:
        while not is_over:
            conn.execute("select queue.reap()")
            time.sleep(0.1)

    reaper = asyncio.create_task(asyncio.to_thread(reap))
    async with running(app, **options) as worker:
        first = await beside.defer_async()
        second = await blocks.defer_async()
        await until(lambda: worker.finished == 2)
        number = worker.id
        is_over = True
        await reaper
        rows = await jobs.end()
        assert worker.id == number
    assert [(row["id"], row["state"], row["attempts"], row["crashes"]) for row in rows] == [
        (first.id, "succeeded", 1, 0),
        (second.id, "succeeded", 1, 0),
    ]


FORKS = """
import os, signal, sys
from pgdefer import App

app = App({dsn!r})


def fork(how):
    child = os.fork()
    if not child:
        signal.alarm(30)  # or it would live on as a worker
        if how == "returns":
            return "from the child"
        raise SystemExit(3) if how == "exits" else ValueError(how)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@app.task(name="sync")
def sync(how):
    return fork(how)


@app.task(name="async")
async def coroutine(how):
    return fork(how)


@app.task(name="process", run_in="process")
def process(how):
    return fork(how)


@app.task(name="batch", batch=5)
def batch(jobs):
    return [fork(job.args["how"]) for job in jobs]


@app.task(name="async_batch", batch=5)
async def async_batch(jobs):
    return [fork(job.args["how"]) for job in jobs]


@app.task(name="transactional", transactional=True)
def transactional(connection, how):
    return fork(how)


if __name__ == "__main__":
    app.run_worker(drain=True)
"""


def test_what_a_handler_forks_is_no_second_worker(app: App, tmp_path: Path) -> None:
    """It ends where it leaves the handler, and the job goes on to its own end."""
    path = tmp_path / "forks.py"
    path.write_text(FORKS.format(dsn=app.source.conninfo()))
    codes = {"returns": 0, "exits": 3, "raises": 1}
    kinds = ["sync", "async", "process", "batch", "async_batch", "transactional"]
    made = {(kind, how): app.defer(kind, {"how": how}) for kind in kinds for how in codes}
    app.close()
    done = subprocess.run(
        [sys.executable, str(path)], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert {key: job.result(0) for key, job in made.items()} == {
        (kind, how): codes[how] for kind, how in made
    }


TERMINATES = """
import multiprocessing, time
from pgdefer import App

app = App({dsn!r})
fork = multiprocessing.get_context("fork")


def terminate():
    with fork.Pool(2) as pool:  # its end terminates them
        pool.map(abs, [1, 2])
    codes = set()
    for _ in range(20):
        child = fork.Process(target=time.sleep, args=[30])
        child.start()
        child.terminate()  # it may not have begun
        child.join()
        codes.add(child.exitcode)
    return list(codes)


@app.task(name="sync")
def sync():
    return terminate()


@app.task(name="async")
async def coroutine():
    return terminate()


@app.task(name="other")
def other():
    pass


if __name__ == "__main__":
    app.run_worker(drain=True, concurrency=1)
"""


@pytest.mark.parametrize("task", ["sync", "async"])
def test_a_signal_to_what_a_handler_forks_is_not_for_the_worker(
    app: App, jobs: Jobs, tmp_path: Path, task: str
) -> None:
    path = tmp_path / "terminates.py"
    path.write_text(TERMINATES.format(dsn=app.source.conninfo()))
    made = [app.defer(task), app.defer("other")]
    done = subprocess.run(
        [sys.executable, str(path)], check=False, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, set(jobs.states().values())) == (0, {"succeeded"}), done.stderr
    assert made[0].result(0) == [-signal.SIGTERM]


@pytest.mark.long
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
    assert successor.wait(300) == 0
    # The zombie has registered again.
    after = app.defer("slow", {"seconds": 0.0})
    wait_for(lambda: jobs.states()[after.id] == "succeeded")
    zombie.send_signal(signal.SIGTERM)
    assert zombie.wait(300) == 0
    shown = {row["id"]: row for row in jobs()}
    ends = {id: (row["state"], row["attempts"], row["crashes"]) for id, row in shown.items()}
    assert ends == {
        slow.id: ("succeeded", 2, 1),
        quick.id: ("succeeded", 1, 0),
        after.id: ("succeeded", 1, 0),
    }
    assert [(a["job_id"], a["outcome"]) for a in jobs.attempts()] == [(slow.id, "crashed")]
    assert len({shown[id]["worker_id"] for id in (slow.id, quick.id, after.id)}) == 3


class Runs:
    """The runs of a handler, and the greatest number of simultaneous ones."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.most = 0

    def __enter__(self) -> None:
        self.begun += 1
        self.most = max(self.most, self.begun - self.ended)

    def __exit__(self, *_: object) -> None:
        self.ended += 1


def past(conn: psycopg.Connection[Any], job: Job, seconds: float) -> None:
    """Move the beginning of a job's attempt back, in the database."""
    by = f"interval '{seconds} s'"
    with conn.transaction():
        conn.execute(
            f"update queue.active_job set claimed_at = claimed_at - {by} where id = {job.id}"
        )
        conn.execute(f"update queue.lease set expires_at = expires_at - {by} where id = {job.id}")


OVERDUE = "select queue.why(%s) like '%%its timeout passed at %%still runs%%'"


@pytest.mark.parametrize("how", ["thread", "coroutine", "blocked loop"])
async def test_a_handler_that_outlives_its_timeout(
    app: App, jobs: Jobs, conn: Connection, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its claim, lock and slot until it ends: no second run begins beside it."""
    monkeypatch.setattr("pgdefer.worker.heartbeat.LOOK", 0.1)
    monkeypatch.setattr("pgdefer.worker.executor.LATE", 0.1)
    runs = Runs()
    release = threading.Event()
    aborted = threading.Event()
    abort = Executor.abort

    def abort_and_tell(self: Executor, claim: Claim, reason: str) -> None:
        abort(self, claim, reason)
        aborted.set()

    monkeypatch.setattr(Executor, "abort", abort_and_tell)
    options: Any = {
        "timeout": dt.timedelta(seconds=0.5),
        "retry": Retry(2),
        "lock": "l",
        "concurrency_key": "k",
        "concurrency_limit": 1,
    }

    @app.task(**options, name="thread")
    def thread() -> None:
        with runs:
            release.wait(300)  # runs no Python code meanwhile

    @app.task(**options, name="coroutine")
    async def coroutine() -> None:
        with runs:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)

    @app.task(**options, name="blocked loop")
    async def blocks() -> None:
        with runs:
            release.wait(300)

    def watch() -> None:
        try:
            wait_for(lambda: conn.execute(OVERDUE, (job.id,)).fetchone() == (True,))
            past(conn, job, 20)
            wait_for(lambda: conn.execute(OVERDUE, (job.id,)).fetchone() == (True,))
            assert conn.execute("select reaped from queue.reap()").fetchone() == (0,)
            health = "select status from queue.health() where name = 'timeouts'"
            assert conn.execute(health).fetchone() == ("warn",)
            assert list(jobs.states().values()) == ["running", "blocked"]
            if how != "blocked loop":
                wait_for(aborted.is_set)
        finally:
            release.set()

    app.client.register(conn)
    job = app.defer(how)
    app.defer(how)
    async with running(app):
        watching = asyncio.create_task(asyncio.to_thread(watch))
        await jobs.end()
        await watching
    first, second = jobs()
    assert (first["state"], first["failures"]) == ("succeeded", 1)
    assert second["state"] == "succeeded"
    assert (runs.begun, runs.most) == (3, 1)
    assert [a["outcome"] for a in jobs.attempts()] == ["timed_out"]


async def test_claims_that_can_not_be_kept_keep_no_others_waiting(
    app: App, jobs: Jobs, conn: Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another transaction holds their rows: heartbeats go on, and other claims are kept."""
    monkeypatch.setattr("pgdefer.worker.heartbeat.LOOK", 0.1)
    monkeypatch.setattr("pgdefer.worker.executor.LATE", 0.1)
    release = threading.Event()

    @app.task(name="deaf", timeout=dt.timedelta(seconds=0.5))
    def deaf() -> None:
        release.wait(300)

    first, second, third = app.defer_many([deaf.prepare() for _ in range(3)])
    async with running(app, heartbeat_every=1.0, dead_after=60) as worker:
        await until(lambda: len(worker.executor.running) == 3)
        with connect(autocommit=False) as busy:
            held = [first.id, third.id]
            busy.execute("select from queue.active_job where id = any(%s) for update", (held,))
            await until(lambda: conn.execute(OVERDUE, (second.id,)).fetchone() == (True,))
            for _ in range(3):
                beat = worker.heartbeat.beat_at
                await until(lambda beat=beat: worker.heartbeat.beat_at > beat)
            assert conn.execute(OVERDUE, (first.id,)).fetchone() == (False,)
        for job in (first, third):
            await until(lambda job=job: conn.execute(OVERDUE, (job.id,)).fetchone() == (True,))
        release.set()
        await jobs.end()


async def test_a_timeout_is_raised_in_a_thread(app: App, jobs: Jobs) -> None:
    ends = []

    @app.task(timeout=dt.timedelta(seconds=0.1))
    def endless() -> None:
        try:
            while True:
                with contextlib.suppress(Exception):
                    time.sleep(0.001)
        except JobTimeout:
            ends.append("timeout")
            raise
        finally:
            ends.append("finally")

    @app.task(timeout=dt.timedelta(seconds=0.1), name="stubborn")
    def stubborn() -> str:
        with contextlib.suppress(JobTimeout):
            while True:
                time.sleep(0.001)
        return "late"

    async with running(app):
        await endless.defer_async()
        await stubborn.defer_async()
        rows = await jobs.end()
    assert ends == ["timeout", "finally"]
    assert [row["error"] for row in rows] == ["TimeoutError: not done within 0:00:00.100000"] * 2
    assert [a["outcome"] for a in jobs.attempts()] == ["timed_out", "timed_out"]


@pytest.mark.long
async def test_a_timeout_is_raised_in_no_other_job(app: App, jobs: Jobs) -> None:
    """Jobs that end as their timeout passes, one after another in one thread."""

    @app.task(timeout=dt.timedelta(seconds=0.02), name="brief")
    def brief(n: int) -> None:
        time.sleep(0.018 + n % 5 * 0.001)

    @app.task(name="innocent")
    def innocent() -> None:
        end = time.monotonic() + 0.004
        while time.monotonic() < end:
            pass

    for n in range(150):
        app.defer("brief", {"n": n})
        app.defer("innocent")
    async with running(app, concurrency=1):
        rows = await jobs.end()
    assert {row["state"] for row in rows if row["task"] == "innocent"} == {"succeeded"}
    assert {row["outcome"] for row in jobs.attempts()} <= {"timed_out"}
    assert len(rows) == 300


# The connection to the database


@pytest.mark.long
async def test_connections_that_are_cut(app: App, jobs: Jobs, conn: Connection) -> None:
    runs: dict[int, int] = {}

    @app.task
    async def task(n: int) -> int:
        runs[n] = runs.get(n, 0) + 1
        await asyncio.sleep(0.002)
        return n

    async with running(app, concurrency=10) as worker:
        made = task.defer_many([{"n": n} for n in range(1000)])
        for _ in range(8):
            done = worker.finished
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
            await until(lambda done=done: worker.finished > done)
        rows = await jobs.end()
    names = ("id", "result", "state", "attempts", "crashes")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (job.id, n, "succeeded", 1, 0) for n, job in enumerate(made)
    ]
    # A claim whose answer was cut off is given back and made again; no job runs twice.
    assert runs == dict.fromkeys(range(1000), 1)


async def test_a_connection_that_is_cut_at_the_start(
    app: App, jobs: Jobs, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = []

    def cutting(kind: type, name: str) -> None:
        real = getattr(kind, name)

        async def cut(self: Any, connection: Any, **options: Any) -> Any:
            if cuts.count(name) < 2:
                cuts.append(name)
                conn.execute("select pg_terminate_backend(%s)", (connection.info.backend_pid,))
            return await real(self, connection, **options)

        monkeypatch.setattr(kind, name, cut)

    @app.recurring("@yearly", name="s")
    @app.task
    async def task() -> None: ...

    job = await task.defer_async()
    cutting(Client, "register_async")
    cutting(Registry, "register_schedules_async")
    async with running(app):
        await jobs.end()
    assert len(cuts) == 4
    assert jobs.states() == {job.id: "succeeded"}
    assert conn.execute("select name from queue.schedules").fetchall() == [("s",)]


async def test_a_worker_that_cannot_say_that_it_is_busy(
    dsn: str, conn: psycopg.Connection[Any], jobs: Jobs
) -> None:
    app = App(make_conninfo(dsn, options="-c lock_timeout=50ms"))
    may_end = asyncio.Event()

    @app.task(name="waiting")
    async def waiting() -> None:
        await may_end.wait()

    async with running(app, concurrency=1) as worker:
        await until(lambda: worker.id is not None and worker.listener.is_first)
        session = worker.listener._connection
        with conn.transaction():
            conn.execute("lock table queue.sleeper in access exclusive mode")
            with psycopg.connect(dsn, autocommit=True) as producer:
                producer.execute("select queue.defer('waiting')")
            # The session has gone, and its lock with it.
            await until(lambda: worker.listener._connection is not session)
        may_end.set()
        assert [row["state"] for row in await jobs.end()] == ["succeeded"]
        app.defer("waiting")
        assert [row["state"] for row in await jobs.end()] == ["succeeded"] * 2


async def test_going_to_sleep_while_the_connection_is_cut(
    app: App, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that listens is the one that called before_sleep."""
    (worker,) = conn.execute("select queue.register_worker('w')").fetchone() or ()
    real, cuts = SleepListener.listen, []

    async def listen(self: SleepListener, channel: str) -> None:
        if len(cuts) < 2:
            cuts.append(channel)
            assert self._connection is not None
            session = [self._connection.info.backend_pid]
            self.close()
            # until its session has ended it keeps the sleep lock from the next one
            alive = "select from pg_stat_activity where pid = %s"
            await until(lambda: conn.execute(alive, session).fetchone() is None)
        await real(self, channel)

    monkeypatch.setattr(SleepListener, "listen", listen)
    names = ["on_work", "on_message", "on_pause", "on_connection_lost"]
    ignored = dict.fromkeys(names, lambda: None)
    listener = SleepListener(app.source, **ignored)
    await listener.before_sleep(worker, None)
    assert len(cuts) == 2
    assert listener._connection is not None
    listening = await (
        await listener._connection.execute("select pg_listening_channels() order by 1")
    ).fetchall()
    assert listening == [("pgdefer",), (f"pgdefer_worker_{worker}",)]
    held = conn.execute(
        "select pid from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock'"
        " and classid = 1885824102 and objid = 1 and granted"
    ).fetchall()
    assert held == [(listener._connection.info.backend_pid,)]
    listener.close()


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_listening_connection_that_is_cut(
    app: App, jobs: Jobs, conn: Connection, is_busy: bool
) -> None:
    started = asyncio.Event()

    @app.task
    async def slow() -> None:
        started.set()
        await asyncio.sleep(60)

    def session() -> int | None:
        connection = worker.listener._connection
        return None if connection is None else connection.info.backend_pid

    async with running(app, concurrency=1, heartbeat_every=60.0, dead_after=300.0) as worker:
        if is_busy:
            job = await slow.defer_async()
            await started.wait()
        else:
            await until(
                lambda: worker.id and worker.listener.holds_sleep_lock and worker.state.is_waiting
            )
        first = session()
        assert first is not None
        conn.execute("select pg_terminate_backend(%s)", (first,))
        await until(lambda: session() not in (None, first))
        if not is_busy:
            await until(lambda: worker.listener.holds_sleep_lock and worker.state.is_waiting)
            job = await slow.defer_async()
            await started.wait()
        # The next heartbeat is a minute away: only a notification reports this.
        await until(lambda: len(worker.listener._channels) == 2)
        conn.execute("select queue.cancel(%s, abort => true)", (job.id,))
        await jobs.end()
    assert jobs.states() == {job.id: "cancelled"}


class Line:
    """A socket between worker and server that can hold back or drop data."""

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
        await asyncio.gather(
            self._pass(reader, there, is_answer=False),
            self._pass(there_reader, writer, is_answer=True),
        )

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
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


@pytest.mark.parametrize("refused", ["CLAIMS", "FINISH_MANY"])
async def test_lost_claims_that_cannot_be_given_back_at_once(
    app: App, jobs: Jobs, conn: Connection, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker tries again, and does not end."""
    monkeypatch.setattr("pgdefer.worker.fetcher.LOST_CLAIM_CHECKS", (0.0,))
    monkeypatch.setattr("pgdefer.worker.fetcher.LOST_CLAIM_AGAIN", 0.05)
    real = connection.Connection.call
    refusals = []

    async def call(self: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
        if statement is getattr(sql, refused) and len(refusals) < 2:
            refusals.append(statement)
            raise psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")
        return await real(self, statement, **given)

    async with running(app, ["a"], poll_every=0.05) as worker:
        await until(lambda: worker.id is not None)
        conn.execute("select queue.defer('t', queue => 'b')")
        # As for a fetch whose answer was lost.
        conn.execute("select queue.fetch(%s, '{b}', 1)", [worker.id])
        monkeypatch.setattr(connection.Connection, "call", call)
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        await until(lambda: list(jobs.states().values()) == ["ready"])
        assert worker.id is not None
    assert len(refusals) == 2


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "asleep"])
async def test_lost_claims_are_looked_for_again(
    app: App, jobs: Jobs, conn: Connection, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while all slots are taken, or nothing wakes the worker."""
    monkeypatch.setattr("pgdefer.worker.fetcher.LOST_CLAIM_CHECKS", (0.0, 1.0))
    real_call, real_sleep = connection.Connection.call, SleepListener.before_sleep
    checks = 0

    async def call(self: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
        nonlocal checks
        rows = await real_call(self, statement, **given)
        if statement is sql.CLAIMS and not checks:
            # As for a fetch that the network delivers late.
            conn.execute("select queue.fetch(%s, '{b}', 1)", [given["worker"]])
        checks += statement is sql.CLAIMS
        return rows

    async def before_sleep(self: SleepListener, *given: Any) -> Sleep:
        return (await real_sleep(self, *given))._replace(seconds=3600.0)

    monkeypatch.setattr(connection.Connection, "call", call)
    monkeypatch.setattr(SleepListener, "before_sleep", before_sleep)
    begun, end = asyncio.Event(), asyncio.Event()

    @app.task(name="busy", queue="a")
    async def busy() -> None:
        begun.set()
        await end.wait()

    app.defer("t", queue="b")
    app.close()
    async with running(app, ["a"], concurrency=1) as worker:
        await until(lambda: worker.id is not None)
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        if is_busy:
            busy.defer()
            await begun.wait()
        try:
            await until(lambda: checks >= 2, 60)
        finally:
            end.set()
        await until(lambda: next(iter(jobs.states().values())) == "ready")


async def test_a_half_open_connection(
    jobs: Jobs,
    line: Line,
    conn: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pgdefer.database.watchdog.CALL_TIMEOUT", 0.5)
    app = through(line, conn.info.dsn)

    @app.task(name="t")
    async def task() -> None: ...

    async with running(app, heartbeat_every=0.5) as worker:
        await until(lambda: worker.id)
        conn.execute("select queue.defer('t')")
        await jobs.end()
        line.is_open.clear()
        conn.execute("select queue.defer('t')")
        await until(lambda: "the connection was lost: " in caplog.text)
        line.is_open.set()
        await jobs.end()
    assert worker.finished == 2
    names = ("id", "state", "attempts", "crashes")
    assert [tuple(row[name] for name in names) for row in jobs()] == [
        (1, "succeeded", 1, 0),
        (2, "succeeded", 1, 0),
    ]


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
    # The late outcome of the first claim was refused: it did not end the job.
    assert next(a["outcome"] for a in jobs.attempts() if a["job_id"] == job["id"]) == "crashed"


@pytest.mark.long
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
            await until(lambda: len(runs) > 50)
            if how == "killed":
                pid = server.status().pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.5)
            else:
                await asyncio.to_thread(server._stop, "fast")
            await asyncio.to_thread(server.ensure_running)
            await until(lambda: worker.finished >= 200)
            app.close()
            made += task.defer_many([{"n": n} for n in range(200, 210)])
            await until(lambda: worker.finished >= 210)
        app.close()
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
            shown = conn.execute(
                "select id, (args ->> 'n')::int, state, attempts, crashes"
                " from queue.jobs order by id"
            ).fetchall()
            assert conn.execute("select * from queue.check()").fetchall() == []
    # No job is lost and none runs twice: the worker is alive, and its claims are valid.
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

    real = outcomes.succeeded

    def spoilt(id: int, claim: int, result: str | None = None) -> str:
        return real(id, claim, '"\\u0000"' if result == "2" else result)

    monkeypatch.setattr(outcomes, "succeeded", spoilt)
    app.defer_many([(bad if n == 7 else good).prepare() for n in range(20)])
    async with running(app):
        rows = await jobs.end()
    note = {"__pgdefer__": "unencodable", "value": "JSON, which this database can't hold"}
    ends = {row["task"]: (row["state"], row["result"], row["error"]) for row in rows}
    assert ends == {
        "good": ("succeeded", 1, None),
        "bad": ("succeeded", note, None),  # its writes remain
    }


@pytest.mark.parametrize("how", ["sync", "async", "session", "async session"])
async def test_a_half_open_connection_of_a_handler(
    jobs: Jobs,
    line: Line,
    conn: Connection,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """Its last statement has a time limit: the transaction is lost then, and the job runs again."""
    monkeypatch.setattr("pgdefer.database.watchdog.CALL_TIMEOUT", 0.5)
    app = through(line, conn.info.dsn)
    runs: list[int] = []
    url = url_of(app.source.conninfo())

    async def close() -> None:
        runs.append(1)
        if len(runs) == 1:
            line.is_open.clear()

    loop = asyncio.get_running_loop()

    def sync(connection: Any) -> None:
        connection.execute(sa.text("select 1") if "session" in how else "select 1")
        asyncio.run_coroutine_threadsafe(close(), loop).result()

    async def coroutine(connection: Any) -> None:
        await connection.execute(sa.text("select 1") if "session" in how else "select 1")
        await close()

    engine, async_engine = sa.create_engine(url), sa_async.create_async_engine(url)
    makers: dict[str, Any] = {
        "session": orm.sessionmaker(engine),
        "async session": sa_async.async_sessionmaker(async_engine),
    }
    function: Any = coroutine if "async" in how else sync
    app.task(function, name="t", transactional=makers.get(how, True))
    async with running(app) as worker:
        conn.execute("select queue.defer('t')")
        await until(lambda: worker.finished)
        line.is_open.set()
        await jobs.end()
    engine.dispose()
    await async_engine.dispose()
    (row,) = jobs()
    assert (row["state"], row["failures"], row["crashes"], len(runs)) == ("succeeded", 0, 1, 2)


@pytest.mark.parametrize("when", ["the last statement", "commit"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_server_that_can_not_end_a_transaction(
    app: App, jobs: Jobs, conn: Connection, when: str, is_async: bool
) -> None:
    """As with a full disk: this does not count as a failure of the job."""
    conn.execute(
        """
        create sequence public.tries;
        grant all on sequence public.tries to public;
        create function public.refuse() returns trigger language plpgsql as $$
        begin
          if nextval('public.tries') = 1 then
            raise exception 'no space left on device' using errcode = '53100';
          end if;
          return null;
        end $$
        """
    )
    conn.execute(
        "create constraint trigger refuse after insert on queue.finished deferrable initially "
        + ("immediate" if when == "the last statement" else "deferred")
        + " for each row execute function public.refuse()"
    )

    @app.task(name="sync", transactional=True)
    def sync(connection: psycopg.Connection[Any]) -> None:
        connection.execute("select 1")

    @app.task(name="async", transactional=True)
    async def coroutine(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("select 1")

    app.defer("async" if is_async else "sync")
    async with running(app):
        (row,) = await jobs.end()
    assert (row["state"], row["failures"], row["crashes"]) == ("succeeded", 0, 1)
    conn.execute("drop trigger refuse on queue.finished")


def test_a_worker_that_wakes_starts_nothing_that_others_have_done(
    app: App, jobs: Jobs, conn: Connection, connect: Connect, program: Program
) -> None:
    """It was frozen while the answer to a fetch was on its way."""
    process = program(heartbeat_every=0.3, dead_after=6)
    registered = "select max(id) from queue.workers where is_alive"
    wait_for(lambda: conn.execute(registered).fetchone() != (None,))
    with connect(autocommit=False) as busy:
        busy.execute("select queue._lock_admission(true)")
        ids = [app.defer("slow", {"seconds": 0}).id for _ in range(5)]
        waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query ~ 'fetch'"
        wait_for(lambda: conn.execute(waits).fetchone())
        process.send_signal(signal.SIGSTOP)
    wait_for(lambda: set(jobs.states().values()) == {"running"})
    dead = "select reaped from queue.reap() where reaped > 0"
    wait_for(lambda: conn.execute(dead).fetchone() == (5,))
    conn.execute("select queue.register_worker('other')")
    other = "(select max(id) from queue.workers where name = 'other')"
    done = f"""
        select queue.finish_many(jsonb_build_array(
            jsonb_build_object('id', f.id, 'claim', f.claim, 'outcome', 'succeeded')))
        from queue.fetch({other}) f
    """
    for _ in ids:
        conn.execute(done)
    assert set(jobs.states().values()) == {"succeeded"}
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: conn.execute(f"{registered} and name <> 'other'").fetchone() != (None,))
    app.defer("slow", {"seconds": 0})
    wait_for(lambda: set(jobs.states().values()) == {"succeeded"})
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert said.split() == ["started", "stopping", "ended"]


async def test_heartbeats_that_fail_go_on(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the worker is to blame, as where its process has no memory left for a moment."""
    failures: list[object] = [None] * 3

    def memory() -> None:
        if failures:
            failures.pop()
            raise MemoryError

    async with running(app, heartbeat_every=0.1, dead_after=60) as worker:
        await until(lambda: worker.id)
        monkeypatch.setattr(worker.heartbeat, "_memory", memory)
        await until(lambda: not failures)
        beat = worker.heartbeat.beat_at
        await until(lambda: worker.heartbeat.beat_at > beat)
    assert caplog.text.count("heartbeats were interrupted") == 3


async def test_nothing_is_claimed_while_no_heartbeat_is_answered(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have to go back. What has ended is reported all the same."""
    begun, release = asyncio.Event(), asyncio.Event()
    pokes: list[object] = []

    @app.task(name="t")
    async def task() -> None:
        begun.set()
        await release.wait()

    first = app.defer("t")
    async with running(app, concurrency=2) as worker:
        await until(lambda: begun.is_set() and worker.state.is_waiting)
        monkeypatch.setattr(Heartbeat, "is_overdue", True)
        monkeypatch.setattr(worker.heartbeat, "poke", lambda: pokes.append(None))
        second = app.defer("t")
        release.set()
        await until(lambda: pokes and jobs.states()[first.id] == "succeeded")
        del pokes[:]
        await until(lambda: pokes)  # it has looked again
        assert [(row["id"], row["state"], row["claims"]) for row in jobs()][1:] == [
            (second.id, "ready", 0)
        ]
        monkeypatch.undo()
        rows = await jobs.end()
    assert [row["claims"] for row in rows] == [1, 1]


def overdue_after_a_fetch(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have heartbeats be overdue once something was fetched; without, nothing is."""
    real = Fetcher._take

    def take(self: Fetcher, rows: Any, *arguments: Any) -> int:
        if rows:
            monkeypatch.setattr(Heartbeat, "is_overdue", True)
        return real(self, rows, *arguments)

    monkeypatch.setattr(Fetcher, "_take", take)
    monkeypatch.setattr(worker.heartbeat, "poke", lambda: None)


async def test_what_was_claimed_waits_for_a_heartbeat(
    app: App, jobs: Jobs, connect: Connect, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the last one is long ago; once it is answered the jobs start after all."""

    @app.task(name="t")
    async def task() -> None: ...

    app.defer("t")
    async with running(app) as worker:
        await jobs.end()
        overdue_after_a_fetch(worker, monkeypatch)
        app.defer("t")
        await until(lambda: worker.executor.claimed)
        assert not worker.executor.running
        monkeypatch.undo()
        worker.heartbeat.poke()
        await jobs.end()


async def test_an_outcome_that_cannot_be_stored_spoils_no_other_at_the_end(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not prevent the worker from deregistering, either."""
    begun = []

    @app.task(name="t")
    async def task(n: int) -> int:
        begun.append(n)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return n

    real = outcomes.succeeded

    def spoilt(id: int, claim: int, result: str | None = None) -> str:
        return real(id, claim, '"\\u0000"' if result == "2" else result)

    monkeypatch.setattr(outcomes, "succeeded", spoilt)
    task.defer_many([{"n": n} for n in range(1, 4)])
    stopping = asyncio.create_task(Worker(app).run_async())
    await until(lambda: len(begun) == 3)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await app.close_async()
    note = {"__pgdefer__": "unencodable", "value": "JSON, which this database can't hold"}
    assert [(row["state"], row["result"]) for row in jobs()] == [
        ("succeeded", 1),
        ("succeeded", note),
        ("succeeded", 3),
    ]


async def test_what_was_told_to_abort_before_it_starts(
    app: App, jobs: Jobs, connect: Connect, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler is not called."""
    runs = []

    @app.task(name="t")
    def task() -> None:
        runs.append(1)

    async with running(app) as worker:
        await until(lambda: worker.id)
        overdue_after_a_fetch(worker, monkeypatch)
        job = await app.defer_async("t")
        await until(lambda: worker.executor._is_held)
        conn.execute("select queue.cancel(%s, abort => true)", (job.id,))
        monkeypatch.undo()
        worker.heartbeat.poke()
        await jobs.end()
    assert (jobs.states(), runs) == ({job.id: "cancelled"}, [])


async def test_what_waited_past_its_timeout_does_not_start(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a worker that was frozen after its fetch: others may have ended the claim by now."""
    delays = [7.0]
    late = 0.0
    real = Fetcher._take

    def take(self: Fetcher, rows: Any, *arguments: Any) -> int:
        nonlocal late
        if rows and delays:
            late += delays.pop()
        return real(self, rows, *arguments)

    @app.task(name="t", timeout=dt.timedelta(seconds=1))
    async def task() -> None: ...

    monkeypatch.setattr(Fetcher, "_take", take)
    for module in ("executor", "fetcher", "registration"):
        monkeypatch.setattr(f"pgdefer.worker.{module}.clock", lambda: clock() + late)
    await app.defer_async("t")
    async with running(app):
        (row,) = await jobs.end()
    assert "was claimed too long ago" in caplog.text
    assert (row["state"], row["attempts"], row["claims"]) == ("succeeded", 1, 2)


@pytest.mark.parametrize("how", ["thread", "coroutine"])
async def test_a_claim_that_was_ended_before_it_could_be_kept(
    dsn: str, jobs: Jobs, conn: Connection, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler is told to end, although no heartbeat arrives."""
    monkeypatch.setattr("pgdefer.worker.heartbeat.LOOK", 0.1)
    ended = []
    app = App(dsn, pgbouncer=True)

    @app.task(name="thread", timeout=dt.timedelta(hours=1))
    def thread() -> None:
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.append("thread")

    @app.task(name="coroutine", timeout=dt.timedelta(hours=1))
    async def coroutine() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("coroutine")

    job = await app.defer_async(how)
    async with running(app, heartbeat_every=60.0, dead_after=300.0) as worker:
        await until(lambda: worker.executor.running)
        past(conn, job, 3700)
        # its own first tick may be the one that ends it
        await until(
            lambda: conn.execute("select queue.reap()") and jobs.states()[job.id] == "failed"
        )
        (running_job,) = worker.executor.running
        worker.heartbeat.extend_after[running_job] = clock()
        await until(lambda: ended == [how])
        await until(lambda: not worker.executor.running)
    app.close()


async def test_an_outcome_for_which_there_is_no_room(
    app: App, jobs: Jobs, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a full disk: the worker sends it until the server takes it."""
    monkeypatch.setattr("pgdefer.worker.completer.TRIES", 2)
    conn.execute(
        """
        create sequence public.tries;
        grant all on sequence public.tries to public;
        create function public.refuse() returns trigger language plpgsql as $$
        begin
          if nextval('public.tries') <= 5 then
            raise exception 'no space left on device' using errcode = '53100';
          end if;
          return new;
        end $$
        """
    )
    conn.execute(
        "create trigger refuse before insert on queue.finished "
        "for each row execute function public.refuse()"
    )

    @app.task(name="t")
    async def task() -> None: ...

    app.defer("t")
    async with running(app):
        (row,) = await jobs.end()
    assert (row["state"], row["attempts"], row["crashes"]) == ("succeeded", 1, 0)
    conn.execute("drop trigger refuse on queue.finished")


async def test_an_outcome_that_is_refused_for_ever(
    app: App, jobs: Jobs, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim ends nevertheless, by a lease."""
    monkeypatch.setattr("pgdefer.worker.completer.TRIES", 3)
    conn.execute(
        """
        create function public.refuse() returns trigger language plpgsql as $$
        begin
          raise exception 'no' using errcode = 'XX000';
        end $$
        """
    )
    conn.execute(
        "create trigger refuse before insert on queue.finished "
        "for each row execute function public.refuse()"
    )
    runs = []

    @app.task(name="t", retry=Retry(2))
    async def task() -> None:
        runs.append(1)

    app.defer("t")
    async with running(app, heartbeat_every=0.5):
        await until(lambda: [a["outcome"] for a in jobs.attempts()] == ["failed"])
        conn.execute("drop trigger refuse on queue.finished")
        (row,) = await jobs.end()
    assert row["state"] == "succeeded"


async def test_outcomes_are_sent_while_fetches_are_refused(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stops meanwhile ends, too."""
    release = asyncio.Event()
    refused: list[float] = []

    @app.task(name="t")
    async def task() -> None:
        await release.wait()

    real = connection.Connection.call

    async def call(self: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
        if statement in (sql.FETCH, sql.FINISH_AND_FETCH):
            refused.append(clock())
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return await real(self, statement, **given)

    app.defer("t")
    async with running(app, concurrency=2) as worker:
        await until(lambda: worker.executor.running and worker.state.is_waiting)
        monkeypatch.setattr(connection.Connection, "call", call)
        app.defer("t")
        await until(lambda: len(refused) > 8)
        # The last three waited for the longest delay.
        assert refused[8] - refused[5] > 1.5
        release.set()
        await until(lambda: "succeeded" in jobs.states().values())
    assert list(jobs.states().values()) == ["succeeded", "ready"]


async def test_outcomes_are_sent_while_a_worker_may_not_sleep(
    dsn: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without notifications it asks on the connection of the outcomes."""
    release = asyncio.Event()
    app = App(dsn, pgbouncer=True)
    refused: list[float] = []

    @app.task(name="t")
    async def task() -> None:
        await release.wait()

    real = connection.Connection.call

    async def call(self: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
        if statement is sql.BEFORE_SLEEP:
            refused.append(clock())
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return await real(self, statement, **given)

    app.defer("t")
    async with running(app, concurrency=2) as worker:
        await until(lambda: bool(worker.executor.running))
        monkeypatch.setattr(connection.Connection, "call", call)
        await until(lambda: len(refused) > 2)
        release.set()
        await until(lambda: list(jobs.states().values()) == ["succeeded"])
    app.close()


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

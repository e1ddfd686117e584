"""Workers run jobs: the arguments, the ends, the times of starts."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime as dt
import itertools
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm

from pgdefer import (
    App,
    Decision,
    JobAborted,
    JobContext,
    MultiWorker,
    PgDeferError,
    Retry,
    RetryLater,
    Worker,
    current_job,
    model_codec,
)
from pgdefer.worker import executor
from support import url_of

from .conftest import Jobs, give_up, running, until

Connection = psycopg.Connection[Any]


async def test_async_and_sync_tasks(app: App, jobs: Jobs) -> None:
    @app.task
    async def add(a: int, b: dt.timedelta) -> dt.timedelta:
        await asyncio.sleep(0)
        return a * b

    @app.task
    def where(name: str) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return name.upper()

    async with running(app):
        first = await add.defer_async(3, b=dt.timedelta(hours=1))
        second = where.defer("x")
        await jobs.end()
    shown = {row["id"]: row for row in jobs()}
    assert [shown[j.id]["state"] for j in (first, second)] == ["succeeded", "succeeded"]
    assert app.codec.decode(shown[first.id]["result"]) == dt.timedelta(hours=3)
    assert shown[second.id]["result"] == "X"


async def test_whatever_a_handler_raises_fails_its_job(app: App, jobs: Jobs) -> None:
    @app.task
    async def explode() -> None:
        raise ValueError("secretless")

    @app.task
    def leave() -> None:
        raise SystemExit(3)

    @app.task
    async def cancel_myself() -> None:
        raise asyncio.CancelledError

    async with running(app):
        for task in (explode, leave, cancel_myself):
            await task.defer_async()
        rows = await jobs.end()
    assert [(r["state"], r["error"]) for r in rows] == [
        ("failed", "ValueError: secretless"),
        ("failed", "SystemExit: 3"),
        ("failed", "CancelledError"),
    ]
    details = jobs.attempts()[0]["details"]
    assert details["type"] == "builtins.ValueError"
    assert "raise ValueError" in details["traceback"]


async def test_what_cannot_be_run_fails_at_once(app: App, jobs: Jobs) -> None:
    jobs._cursor.execute('select queue.configure(\'{"unknown_task_grace": "0 s"}\')')

    @app.task(name="t", retry=Retry(None))
    async def task(a: int) -> None: ...

    async with running(app):
        for name, args in [
            ("unknown", {}),
            ("t", {}),
            ("t", {"a": 1, "b": 2}),
            ("t", {"a": app.codec}),
        ]:
            if args.get("a") is app.codec:
                conn_args = '{"a": {"__pgdefer__": "nothing", "value": 1}}'
                jobs._cursor.execute("select queue.defer('t', %s::jsonb)", (conn_args,))
            else:
                await app.defer_async(name, args)
        rows = await jobs.end()
    assert [row["state"] for row in rows] == ["failed"] * 4
    assert [row["attempts"] for row in rows] == [1] * 4
    errors = [row["error"] for row in rows]
    assert errors[0].startswith("no worker knows the task unknown: ")
    assert errors[1] == "DecodeError: the task needs the argument a"
    assert errors[2] == "DecodeError: the task takes no argument b"
    assert errors[3].startswith("DecodeError: unknown tag 'nothing'")


async def test_unknown_tasks_go_to_a_worker_that_knows_them(app: App, jobs: Jobs) -> None:
    await app.defer_async("later")
    async with running(app, name="old"):
        await until(jobs.attempts)
    assert [row["attempts"] for row in jobs()] == [0]
    assert [row["details"] for row in jobs.attempts()] == [{"unknown_task": "later"}]

    @app.task(name="later")
    async def later() -> int:
        return 5

    async with running(app, name="new"):
        rows = await jobs.end()
    assert [(row["state"], row["attempts"], row["result"]) for row in rows] == [("succeeded", 1, 5)]


async def test_functions_of_the_database(app: App, jobs: Jobs) -> None:
    jobs._cursor.execute(
        "create function public.adds(args jsonb) returns integer language sql as "
        "$$ select (args ->> 'a')::integer + 1 $$"
    )
    jobs._cursor.execute(
        "create function public.sleeps(jsonb) returns void language sql as "
        "$$ select pg_sleep(60) $$"
    )
    for name in ("adds", "sleeps"):
        jobs._cursor.execute(
            "select queue.register_task(%s, jsonb_build_object('function', %s::text))",
            (name, f"public.{name}"),
        )
    await app.defer_async("adds", {"a": 1})
    await app.defer_async("adds", {"a": "x"})
    jobs._cursor.execute("select queue.defer('sleeps', options => '{\"timeout\": \"0.5 s\"}')")
    async with running(app):
        rows = await jobs.end()
    assert [(row["state"], row["result"]) for row in rows] == [
        ("succeeded", 2),
        ("failed", None),
        ("failed", None),
    ]
    assert rows[1]["error"].startswith("invalid input syntax for type integer")
    assert jobs.attempts()[0]["details"]["type"] == "22P02"
    assert jobs.attempts()[1]["outcome"] == "timed_out"


async def test_code_that_nobody_would_run_does_not_succeed(app: App, jobs: Jobs) -> None:
    async def coroutine() -> None: ...

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    def generator() -> Iterator[int]:
        yield 1

    @app.task(name="sync")
    def sync(kind: str) -> object:
        return kinds[kind]()

    @app.task(name="async")
    async def asynchronous(kind: str) -> object:
        return kinds[kind]()

    @app.task(name="transactional", transactional=True)
    def transactional(connection: Connection, kind: str) -> object:
        return kinds[kind]()

    kinds = {"coroutine": coroutine, "generator": generator, "async_generator": async_generator}
    async with running(app):
        for name, kind in itertools.product(("sync", "async", "transactional"), kinds):
            await app.defer_async(name, {"kind": kind})
        rows = await jobs.end()
    assert {row["state"] for row in rows} == {"failed"}
    for row in rows:
        start = f"TypeError: the task returned a {row['args']['kind']}, whose code nobody runs"
        assert row["error"].startswith(start)


def unreadable(text: str) -> bool:
    try:
        json.loads(text)
    except (RecursionError, ValueError):
        return True
    return False


@pytest.mark.parametrize("is_async", [True, False])
async def test_json_that_python_cannot_read_is_that_jobs_failure(
    app: App, conn: Connection, is_async: bool
) -> None:
    def work(value: object = None) -> None:
        assert current_job().headers

    async def work_async(value: object = None) -> None:
        work(value)

    app.task(name="t", retry=Retry(5))(work_async if is_async else work)
    conn.execute("select queue.register_task('t', '{\"retry\": {\"max_attempts\": 5}}')")
    deep, digits = "[" * 5000 + "]" * 5000, "1" * 5000
    texts = list(filter(unreadable, (deep, digits)))  # Python 3.13 reads the first
    assert digits in texts
    for text in texts:
        conn.execute("select queue.defer('t', options => %s)", [f'{{"headers": {{"x": {text}}}}}'])
        conn.execute("select queue.defer('t', %s)", [f'{{"value": {text}}}'])
    conn.execute("select queue.defer('t', options => '{\"headers\": {\"x\": 1}}')")
    shown = "select state, reason, attempts, split_part(error, ':', 1) from queue.jobs order by id"
    async with running(app):
        await until(lambda: conn.execute(shown).fetchall()[-1][0] == "succeeded")
        await until(lambda: conn.execute(shown).fetchall()[-2][0] != "running")
    assert conn.execute(shown).fetchall() == [
        *[("failed", "not_retryable", 1, "DecodeError")] * (2 * len(texts)),
        ("succeeded", None, 1, None),
    ]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_decision_that_is_no_json_loses_no_slot(
    app: App, jobs: Jobs, is_async: bool
) -> None:
    def decide(error: BaseException, job: JobContext) -> Decision:
        return Decision(retryable=False, reason=error)  # type: ignore[arg-type]

    def work() -> None:
        raise ValueError("x")

    async def work_async() -> None:
        work()

    app.task(name="t", decide=decide)(work_async if is_async else work)
    async with running(app, concurrency=1):
        for _ in range(2):
            await app.defer_async("t")
        rows = await jobs.end()
    assert [(r["state"], r["error"]) for r in rows] == [("failed", "ValueError: x")] * 2


async def test_a_result_that_cannot_be_stored_is_logged(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(name="odd")
    async def odd() -> object:
        return object()

    @app.task(name="odd_too", transactional=True)
    def odd_too(connection: Connection) -> object:
        return object()

    async with running(app):
        await odd.defer_async()
        await odd_too.defer_async()
        rows = await jobs.end()
    assert {row["state"] for row in rows} == {"succeeded"}
    said = "succeeded, but its result, a builtins.object, can't be stored"
    told = [line for line in caplog.messages if said in line]
    assert sorted(line.split()[2] for line in told) == ["odd", "odd_too"]


async def test_the_running_job(app: App, jobs: Jobs) -> None:
    seen: list[JobContext] = []

    @app.task(name="child")
    async def child() -> None: ...

    @app.task(name="parent")
    async def parent() -> None:
        seen.append(current_job())
        await child.defer_async()
        await child.configure(parent=None).defer_async()
        await app.defer_async("child")

    @app.task(name="sync parent")
    def sync_parent() -> None:
        seen.append(current_job())
        child.defer()

    deadline = dt.datetime(2040, 1, 1, tzinfo=dt.UTC)
    options: dict[str, Any] = {"queue": "q", "priority": 3, "lock": "l", "deadline": deadline}
    options["headers"] = {"trace": "1"}
    async with running(app):
        first = await parent.configure(**options).defer_async()
        second = await sync_parent.defer_async()
        await until(lambda: len(jobs()) == 6)
        await jobs.end()
    with pytest.raises(LookupError, match="no job is running"):
        current_job()
    (a,) = [job for job in seen if job.id == first.id]
    assert (a.task, a.queue, a.priority, a.lock, a.attempt) == ("parent", "q", 3, "l", 1)
    assert (a.deadline, a.headers, a.parent) == (deadline, {"trace": "1"}, None)
    parents = [(row["parent"], row["deadline"]) for row in jobs() if row["task"] == "child"]
    expected = [(first.id, deadline)] * 2 + [(None, None), (second.id, None)]
    assert sorted(parents, key=str) == sorted(expected, key=str)


async def test_every_job_has_a_context_of_its_own(app: App, jobs: Jobs) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    seen = []

    @app.task
    async def one() -> None:
        seen.append(variable.get())
        variable.set(1)
        assert asyncio.current_task() is not None

    @app.task
    def two() -> None:
        seen.append(variable.get())
        variable.set(2)

    async with running(app, concurrency=1):
        for task in (one, two) * 3:
            await task.defer_async()
        await jobs.end()
    assert seen == [0] * 6


async def test_retries_follow_the_registered_policy(app: App, jobs: Jobs) -> None:
    attempts = []

    @app.task(retry=Retry(3, base=dt.timedelta(milliseconds=50)))
    async def flaky() -> None:
        attempts.append((current_job().attempt, time.monotonic()))
        if len(attempts) < 3:
            raise OSError("again")

    async with running(app):
        await flaky.defer_async()
        (row,) = await jobs.end()
    assert row["state"] == "succeeded"
    assert [attempt for attempt, _ in attempts] == [1, 2, 3]
    pauses = [b[1] - a[1] for a, b in itertools.pairwise(attempts)]
    assert all(0.04 < pause < 4.0 for pause in pauses)  # it polls every 5 s


async def test_retry_later_yields_the_job(app: App, jobs: Jobs) -> None:
    runs = []

    @app.task
    async def later() -> RetryLater | None:
        runs.append(current_job().attempt)
        if len(runs) == 1:
            raise RetryLater("first")
        if len(runs) == 2:
            at = dt.datetime.now(dt.UTC) + dt.timedelta(milliseconds=50)
            return RetryLater("second", at=at)
        return None

    async with running(app):
        await later.defer_async()
        (row,) = await jobs.end()
    assert row["state"] == "succeeded"
    assert len(runs) == 3
    assert [(a["outcome"], a["error"]) for a in jobs.attempts()] == [
        ("yielded", "first"),
        ("yielded", "second"),
    ]


async def test_yielding_before_the_handler_returns(
    dsn: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction ends the claim, and the worker gets the job again before it has returned."""
    monkeypatch.setattr(executor, "BESIDE", 3600.0)

    @contextlib.asynccontextmanager
    async def slow(job: JobContext) -> AsyncIterator[None]:
        yield
        await until(lambda: jobs()[0]["attempts"] > job.attempt or job.attempt == 3)

    app = App(dsn, middleware=[slow])

    @app.task(transactional=True)
    async def task(connection: Any) -> RetryLater | None:
        return RetryLater("again") if current_job().attempt < 3 else None

    await task.defer_async()
    async with running(app):
        await until(lambda: jobs()[0]["state"] == "succeeded")
    assert jobs()[0]["attempts"] == 3


@pytest.mark.parametrize("fails", [True, False])
async def test_a_coroutine_that_blocks_the_loop_past_its_timeout(
    app: App, jobs: Jobs, *, fails: bool
) -> None:
    limit = dt.timedelta(milliseconds=200)

    def block() -> None:
        time.sleep(0.3)
        if fails:
            raise ValueError

    @app.task(timeout=limit)
    async def alone() -> None:
        block()

    @app.task(timeout=limit, transactional=True)
    async def transactional(_: psycopg.AsyncConnection[Any]) -> None:
        block()

    @app.task(timeout=limit, batch=2)
    async def batch(_: Any) -> None:
        block()

    async with running(app):
        alone.defer()
        transactional.defer()
        batch.defer_many([{}, {}])
        rows = await jobs.end()
    assert [row["state"] for row in rows] == ["failed"] * 4
    assert [row["outcome"] for row in jobs.attempts()] == ["timed_out"] * 4


async def test_a_handler_past_its_timeout_is_timed_out(app: App, jobs: Jobs) -> None:
    @app.task(timeout=dt.timedelta(milliseconds=50))
    async def endless() -> None:
        await asyncio.sleep(30)

    @app.task(timeout=dt.timedelta(milliseconds=50))
    def asks() -> None:
        while True:
            current_job().check_abort()
            time.sleep(0.005)

    async with running(app):
        await endless.defer_async()
        await asks.defer_async()
        rows = await jobs.end()
    assert [row["state"] for row in rows] == ["failed", "failed"]
    assert all(row["error"].startswith("TimeoutError: not done within 0:00:00.05") for row in rows)
    assert [a["outcome"] for a in jobs.attempts()] == ["timed_out", "timed_out"]


async def test_a_running_job_is_aborted(app: App, jobs: Jobs, conn: Connection) -> None:
    started = []

    @app.task(retry=Retry(None))
    async def sleeps() -> None:
        started.append(1)
        await asyncio.sleep(30)

    @app.task(retry=Retry(None))
    def asks() -> None:
        started.append(1)
        while not current_job().should_abort():
            time.sleep(0.005)
        raise JobAborted("seen")

    @app.task
    async def insists() -> str:
        started.append(1)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "done all the same"
        return "?"

    async with running(app):
        made = [await task.defer_async() for task in (sleeps, asks, insists)]
        await until(lambda: len(started) == 3)
        begun = time.monotonic()
        for job in made:
            conn.execute("select queue.cancel(%s, abort => true)", (job.id,))
        rows = await jobs.end()
        assert time.monotonic() - begun < 8  # a heartbeat reports it within 10 s
    assert [row["state"] for row in rows] == ["cancelled", "cancelled", "succeeded"]
    assert rows[2]["result"] == "done all the same"
    assert [a["outcome"] for a in jobs.attempts()] == ["aborted", "aborted"]


async def test_no_more_than_concurrency_at_once(app: App, jobs: Jobs) -> None:
    now = 0
    most = 0

    @app.task
    async def task() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1

    task.defer_many([{}] * 300)
    async with running(app, concurrency=7):
        await jobs.end()
    assert most == 7


async def test_only_its_queues(app: App, jobs: Jobs) -> None:
    @app.task
    async def task() -> None: ...

    async with running(app, ["a", "b*"]):
        for queue in ("c", "b1", "ab", "a"):
            await task.configure(queue=queue).defer_async()
        await until(lambda: list(jobs.states().values()).count("succeeded") == 2)
        await asyncio.sleep(0.05)
    done = {row["queue"]: row["state"] for row in jobs()}
    assert done == {"c": "ready", "b1": "succeeded", "ab": "ready", "a": "succeeded"}


async def test_an_idle_worker_is_woken(app: App, jobs: Jobs) -> None:
    started: dict[int, float] = {}

    @app.task
    async def task() -> None:
        started[current_job().id] = time.monotonic()

    delays = []
    async with running(app) as worker:
        for _ in range(5):
            await until(
                lambda: worker.id and worker.listener.holds_sleep_lock and worker.state.is_waiting
            )
            begun = time.monotonic()
            job = await task.defer_async()
            await until(lambda job=job: job.id in started)
            delays.append(started[job.id] - begun)
    # Five seconds if nothing wakes it.
    assert sorted(delays)[2] < 2.5


async def test_a_worker_that_sleeps_again_at_once(app: App, conn: Connection) -> None:
    """It does not leave the line after it has entered it anew."""
    async with running(app) as worker:
        await until(lambda: worker.id is not None)
        listener = worker.listener
        await until(lambda: listener.holds_sleep_lock and worker.state.is_waiting)
        leaving = asyncio.create_task(listener.after_sleep(worker.state.registered()))
        sleep = await worker.fetcher._before_sleep()
        await leaving
        assert listener.holds_sleep_lock
        assert sleep.is_drained
        assert conn.execute("select worker_id from queue.sleeper").fetchall() == [(worker.id,)]


async def test_a_schedule_starts_in_time(app: App, jobs: Jobs) -> None:
    late = []

    @app.task
    async def task() -> None:
        due = current_job().scheduled_at
        assert due is not None
        late.append((dt.datetime.now(dt.UTC) - due).total_seconds())

    async with running(app):
        # On a busy machine all of them may be late for another reason, now and then.
        for _ in range(20):
            late.clear()
            for delay in (0.3, 0.7, 1.2):
                await task.configure(delay=dt.timedelta(seconds=delay)).defer_async()
            await jobs.end()
            assert min(late) >= 0
            if max(late) < 0.45:  # a worker that looks each second: at least 0.5
                break
        else:
            pytest.fail(f"late by {late} s")


async def test_drain_also_runs_the_jobs_that_jobs_defer(app: App, jobs: Jobs) -> None:
    @app.task
    async def task(n: int) -> None:
        if n:
            await task.defer_async(n - 1)

    task.defer_many([{"n": n} for n in range(50)])
    await app.run_worker_async(drain=True, concurrency=5)
    await app.close_async()
    assert set(jobs.states().values()) == {"succeeded"}
    assert len(jobs()) == sum(range(51))


@pytest.mark.parametrize("options", [{"concurrency": 4}, {"slots": ["2:1h", 3]}])
async def test_ending_after_so_many_jobs(app: App, jobs: Jobs, options: Any) -> None:
    """No job is claimed beyond them, so none is given back, and all claimed jobs run."""

    @app.task(name="t")
    async def task() -> None:
        await asyncio.sleep(0)

    soon = dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)
    for deadline in (None, soon, None, soon, None, soon, None, soon, None, soon):
        app.defer("t", **({} if deadline is None else {"deadline": deadline}))
    for ended in (7, 10):
        worker = Worker(app, max_jobs=7, drain=True, **options)
        await worker.run_async()
        states = list(jobs.states().values())
        assert (states.count("succeeded"), worker.given_back) == (ended, 0)
        assert sum(row["attempts"] for row in jobs()) == ended
    await app.close_async()


async def test_jobs_that_crashed_go_first_where_workers_end_soon(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    @app.task(name="t")
    async def task() -> None: ...

    suspect = await task.defer_async()
    conn.execute("select queue.register_worker('dead')")
    conn.execute("select queue.fetch(max(id)) from queue.worker")
    give_up(conn)
    task.defer_many([{}] * 20)
    # A heartbeat holds the worker's row, which a fetch needs to take a job that runs alone.
    conn.execute(
        "create function slow() returns trigger language plpgsql as"
        " 'begin perform pg_sleep(1); return null; end'"
    )
    conn.execute(
        "create trigger slow after update of last_seen_at on queue.worker"
        " for each row execute function slow()"
    )
    await Worker(app, max_jobs=5).run_async()
    await app.close_async()
    assert jobs.states()[suspect.id] == "succeeded"
    assert list(jobs.states().values()).count("succeeded") == 5


async def test_ending_after_a_job_that_runs_alone(app: App, jobs: Jobs, conn: Connection) -> None:
    @app.task(name="t")
    async def task() -> None: ...

    suspect = await task.defer_async()
    conn.execute("select queue.register_worker('dead')")
    conn.execute("select queue.fetch(max(id)) from queue.worker")
    give_up(conn)
    await Worker(app, max_jobs=1).run_async()
    assert jobs.states() == {suspect.id: "succeeded"}
    await app.close_async()


class Base(orm.DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "app_user"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str]


@pytest.mark.parametrize("is_async", [True, False])
async def test_rows_are_fetched_again(app: App, jobs: Jobs, dsn: str, is_async: bool) -> None:
    url = url_of(dsn)
    engine = sa.create_engine(url)
    Base.metadata.create_all(engine)
    threads = set()

    def get(model: type[Any], key: Any) -> Any:
        threads.add(threading.current_thread())
        with orm.Session(engine, expire_on_commit=False) as session:
            return session.get(model, key)

    async def get_async(model: type[Any], key: Any) -> Any:
        return await asyncio.to_thread(get, model, key)

    encode, decode = model_codec(get_async if is_async else get)
    app.codec.register(Base, "row", encode, decode, blocking=not is_async)

    @app.task
    async def greet(user: User) -> str:
        return user.name

    @app.task
    def greet_in_thread(user: User) -> str:
        return user.name

    with orm.Session(engine) as session:
        old, gone = User(name="old"), User(name="gone")
        session.add_all([old, gone])
        session.flush()
        for task in (greet, greet_in_thread):
            task.defer_with(session, old)
            task.defer_with(session, gone)
        old.name = "new"
        session.flush()
        session.delete(gone)
        session.commit()
    await app.run_worker_async(drain=True)
    await app.close_async()
    engine.dispose()
    assert [(r["state"], r["result"], r["error"]) for r in jobs()] == [
        ("succeeded", "new", None),
        ("failed", None, f"DecodeError: the row {__name__}:User 2 has gone"),
    ] * 2
    assert threading.main_thread() not in threads


async def test_polling_where_nobody_can_be_woken(dsn: str, jobs: Jobs, conn: Connection) -> None:
    app = App(dsn, pgbouncer=True)

    @app.task
    async def task() -> None: ...

    async with running(app) as worker:
        await until(lambda: worker.id)
        listening = conn.execute(
            "select count(*) from pg_stat_activity where query like 'listen%'"
        ).fetchone()
        for _ in range(2):
            await asyncio.sleep(0.05)
            await task.defer_async()
            await jobs.end()
    assert listening == (0,)


def test_a_worker_does_not_run_where_gevent_has_patched_threads(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads would have event loops, of which one process then has only one."""
    patched = {"threading": False}
    monkey = SimpleNamespace(is_module_patched=patched.get)
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    app.run_worker(drain=True)
    patched["threading"] = True
    with pytest.raises(PgDeferError, match="where gevent has patched threads"):
        app.run_worker(drain=True)


@pytest.mark.parametrize("is_of_many", [False, True])
async def test_a_worker_runs_once(app: App, dsn: str, is_of_many: bool) -> None:
    worker = MultiWorker(app, [dsn], drain=True) if is_of_many else Worker(app, drain=True)
    await worker.run_async()
    with pytest.raises(PgDeferError, match="a worker runs once"):
        await worker.run_async()

"""Managing jobs: the results and effects of the methods of Job and App, and their transactions."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

from pgdefer import (
    AlreadyQueued,
    App,
    InvalidParameter,
    InvalidState,
    Job,
    JobCancelled,
    JobNotFound,
    QueueNotEmpty,
    WrongIsolation,
    current_job,
    models,
)
from support import url_of

from .conftest import Jobs, running

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Call = Callable[..., Awaitable[Any]]
LATER = dt.datetime(2999, 1, 1, tzinfo=dt.UTC)
# Each method of a job except `result`, with arguments.
METHODS: dict[str, tuple[Any, ...]] = {
    "state": (),
    "why": (),
    "cancel": (),
    "retry": (),
    "reschedule": (LATER,),
    "hold": (),
    "unhold": (),
    "set_priority": (5,),
    "set_deadline": (LATER,),
    "set_args": ({"n": 5},),
    "copy": (),
    "done": (),
    "fail": ("no",),
    "delete": (),
}


def twin(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method's twin for asyncio."""
    found: Callable[..., Any] = getattr(method.__self__, f"{method.__name__}_async")  # type: ignore[attr-defined]
    return found


@pytest.fixture(params=["sync", "async"])
async def call(request: pytest.FixtureRequest, app: App) -> AsyncIterator[Call]:
    """Calls a method of the app or of a job, or its twin."""

    async def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if request.param == "sync":
            return method(*args, **kwargs)
        return await twin(method)(*args, **kwargs)

    yield call
    await app.close_async()


def claim(conn: Connection) -> tuple[int, int]:
    """Claim the next job, and return the arguments for succeed."""
    (row,) = conn.execute(
        "select id, claim from queue.fetch(queue.register_worker('w'), null, 1)"
    ).fetchall()
    return row


def test_each_method_has_its_twin() -> None:
    public = {name for name, _ in inspect.getmembers(Job, inspect.isfunction) if name[0] != "_"}
    names = {*METHODS, "cancel_children", "fork", "info", "result", "signal", "stream"}
    assert public == names | {f"{name}_async" for name in names}
    for kind, name in [*((Job, name) for name in names), (App, "pause"), (App, "resume")]:
        plain, other = (inspect.signature(getattr(kind, n)) for n in (name, f"{name}_async"))
        assert [*plain.parameters] == [*other.parameters]
        if name in METHODS:
            assert plain.parameters["connection"].annotation == "AnyConnection"
            assert other.parameters["connection"].annotation == "AnyAsyncConnection"


async def test_what_each_does(app: App, jobs: Jobs, call: Call) -> None:
    job = app.job(app.defer("t").id)

    def now(*columns: str) -> tuple[Any, ...]:
        (row,) = jobs()
        return tuple(row[column] for column in columns)

    assert await call(job.state) == "ready"
    assert await call(job.why) == "no live worker serves its queue default"
    assert await call(job.hold) == "held"
    assert now("state") == ("held",)
    assert await call(job.state) == "held"
    assert await call(job.why) == "it is held; queue.unhold releases it"
    assert await call(job.unhold) == "ready"
    assert now("state") == ("ready",)
    assert await call(job.reschedule, LATER) == "scheduled"
    assert now("state", "scheduled_at") == ("scheduled", LATER)
    assert await call(job.reschedule) == "ready"
    assert now("state") == ("ready",)
    assert await call(job.set_priority, -7) == "ready"
    assert now("priority") == (-7,)
    assert await call(job.set_args, {"at": LATER}) == "ready"
    assert [app.codec.decode(row["args"]) for row in jobs()] == [{"at": LATER}]
    assert await call(job.cancel) == "cancelled"
    assert now("state") == ("cancelled",)
    assert await call(job.retry) == "ready"
    assert now("state") == ("ready",)
    assert await call(job.fail, "no") == "failed"
    assert now("state", "error") == ("failed", "no")
    assert await call(job.done) == "succeeded"
    assert now("state") == ("succeeded",)
    copy = await call(job.copy, "other")
    assert await call(job.delete) is None
    assert [(row["id"], row["state"], row["queue"]) for row in jobs()] == [(copy, "ready", "other")]


async def test_queues(app: App, jobs: Jobs, call: Call) -> None:
    assert await call(app.create_queue, "mail", paused=True) is True
    assert await call(app.create_queue, "mail") is False
    limits = {"max_running": 2, "rate": {"limit": 10, "per": "1 min"}}
    await call(app.configure_queue, "mail", limits)
    await call(app.configure_queue, "mail", {"max_running": None})
    (found,) = await call(app.list_queues)
    assert (found.name, found.max_running, found.rate) == ("mail", None, "10 per 00:01:00")
    assert found.paused_until is not None
    hour = dt.timedelta(hours=1)
    limits = {"rate": {"limit": 1, "per": hour}, "retain": hour}
    await call(app.configure_queue, "mail", limits)
    (found,) = await call(app.list_queues)
    assert (found.rate, found.retain) == ("1 per 01:00:00", hour)
    for wrong, error in [
        ({"retain": object()}, "take numbers, text, timedeltas and None"),
        ({"retain": dt.timedelta.max}, "must be from 0 to 4,000 years"),
        ("retain", "options must be a mapping"),
    ]:
        with pytest.raises((TypeError, ValueError), match=error):
            await call(app.configure_queue, "mail", wrong)
    app.defer("t", queue="mail")
    with pytest.raises(QueueNotEmpty):
        await call(app.delete_queue, "mail")
    assert await call(app.delete_queue, "mail", force=True) == 1
    assert await call(app.list_queues) == []


async def test_keys_and_shares(app: App, conn: Connection, call: Call) -> None:
    app.defer("t", concurrency_key="site:a", concurrency_limit=5)
    app.defer("t", share="customer")
    rate = {"limit": 10, "per": dt.timedelta(minutes=1)}
    await call(app.configure_key, "site:*", {"limit": 2, "rate": rate})
    await call(app.configure_share, "customer", {"weight": 3})
    conn.execute("select queue.tick()")
    found = {limit.key: limit for limit in await call(app.list_limits)}
    assert (found["site:a"].limit, found["site:a"].rate_per) == (2, dt.timedelta(minutes=1))
    (share,) = [one for one in await call(app.list_shares) if one.share == "customer"]
    assert share.weight == 3
    with pytest.raises(TypeError, match="options must be a mapping"):
        await call(app.configure_key, "site:*", 2)
    with pytest.raises(InvalidParameter):
        await call(app.configure_share, "customer", {"weight": -1})


async def test_changes_of_many_jobs(app: App, jobs: Jobs, call: Call) -> None:
    many = [app.defer("t") for _ in range(3)]
    await call(app.fail_jobs, many, "no")
    assert list(jobs.states().values()) == ["failed"] * 3
    assert {row["error"] for row in jobs()} == {"no"}
    await call(app.retry_jobs, many)
    assert list(jobs.states().values()) == ["ready"] * 3
    await call(app.done_jobs, [job.id for job in many[:2]])
    with pytest.raises(InvalidState):
        await call(app.fail_jobs, many, "no")
    assert list(jobs.states().values()) == ["succeeded", "succeeded", "failed"]
    await call(app.delete_jobs, many)
    assert jobs.states() == {}
    with pytest.raises(JobNotFound):
        await call(app.delete_jobs, many)


async def test_schedules(app: App, call: Call) -> None:
    await call(app.schedule, "yearly", "0 0 1 1 *", "t")
    assert await call(app.enable_schedule, "yearly", False) is None
    (next_run,) = await call(app.next_runs, "0 0 1 1 *", n=1)
    assert await call(app.enable_schedule, "yearly") == next_run
    with pytest.raises(ValueError, match="cron"):
        await call(app.next_runs, "yearly")


async def test_nobody_is_in_the_way(app: App, call: Call) -> None:
    assert await call(app.unblock) is None


async def test_a_retry_at_two_times(app: App, call: Call) -> None:
    job = app.defer("t")
    with pytest.raises(ValueError, match="at and delay exclude each other"):
        await call(job.retry, at=LATER, delay=dt.timedelta(minutes=1))
    with pytest.raises(InvalidState, match="state: ready") as raised:
        await call(job.retry, force=True)
    assert raised.value.hint == "Where another transaction changes the job, try again."


async def test_a_retry_that_waits_is_made_at_once(
    app: App, conn: Connection, jobs: Jobs, call: Call
) -> None:
    job = app.defer("t", retry={"max_attempts": 2, "base": 3600})
    conn.execute("select queue.fail(%s, %s, 'no')", claim(conn))
    assert await call(job.state) == "scheduled"
    assert await call(job.retry) == "ready"
    assert [row["failures"] for row in jobs()] == [0]


async def test_a_retry_at_another_time_on_another_queue(
    app: App, conn: Connection, jobs: Jobs, call: Call
) -> None:
    job = app.defer("t", queue="a")

    def seen() -> tuple[Any, ...]:
        (row,) = jobs()
        return row["state"], row["queue"], row["scheduled_at"], row["failures"]

    claimed = claim(conn)
    with pytest.raises(InvalidState):
        await call(job.retry, at=LATER, queue="b")
    assert seen()[:3] == ("running", "a", None)
    conn.execute("select queue.fail(%s, %s, 'no')", claimed)
    assert await call(job.retry, at=LATER) == "scheduled"
    assert seen() == ("scheduled", "a", LATER, 0)
    assert await call(job.retry, queue="b") == "ready"
    assert seen()[:2] == ("ready", "b")
    with pytest.raises(InvalidParameter):
        await call(job.retry, queue="c*", force=True)
    claim(conn)
    assert await call(job.retry, at=LATER, queue="c", force=True) == "scheduled"
    assert seen() == ("scheduled", "c", LATER, 0)
    with pytest.raises(JobNotFound):
        await call(app.job(999).retry, at=LATER, queue="c")


async def test_a_retry_changes_a_job_in_one_call(
    app: App, conn: Connection, jobs: Jobs, call: Call
) -> None:
    head, job = app.defer("t", lock="held"), app.defer("t", lock="left", priority=4)
    job.cancel()

    def seen() -> tuple[Any, ...]:
        row = jobs()[-1]
        return row["state"], row["queue"], row["priority"], row["lock"]

    assert await call(job.retry, priority=-1, queue="b", lock="held") == "blocked"
    assert seen() == ("blocked", "b", -1, "held")
    head.cancel()
    assert seen()[0] == "ready"
    job.cancel()
    before = conn.execute("select clock_timestamp()").fetchone()
    assert await call(job.retry, delay=dt.timedelta(days=1), lock="{x}") == "scheduled"
    assert seen() == ("scheduled", "b", -1, "{x}")
    at = jobs()[-1]["scheduled_at"]
    assert before is not None
    assert dt.timedelta(days=1) <= at - before[0] < dt.timedelta(days=1, hours=1)
    job.cancel()
    assert await call(job.retry, at=LATER, lock="") == "scheduled"
    assert (*seen(), jobs()[-1]["scheduled_at"]) == ("scheduled", "b", -1, None, LATER)
    job.cancel()
    with pytest.raises(InvalidParameter):
        await call(job.retry, at=LATER, delay=dt.timedelta(1))
    with pytest.raises(TypeError, match="priority must be an int"):
        await call(job.retry, priority="high")
    with pytest.raises(ValueError, match="at has no time zone"):
        await call(job.retry, at=LATER.replace(tzinfo=None))
    assert seen()[0] == "cancelled"


async def test_an_id_that_is_none(app: App, call: Call) -> None:
    said = []
    for name, args in METHODS.items():
        with pytest.raises(JobNotFound) as raised:
            await call(getattr(app.job(999), name), *args)
        assert raised.value.detail == "id: 999"
        said.append(str(raised.value))
    # Refusals in rows have the words of the database.
    assert len(said) == len(METHODS)
    assert len(set(said)) == 1


async def test_wrong_states(app: App, conn: Connection, jobs: Jobs, call: Call) -> None:
    made = {"running": app.defer("t", priority=9)}
    claim(conn)
    made["succeeded"] = app.defer("t", priority=8)
    conn.execute("select queue.succeed(%s, %s)", claim(conn))
    made["cancelled"] = app.defer("t")
    made["cancelled"].cancel()
    made["held"] = app.defer("t", held=True)
    made["ready"] = app.defer("t")
    made["waiting"] = app.defer("t", needs=[made["ready"]])
    assert {name: job.state() for name, job in made.items()} == {name: name for name in made}
    refused = {
        "running": ["cancel", "retry", "reschedule", "hold", "unhold", "set_args", "delete"],
        "succeeded": ["cancel", "reschedule", "hold", "unhold", "set_args"],
        "cancelled": ["cancel", "reschedule", "hold", "unhold"],
        "held": ["retry"],
        "ready": ["retry", "unhold", "delete"],
        "waiting": ["retry", "unhold"],
    }
    before = jobs()
    for state, names in refused.items():
        job = made[state]
        for name in names:
            with pytest.raises(InvalidState, match="the job's state does not allow this") as raised:
                await call(getattr(job, name), *METHODS[name])
            needed = ", needed by job 6" if (state, name) == ("ready", "delete") else ""
            assert raised.value.detail == f"id: {job.id}, state: {state}{needed}"
            assert raised.value.hint
    assert jobs() == before


async def test_force_changes_running_and_needed_jobs(
    app: App, conn: Connection, jobs: Jobs, call: Call
) -> None:
    job = app.defer("t")
    claim(conn)
    assert await call(job.retry, force=True) == "ready"
    claim(conn)
    assert await call(job.delete, force=True) is None
    needed = app.defer("t")
    needing = app.defer("t", needs=[needed])
    await call(needed.delete, force=True)
    assert jobs.states() == {needing.id: "upstream_failed"}


async def test_a_queueing_lock_that_another_has(app: App, call: Call) -> None:
    job = app.defer("t", queueing_lock="k")
    job.cancel()
    app.defer("t", queueing_lock="k")
    with pytest.raises(AlreadyQueued) as taken:
        app.defer("t", queueing_lock="k")
    with pytest.raises(AlreadyQueued, match=taken.value.message) as raised:
        await call(job.retry)
    assert raised.value.detail == f"id: {job.id}, state: cancelled"
    assert await call(job.state) == "cancelled"


async def test_a_running_job_is_aborted(app: App, jobs: Jobs, call: Call) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    @app.task(name="endless")
    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with running(app):
        job = await endless.defer_async()
        await asyncio.wait_for(begun.wait(), 300)
        with pytest.raises(InvalidState, match="state: running"):
            await call(job.cancel)
        assert not stopped.is_set()
        assert await call(job.cancel, abort=True) == "running"
        await asyncio.wait_for(stopped.wait(), 300)
        with pytest.raises(JobCancelled):
            await job.result_async(300)
    assert [row["outcome"] for row in jobs.attempts()] == ["aborted"]


async def test_whatever_has_an_id(app: App, dsn: str, jobs: Jobs, call: Call) -> None:
    other = App(dsn, name="another")

    @app.task(name="t")
    async def task() -> int:
        return other.job(current_job()).id

    job = task.defer()
    theirs = other.job(job)
    assert (theirs, hash(theirs), int(theirs)) == (job, hash(job), job.id)
    assert theirs.client is other.client
    with pytest.raises(AttributeError):
        theirs.id = 2  # type: ignore[misc]
    assert await call(theirs.hold) == "held"
    assert job.state() == "held"
    engine = sa.create_engine(url_of(dsn))
    with orm.Session(engine) as session:
        assert other.job(session.scalars(sa.select(models.Job)).one()) == job
    engine.dispose()
    assert await call(theirs.unhold) == "ready"
    async with running(app):
        assert await theirs.result_async(300) == job.id
    await other.close_async()


# Queues and tasks


async def test_pausing(app: App, conn: Connection, jobs: Jobs, call: Call) -> None:
    for queue, task in (("mail", "a"), ("mail", "b"), ("mail.slow", "a"), ("x", "a")):
        app.defer(task, queue=queue)

    def paused() -> list[int]:
        return [row["id"] for row in jobs() if row["reason"] == "paused"]

    assert await call(app.pause, "mail") == 2
    assert paused() == [1, 2]
    assert await call(app.resume, "mail") == 2
    assert paused() == []
    assert await call(app.pause, "mail*", task="a") == 2
    assert paused() == [1, 3]
    assert await call(app.resume, "mail.slow", task="a") == 1
    assert paused() == [1]
    assert await call(app.pause, "x") == 1
    assert await call(app.resume, "x", task="a") == 1
    assert paused() == [1, 4]
    assert await call(app.pause, task="b", until=LATER) == 1
    assert await call(app.job(2).why) == "its task b is paused until 2999-01-01 00:00:00+00"
    assert await call(app.pause) == 4
    assert conn.execute("select from queue.fetch(queue.register_worker('w'))").fetchall() == []
    assert await call(app.resume) == 4
    assert paused() == []
    with pytest.raises(InvalidParameter, match="queue is missing"):
        await call(app.pause, "")
    with pytest.raises(ValueError, match="until has no time zone"):
        await call(app.pause, until=LATER.replace(tzinfo=None))
    with pytest.raises(InvalidParameter, match="until is in the past"):
        await call(app.pause, until=LATER.replace(year=1999))


# In the caller's transaction


@contextlib.asynccontextmanager
async def opened(kind: str, dsn: str) -> AsyncIterator[Any]:
    """A connection of each library, in a transaction."""
    is_async = kind.startswith("async")
    if kind == "psycopg":
        with psycopg.connect(dsn) as connection:
            yield connection
    elif kind == "async psycopg":
        async with await psycopg.AsyncConnection.connect(dsn) as other:
            yield other
    elif not is_async:
        engine = sa.create_engine(url_of(dsn))
        with orm.Session(engine) if kind == "session" else engine.connect() as mine:
            yield mine
        engine.dispose()
    else:
        _, what, driver = kind.split()
        engine = sa_async.create_async_engine(url_of(dsn, driver))
        if what == "session":
            made: Any = sa_async.AsyncSession(engine)
        else:
            made = engine.connect()
        async with made as mine:
            yield mine
        await engine.dispose()


KINDS = [
    "psycopg",
    "session",
    "connection",
    "async psycopg",
    "async session psycopg",
    "async session asyncpg",
    "async connection asyncpg",
]


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_in_the_callers_transaction(
    app: App, dsn: str, jobs: Jobs, kind: str, is_committed: bool
) -> None:
    # It must never be used.
    nowhere = App("postgresql://nowhere.invalid/x")
    cases: list[tuple[str, tuple[Any, ...], str | None]] = [
        ("cancel", (), "cancelled"),
        ("retry", (), "ready"),
        ("reschedule", (LATER,), "scheduled"),
        ("hold", (), "held"),
        ("unhold", (), "ready"),
        ("set_priority", (5,), "ready"),
        ("set_deadline", (LATER,), "ready"),
        ("set_args", ({"n": 5},), "ready"),
        ("delete", (), None),
    ]
    made = {name: app.defer("t", held=name == "unhold") for name, *_ in cases}
    made["retry"].cancel()
    app.defer("u", queue="mail")
    before = jobs()

    async with opened(kind, dsn) as mine:

        async def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if kind.startswith("async"):
                return await twin(method)(*args, **kwargs, connection=mine)
            return method(*args, **kwargs, connection=mine)

        for name, args, state in cases:
            job = nowhere.job(made[name])
            assert await call(getattr(job, name), *args) == state
            if state is not None:
                assert await call(job.state) == state
                assert await call(job.why)
        assert await call(nowhere.pause, "mail") == 1
        assert await call(nowhere.resume, "mail") == 1
        assert await call(nowhere.pause, "mail", until=LATER) == 1
        assert jobs() == before
        done = mine.commit() if is_committed else mine.rollback()
        if inspect.isawaitable(done):
            await done
    if not is_committed:
        assert jobs() == before
        return
    rows = {row["id"]: row for row in jobs()}
    assert {name: rows[made[name].id]["state"] for name, _, state in cases if state} == {
        name: state for name, _, state in cases if state
    }
    assert made["delete"].id not in rows
    assert rows[made["set_priority"].id]["priority"] == 5
    assert rows[made["set_deadline"].id]["deadline"] == LATER
    assert rows[made["set_args"].id]["args"] == {"n": 5}
    assert rows[made["reschedule"].id]["scheduled_at"] == LATER
    assert [row["reason"] for row in rows.values() if row["queue"] == "mail"] == ["paused"]


def test_a_job_of_the_same_transaction(
    app: App, jobs: Jobs, connect: Callable[..., Connection]
) -> None:
    mine = connect(autocommit=False)
    job = app.defer("t", connection=mine)
    assert job.state(connection=mine) == "ready"
    with pytest.raises(JobNotFound):
        job.state()
    for name in set(METHODS) - {"state", "why", "copy"}:
        with pytest.raises(InvalidState, match=f"id: {job.id}, state: ready"), mine.transaction():
            getattr(job, name)(*METHODS[name], connection=mine)
    mine.commit()
    assert jobs.states() == {job.id: "ready"}
    assert job.hold() == "held"


def test_another_isolation(app: App, connect: Callable[..., Connection]) -> None:
    mine = connect(autocommit=False)
    mine.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    job = app.defer("t")
    assert job.state(connection=mine) == "ready"
    for change in (job.hold, job.delete, app.pause):
        with pytest.raises(WrongIsolation), mine.transaction():
            change(connection=mine)
    assert job.state() == "ready"


async def test_wrong_kinds_of_connection(app: App, dsn: str, conn: Connection) -> None:
    job = app.defer("t")
    refused = "this call can't use a psycopg.*: give .*; asynchronous ones to functions whose names"
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        for name, args in METHODS.items():
            method = getattr(job, name)
            with pytest.raises(TypeError, match=refused):
                method(*args, connection=other)
            with pytest.raises(TypeError, match=refused):
                await twin(method)(*args, connection=conn)
    assert job.state() == "ready"

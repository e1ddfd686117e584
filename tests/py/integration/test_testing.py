"""pgdefer.testing, from the side of a user's tests."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

from pgdefer import (
    AlreadyQueued,
    App,
    Decision,
    DecodeError,
    JobNotFound,
    PgDeferError,
    Retry,
    RetryLater,
    Worker,
    current_job,
)
from pgdefer.database.sql import DEFER_MANY
from pgdefer.testing import CommittedTestQueue, MemoryQueue, TestQueue, fake_job
from support import url_of

pytestmark = pytest.mark.client


class Shop:
    """An application whose tasks record their calls."""

    def __init__(self, dsn: str) -> None:
        self.app = app = App(dsn, name="shop")
        self.notes: list[Any] = []

        @app.task(name="greet")
        def greet(name: str, polite: bool = False) -> str:
            self.notes.append((name, polite))
            return f"hello {name}"

        @app.task(name="greet_async")
        async def greet_async(name: str) -> str:
            await asyncio.sleep(0)
            job = await greet.defer_async(f"{name}'s child")
            self.notes.append(name)
            return f"{name} has deferred {job.id}"

        @app.task(name="flaky", retry=Retry(3, base=dt.timedelta(minutes=5)))
        def flaky(fails: int) -> int:
            if current_job().attempt <= fails:
                raise OSError("not yet")
            return current_job().attempt

        @app.task(name="pay", transactional=True)
        def pay(connection: psycopg.Connection[Any], amount: int) -> str:
            connection.execute("insert into payment values (%s)", (amount,))
            if amount < 0:
                raise ValueError(amount)
            return "paid"

        @app.task(name="pay_async", transactional=True)
        async def pay_async(connection: psycopg.AsyncConnection[Any], amount: int) -> str:
            async with connection.transaction(), connection.cursor() as cursor:
                await cursor.execute("insert into payment values (%s) returning 1", (amount,))
                assert await cursor.fetchone() == (1,)
            await greet.defer_with_async(connection, "payer")
            return "paid"

        @app.recurring("0 3 * * *", timezone="Europe/Paris", args={"name": "night"})
        @app.task(name="nightly")
        def nightly(name: str, scheduled_for: dt.datetime) -> None:
            self.notes.append((name, scheduled_for.astimezone(dt.UTC)))

        self.greet, self.greet_async, self.flaky = greet, greet_async, flaky
        self.pay, self.pay_async, self.nightly = pay, pay_async, nightly


@pytest.fixture
def shop(dsn: str) -> Iterator[Shop]:
    shop = Shop(dsn)
    yield shop
    shop.app.close()


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn) as connection:
        connection.execute("create table payment (amount integer)")
        yield connection
        connection.rollback()


@pytest.fixture
def queue(shop: Shop, connection: psycopg.Connection[Any]) -> Iterator[TestQueue]:
    with TestQueue(shop.app, connection) as queue:
        yield queue


def jobs_left(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("select count(*) from queue.jobs").fetchone()
    assert row is not None
    return int(row[0])


def test_what_was_deferred(shop: Shop, queue: TestQueue) -> None:
    queue.assert_not_deferred()
    shop.greet.defer("Ann", polite=True)
    shop.greet.configure(queue="mail", priority=3).defer("Bob")
    shop.app.defer("unknown", {"when": dt.date(2030, 1, 1)})
    assert [job.task for job in queue.deferred()] == ["greet", "greet", "unknown"]
    job = queue.assert_deferred(shop.greet, "Bob")
    assert (job.queue, job.priority, job.state) == ("mail", 3, "ready")
    assert queue.assert_deferred("unknown").args == {"when": dt.date(2030, 1, 1)}
    assert len(queue.deferred(shop.greet, polite=True)) == 1
    queue.assert_not_deferred(shop.flaky)
    queue.assert_not_deferred(shop.greet, "Cid")
    with pytest.raises(AssertionError, match=r"greet\(name='Cid'\) was not deferred, but\n  1: "):
        queue.assert_deferred(shop.greet, "Cid")
    with pytest.raises(AssertionError, match=r"deferred:\n  1: greet\(name='Ann'"):
        queue.assert_not_deferred(shop.greet)


def test_run_and_result(shop: Shop, queue: TestQueue) -> None:
    job = shop.greet.defer("Ann")
    later = shop.greet.configure(delay=dt.timedelta(hours=1)).defer("later")
    with pytest.raises(TimeoutError, match=r"job 1 is ready: no worker runs in a test, call run"):
        job.result()
    (ran,) = queue.run()
    assert (ran.task, ran.attempt, ran.state, ran.result) == ("greet", 1, "succeeded", "hello Ann")
    assert job.result() == "hello Ann"
    assert later.state() == "scheduled"
    assert shop.notes == [("Ann", False)]


def test_coroutines_in_a_synchronous_test(shop: Shop, queue: TestQueue) -> None:
    job = shop.greet_async.defer("Ann")
    assert [one.task for one in queue.run()] == ["greet_async", "greet"]
    assert job.result() == "Ann has deferred 2"
    (child,) = queue.deferred(shop.greet)
    assert child.parent == job.id


def test_the_error_of_a_coroutine_is_its_own(shop: Shop, queue: TestQueue) -> None:
    @shop.app.task(name="divide", retry=Retry(1))
    async def divide() -> float:
        return 1 / 0

    divide.defer()
    with pytest.raises(ZeroDivisionError) as caught:
        queue.run()
    assert caught.value.__context__ is None


async def test_an_asynchronous_test(shop: Shop, queue: TestQueue) -> None:
    job = await shop.greet_async.defer_async("Ann")
    assert [one.task for one in await queue.run_async()] == ["greet_async", "greet"]
    assert await job.result_async() == "Ann has deferred 2"


BROKEN: dict[str, BaseException] = {
    "SystemExit: 3": SystemExit(3),
    "CancelledError: own": asyncio.CancelledError("own"),
}


@pytest.mark.parametrize("said", BROKEN)
@pytest.mark.parametrize("options", [{}, {"batch": 2}, {"transactional": True}], ids=str)
async def test_what_ends_a_job_as_in_a_worker(
    shop: Shop, queue: TestQueue, options: dict[str, Any], said: str
) -> None:
    @shop.app.task(name="function", retry=Retry(1), **options)
    def function(*_: Any) -> None:
        raise BROKEN[said]

    @shop.app.task(name="coroutine", retry=Retry(1), **options)
    async def coroutine(*_: Any) -> None:
        raise BROKEN[said]

    for task in (function, coroutine):
        shop.app.defer(task.name)
        (ran,) = await queue.run_async(raise_errors=False)
        assert (ran.state, ran.error) == ("failed", BROKEN[said])
        shop.app.defer(task.name)
        (ran,) = queue.run(raise_errors=False)
        assert (ran.state, ran.error) == ("failed", BROKEN[said])
    assert {job.error for job in queue.deferred()} == {said}


@pytest.mark.parametrize("options", [{}, {"batch": 2}], ids=str)
async def test_what_ends_a_run(shop: Shop, queue: TestQueue, options: dict[str, Any]) -> None:
    @shop.app.task(name="interrupted", **options)
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    @shop.app.task(name="long", **options)
    async def long(*_: Any) -> None:
        await asyncio.sleep(60)

    shop.app.defer("interrupted")
    with pytest.raises(KeyboardInterrupt):
        queue.run(raise_errors=False)
    shop.app.defer("long")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await queue.run_async(raise_errors=False)


async def test_a_run_that_is_cancelled(shop: Shop, queue: TestQueue) -> None:
    begun, end = threading.Event(), threading.Event()

    @shop.app.task(name="long")
    def long() -> None:
        begun.set()
        end.wait(60)

    await long.defer_async()
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await queue.run_async()
        assert begun.is_set()
        with pytest.raises(LookupError):
            current_job()
    finally:
        end.set()


def test_retries_and_the_passing_of_time(shop: Shop, queue: TestQueue) -> None:
    job = shop.flaky.defer(2)
    states = [one.state for one in queue.run()]
    assert states == ["scheduled"]
    assert not queue.run()
    assert queue.travel(minutes=4) == []
    assert [one.id for one in queue.travel(minutes=1)] == [job.id]
    (ran,) = queue.run()
    assert isinstance(ran.error, OSError)
    queue.travel(minutes=10)
    assert [one.state for one in queue.run()] == ["succeeded"]
    assert job.result() == 3


def test_time_passes_for_jobs_that_wait(shop: Shop, queue: TestQueue) -> None:
    """For their needs, or held: they are not due, but will not wait for their time as well."""
    hour = dt.timedelta(hours=1)
    need = shop.greet.configure(delay=hour).defer("first")
    shop.greet.configure(needs=[need], delay=hour).defer("second")
    held = shop.greet.configure(held=True, delay=hour).defer("third")
    later = shop.greet.configure(held=True, delay=3 * hour).defer("later")
    assert [job.id for job in queue.travel(hours=2)] == [need.id]
    queue.run()
    held.unhold()
    later.unhold()
    queue.run()
    assert [name for name, _ in shop.notes] == ["first", "second", "third"]
    assert [job.id for job in queue.travel(hours=1)] == [later.id]


def test_the_error_of_a_final_failure_is_raised(shop: Shop, queue: TestQueue) -> None:
    shop.flaky.configure(retry=Retry(1)).defer(5)
    with pytest.raises(OSError, match="not yet"):
        queue.run()
    shop.flaky.configure(retry=Retry(1)).defer(5)
    (ran,) = queue.run(raise_errors=False)
    assert (ran.state, str(ran.error)) == ("failed", "not yet")


def test_one_that_defers_itself_for_ever(shop: Shop, queue: TestQueue) -> None:
    @shop.app.task(name="endless")
    def endless() -> None:
        endless.defer()

    endless.defer()
    with pytest.raises(AssertionError, match=r"5 jobs have run, .* does endless defer itself"):
        queue.run(max_jobs=5)


def test_schedules_run_only_when_asked(shop: Shop, queue: TestQueue) -> None:
    assert queue.travel(days=1) == []
    due = queue.travel(days=2, schedules=True)
    assert [job.task for job in due] == ["nightly", "nightly"]
    queue.run()
    (first, second) = shop.notes
    assert first[0] == "night"
    assert second[1] - first[1] in (dt.timedelta(hours=h) for h in (23, 24, 25))


def test_all_runs_of_all_schedules(dsn: str, connection: psycopg.Connection[Any]) -> None:
    """More than one call returns, with deadlines, and none of a schedule that is disabled."""
    app = App(dsn, name="clock")

    @app.recurring("* * * * *", deadline=dt.timedelta(hours=2))
    @app.task(name="minutely")
    def minutely() -> None: ...

    @app.recurring("* * * * *", enabled=False)
    @app.task(name="never")
    def never() -> None: ...

    with TestQueue(app, connection) as clock:
        due = clock.travel(days=1, schedules=True)
        assert {(job.task, job.deadline is None) for job in due} == {("minutely", False)}
        assert len({job.args["scheduled_for"] for job in due}) == len(due) == 24 * 60


def test_changes_of_a_job_that_the_test_has_deferred(shop: Shop, queue: TestQueue) -> None:
    app = shop.app
    jobs = [app.defer("greet", {"name": str(n)}) for n in range(6)]
    jobs[0].cancel()
    jobs[1].hold()
    jobs[2].reschedule(dt.datetime.now(dt.UTC) + dt.timedelta(days=1))
    jobs[3].set_priority(7)
    jobs[4].delete()
    jobs[5].set_args({"name": "other"})
    assert [job.state for job in queue.deferred()] == [
        *("cancelled", "held", "scheduled", "ready", "ready")
    ]
    assert [ran.result for ran in queue.run()] == ["hello 3", "hello other"]


def test_a_savepoint_that_is_rolled_back(
    shop: Shop, queue: TestQueue, connection: psycopg.Connection[Any]
) -> None:
    with connection.transaction(force_rollback=True):
        shop.app.defer("greet", {"name": "Ann"})
        assert len(queue.run()) == 1
    shop.app.defer("greet", {"name": "Bob"})
    assert [ran.result for ran in queue.run()] == ["hello Bob"]


def test_transactional_tasks(
    shop: Shop, queue: TestQueue, connection: psycopg.Connection[Any]
) -> None:
    shop.pay.defer(5)
    shop.pay_async.defer(6)
    assert [one.state for one in queue.run()] == ["succeeded"] * 3
    shop.pay.defer(-1)
    with pytest.raises(ValueError, match="-1"):
        queue.run()
    assert connection.execute("select * from payment order by 1").fetchall() == [(5,), (6,)]


def test_immediate_mode(shop: Shop, queue: TestQueue) -> None:
    with queue.immediate():
        assert shop.greet_async.defer("Ann").result() == "Ann has deferred 2"
    assert shop.notes == ["Ann", ("Ann's child", False)]
    shop.greet.defer("Bob")
    assert len(shop.notes) == 2


async def test_a_coroutine_knows_its_job_in_a_call_that_blocks_the_loop(
    shop: Shop, queue: TestQueue
) -> None:
    @shop.app.task(name="who")
    async def who() -> int:
        await asyncio.sleep(0)
        return current_job().id

    job = who.defer()
    assert [ran.result for ran in queue.run()] == [job.id]
    with queue.immediate():
        job = who.defer()
    assert job.result() == job.id


async def test_immediate_mode_of_coroutines(shop: Shop, queue: TestQueue) -> None:
    with queue.immediate():
        await shop.greet_async.defer_async("Ann")
        shop.greet_async.defer("Bob")
    assert [note for note in shop.notes if isinstance(note, str)] == ["Ann", "Bob"]


def test_a_refused_call_leaves_the_transaction(shop: Shop, queue: TestQueue) -> None:
    once = shop.greet.configure(queueing_lock="once")
    once.defer("Ann")
    with pytest.raises(AlreadyQueued):
        once.defer("Bob")
    assert len(queue.deferred()) == 1


def test_an_error_of_the_database_in_a_handler(
    shop: Shop, queue: TestQueue, connection: psycopg.Connection[Any]
) -> None:
    @shop.app.task(name="wrong")
    def wrong() -> None:
        connection.execute("select 1/0")

    wrong.defer()
    with pytest.raises(psycopg.errors.DivisionByZero):
        queue.run()
    assert queue.deferred()[0].state == "failed"


def test_nothing_is_left(shop: Shop, dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        with TestQueue(shop.app, connection) as queue:
            shop.greet.defer("Ann")
            queue.run()
        connection.rollback()
    assert jobs_left(dsn) == 0
    shop.greet.defer("real")
    assert jobs_left(dsn) == 1


def test_a_queue_within_another(shop: Shop, dsn: str) -> None:
    shop.app.open()  # else the transactions would wait for each other's registration
    with psycopg.connect(dsn) as connection, psycopg.connect(dsn) as other:
        with TestQueue(shop.app, connection) as queue:
            with TestQueue(shop.app, other):
                shop.greet.defer("Ann")
            with MemoryQueue(shop.app):
                shop.greet.defer("Bob")
            shop.greet.defer("Cid")
            assert [job.args["name"] for job in queue.deferred()] == ["Cid"]
        connection.rollback()
        other.rollback()
    assert shop.app.client.stand_in is None
    assert jobs_left(dsn) == 0


async def test_an_asynchronous_queue_within_another(
    shop: Shop, async_connection: sa_async.AsyncConnection
) -> None:
    with MemoryQueue(shop.app) as queue:
        async with TestQueue(shop.app, async_connection):
            await shop.greet.defer_async("Ann")
        shop.greet.defer("Bob")
    assert [job.args["name"] for job in queue.deferred()] == ["Bob"]


async def test_no_worker_runs_beside_a_queue(
    shop: Shop, connection: psycopg.Connection[Any], dsn: str
) -> None:
    """It would run the jobs of the App's own database."""
    shop.greet.defer("Ann")
    app, queues = shop.app, (MemoryQueue(shop.app), TestQueue(shop.app, connection))
    calls: list[Callable[[], object]] = [
        lambda: app.run_worker(drain=True),
        lambda: app.run_worker(dsns=[dsn], drain=True),
        lambda: app.stream_jobs(drain=True).__enter__(),
        Worker(app, drain=True).run,
    ]
    for queue in queues:
        with queue:
            for call in calls:
                with pytest.raises(RuntimeError, match="use a"):
                    await asyncio.to_thread(call)
            with pytest.raises(RuntimeError, match="use a"):
                await app.run_worker_async(drain=True)
            with pytest.raises(RuntimeError, match="use a"):
                await app.stream_jobs(drain=True).__aenter__()
    assert not shop.notes
    await app.run_worker_async(drain=True)
    assert shop.notes == [("Ann", False)]


def test_queues_left_in_the_order_of_entry(shop: Shop, connection: psycopg.Connection[Any]) -> None:
    first, second = TestQueue(shop.app, connection), MemoryQueue(shop.app)
    with MemoryQueue(shop.app) as outermost:
        first.__enter__()
        second.__enter__()
        third = TestQueue(shop.app, connection).__enter__()
        first.__exit__()
        second.__exit__()
        shop.greet.defer("Ann")
        assert len(third.deferred()) == 1
        third.__exit__()
        shop.greet.defer("Bob")
        assert [job.args["name"] for job in outermost.deferred()] == ["Bob"]
        with pytest.raises(RuntimeError, match="make another one"):
            outermost.__enter__()
    assert shop.app.client.stand_in is None
    assert not second.deferred()


def test_a_connection_that_would_commit_is_refused(shop: Shop, dsn: str) -> None:
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        pytest.raises(ValueError, match="in no transaction, so that nothing could be rolled back"),
        TestQueue(shop.app, connection),
    ):
        pass
    assert shop.app.client.stand_in is None


def test_a_session_of_sqlalchemy(shop: Shop, dsn: str) -> None:
    engine = sa.create_engine(url_of(dsn))
    with engine.connect() as connection, connection.begin() as outer:
        maker = orm.sessionmaker(connection, join_transaction_mode="create_savepoint")

        @shop.app.task(name="save", transactional=maker)
        def save(session: orm.Session, text: str) -> str:
            shop.greet.defer_with(session, text)
            return text

        @shop.app.task(name="commit", transactional=maker)
        def commit(session: orm.Session) -> None:
            session.commit()

        with TestQueue(shop.app, connection) as queue:
            with maker() as session:
                save.defer_with(session, "saved")
                session.commit()
            assert [one.task for one in queue.run()] == ["save", "greet"]
            commit.defer()
            with pytest.raises(PgDeferError, match="has ended its transaction"):
                queue.run()
        outer.rollback()
    engine.dispose()
    assert jobs_left(dsn) == 0


@pytest.fixture
async def async_connection(dsn: str) -> AsyncIterator[sa_async.AsyncConnection]:
    url = sa.make_url(url_of(dsn)).set(drivername="postgresql+asyncpg")
    engine = sa_async.create_async_engine(url)
    async with engine.connect() as connection, connection.begin() as outer:
        yield connection
        await outer.rollback()
    await engine.dispose()


async def test_an_asynchronous_connection(
    shop: Shop, async_connection: sa_async.AsyncConnection
) -> None:
    async with TestQueue(shop.app, async_connection) as queue:
        job = await shop.greet_async.defer_async("Ann")
        with pytest.raises(RuntimeError, match="await the method named"):
            queue.deferred()
        assert [one.task for one in await queue.run_async()] == ["greet_async", "greet"]
        assert (await queue.assert_deferred_async(shop.greet_async, "Ann")).state == "succeeded"
        assert await job.result_async() == "Ann has deferred 2"
        await queue.assert_not_deferred_async(shop.flaky)


async def test_calls_of_threads_take_turns(shop: Shop, queue: TestQueue) -> None:
    """Of the test, and of a handler."""

    @shop.app.task(name="fan")
    def fan(size: int) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(shop.greet.defer, map(str, range(size))))

    fan(40)
    defer = (asyncio.to_thread(shop.greet.defer, str(n)) for n in range(20))
    await asyncio.gather(*defer, *(shop.greet.defer_async("Ann") for _ in range(20)))
    fan.defer(40)
    assert {(job.task, job.state) for job in await queue.run_async()} == {
        ("greet", "succeeded"),
        ("fan", "succeeded"),
    }
    assert len(queue.deferred(shop.greet)) == 120


@pytest.mark.parametrize("driver", ["psycopg", "sqlalchemy"])
async def test_calls_of_coroutines_take_turns(
    shop: Shop, dsn: str, async_connection: sa_async.AsyncConnection, driver: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        connection: Any = async_connection
        if driver == "psycopg":
            connection = await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn))
            stack.push_async_callback(connection.rollback)
        queue = await stack.enter_async_context(TestQueue(shop.app, connection))
        await asyncio.gather(*(shop.greet.defer_async(str(n)) for n in range(20)))
        ran = await queue.run_async()
        assert sorted(int(name) for name, _ in shop.notes) == list(range(20))
        assert [one.state for one in ran] == ["succeeded"] * 20


def test_a_handler_that_is_called_directly(shop: Shop) -> None:
    with fake_job(args={"name": "Ann"}, attempt=2, headers={"trace": "x"}) as job:
        assert job.args == {"name": "Ann"}
        assert shop.flaky(1) == 2
        assert current_job().headers == {"trace": "x"}
        assert not current_job().should_abort()
        job.abort()
        assert current_job().should_abort()
        assert current_job().extend(dt.timedelta(5)) > dt.datetime.now(dt.UTC)
        assert job.leases == [dt.timedelta(5)]
    with pytest.raises(LookupError):
        current_job()
    moment = dt.datetime(2030, 1, 1, 3, tzinfo=dt.UTC)
    with fake_job(scheduled_for=moment):
        assert current_job().scheduled_for == moment


def test_queues_to_run_are_a_list(queue: TestQueue) -> None:
    given: Any = "a"
    with pytest.raises(TypeError, match=r"queues must be a list, not 'a': give \['a'\]"):
        queue.run(given)


async def test_a_fake_job_that_is_durable() -> None:
    async def double(n: int) -> int:
        return 2 * n

    with fake_job() as job:
        assert job.step("a", lambda n: n, 3, retry=Retry(2)) == 3
        assert job.step("lazy", lazy=True)(lambda n: n)(4) == 4
        assert await job.step_async("a", double, 3) == 6
        with pytest.raises(ZeroDivisionError):
            job.step("b", lambda: 1 / 0, retry=Retry(2))
        assert [job.emit("s", 1), await job.emit_async("s", 2), job.emit("t", 3)] == [1, 2, 1]
        assert job.emitted == [("s", 1), ("s", 2), ("t", 3)]
        job.progress(1, "begun")
        await job.progress_async(2)
        assert job.progresses == [(1, "begun"), (2, None)]


NEED_A_DATABASE: dict[str, Callable[[Any, Any], Any]] = {
    "sleep": lambda job, _: job.sleep("a", dt.timedelta(1)),
    "wait_for": lambda job, _: job.wait_for("a"),
    "gather": lambda job, call: job.gather([call]),
    "call": lambda job, call: job.call(call),
    "transaction": lambda job, _: job.transaction("a").__enter__(),
    "dsn": lambda job, _: job.dsn,
}


@pytest.mark.parametrize("call", NEED_A_DATABASE)
def test_a_fake_job_has_no_database(shop: Shop, call: str) -> None:
    with fake_job() as job, pytest.raises(RuntimeError, match="in a TestQueue"):
        NEED_A_DATABASE[call](job, shop.greet.prepare("Ann"))


@pytest.mark.parametrize("given", [{"attempt": 0}, {"abort": "zzz"}])
def test_a_fake_job_that_no_worker_would_run(given: Any) -> None:
    with pytest.raises(ValueError, match=r"must be (at least 1|one of 'cancelled')"):
        fake_job(**given).__enter__()
    with fake_job(abort="the worker stops") as job, pytest.raises(ValueError, match="one of"):
        job.abort("zzz")
    with pytest.raises(LookupError):
        current_job()


@pytest.mark.parametrize(
    "given",
    [
        {"hours": 1e12},
        {"days": math.nan},
        {"days": 400_000},
        {"days": -1},
        {"hours": math.inf},
        {"hour": 1},
        {"hours": "1"},
        {},
    ],
)
def test_how_far_a_test_travels(shop: Shop, queue: TestQueue, given: dict[str, Any]) -> None:
    shop.greet.configure(delay=dt.timedelta(hours=1)).defer("Ann")
    with pytest.raises(ValueError, match="forward, by at most a thousand years: use travel"):
        queue.travel(**given)
    assert len(queue.travel(days=365_000)) == 1


def test_a_handler_that_yields(shop: Shop, queue: TestQueue) -> None:
    @shop.app.task(name="patient")
    def patient() -> str:
        if current_job().attempt == 1:
            raise RetryLater(at=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1))
        return "done"

    job = patient.defer()
    assert [one.state for one in queue.run()] == ["scheduled"]
    queue.travel(hours=2)
    queue.run()
    assert job.result() == "done"


@pytest.mark.parametrize("batch", [None, 2])
def test_outcomes_that_the_database_refuses(
    shop: Shop, queue: TestQueue, batch: int | None
) -> None:
    """They are replaced as a worker replaces them."""

    @shop.app.task(name="needs", batch=batch, retry=Retry(2, base=dt.timedelta(hours=1)))
    def needs(*jobs: Any) -> Any:
        raise RetryLater(needs=[10**9])

    @shop.app.task(name="decides", batch=batch, decide=lambda *_: Decision(queue="a*"))
    def decides(*jobs: Any) -> Any:
        raise ValueError("the handler's")

    shop.app.defer("needs")
    shop.app.defer("decides", retry=Retry(1))
    first, second = queue.run(raise_errors=False)
    assert (first.state, type(first.error)) == ("failed", JobNotFound)
    assert "needs: 1000000000" in str(first.error)
    assert (second.state, str(second.error)) == ("failed", "the handler's")
    assert {job.error for job in queue.deferred("decides")} == {"ValueError: the handler's"}


def test_a_real_worker(shop: Shop, dsn: str) -> None:
    with CommittedTestQueue(shop.app) as queue:
        shop.greet_async.defer("Ann")
        assert [job.state for job in queue.run()] == ["succeeded", "succeeded"]
        shop.flaky.configure(retry=Retry(1)).defer(1)
        with pytest.raises(Exception, match=r"job 3 failed"):
            queue.run()
        shop.flaky.defer(1)
        queue.run(raise_errors=False)
        queue.travel(minutes=5)
        assert queue.run(raise_errors=False)[-1].state == "succeeded"
    assert jobs_left(dsn) == 0
    with psycopg.connect(dsn) as connection:
        assert not connection.execute("select * from queue.schedules").fetchall()


def test_all_jobs_are_removed(shop: Shop, dsn: str) -> None:
    """Also more than a call deletes, and those whose args can't be read."""

    def fail() -> None:
        with CommittedTestQueue(shop.app):
            shop.app.defer_many([shop.app.prepare("t", {"n": n}) for n in range(1001)])
            with psycopg.connect(dsn) as connection:
                args = '{"row": {"__pgdefer__": "unknown", "value": 1}}'
                connection.execute("select queue.defer('t', %s)", [args])
            raise AssertionError("the test's own")

    with pytest.raises(AssertionError, match="the test's own"):
        fail()
    assert jobs_left(dsn) == 0


async def test_all_jobs_are_removed_in_this_loop(shop: Shop, dsn: str) -> None:
    async with CommittedTestQueue(shop.app):
        calls = [shop.app.prepare("t", {"n": n}) for n in range(1001)]
        await shop.app.defer_many_async(calls)
    assert jobs_left(dsn) == 0


async def test_a_real_worker_in_this_loop(shop: Shop, dsn: str) -> None:
    async with CommittedTestQueue(shop.app) as queue:
        await shop.greet_async.defer_async("Ann")
        assert [job.state for job in await queue.run_async()] == ["succeeded", "succeeded"]
    assert jobs_left(dsn) == 0


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_function_that_raises_stop_iteration(
    shop: Shop, queue: TestQueue, transactional: bool
) -> None:
    """It fails as in a worker, which calls it in no coroutine."""

    @shop.app.task(name="next", retry=2, retry_on=StopIteration, transactional=transactional)
    def next_(*_: object) -> object:
        return next(iter([]))

    shop.app.defer("next")
    ran = await queue.run_async(raise_errors=False)
    assert [(one.state, type(one.error)) for one in ran] == [
        ("ready", StopIteration),
        ("failed", StopIteration),
    ]
    shop.app.defer("next")
    ran = await asyncio.to_thread(queue.run, raise_errors=False)
    assert [one.state for one in ran] == ["ready", "failed"]


def test_a_job_whose_args_cannot_be_decoded(shop: Shop, queue: TestQueue) -> None:
    args = {"name": {"__pgdefer__": "unknown", "value": 1}}
    queue.app.client.call(DEFER_MANY, {"jobs": json.dumps([{"task": "greet", "args": args}])})
    queue.travel(hours=1)
    (ran,) = queue.run(raise_errors=False)
    assert (ran.state, type(ran.error)) == ("failed", DecodeError)
    assert queue.assert_deferred("greet").args == args
    queue.assert_not_deferred(shop.greet, "Ann")


def test_a_real_worker_gets_args_that_cannot_be_decoded(shop: Shop, dsn: str) -> None:
    args = {"name": {"__pgdefer__": "unknown", "value": 1}}
    with CommittedTestQueue(shop.app) as queue:
        shop.app.client.call(DEFER_MANY, {"jobs": json.dumps([{"task": "greet", "args": args}])})
        assert [job.state for job in queue.run(raise_errors=False)] == ["failed"]


def test_all_deferred_jobs_are_found(queue: TestQueue) -> None:
    ids = [
        job.id
        for job in queue.app.defer_many([queue.app.prepare("t", {"n": n}) for n in range(2001)])
    ]
    assert [job.id for job in queue.deferred()] == ids
    assert queue.deferred("t", n=2000)[0].id == ids[-1]

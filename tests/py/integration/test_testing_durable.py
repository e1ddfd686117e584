"""pgdefer.testing runs durable jobs: they wait and continue within the test's transaction."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

from pgdefer import App, Retry, StepFailed, current_job
from pgdefer.testing import TestQueue
from support import url_of

pytestmark = pytest.mark.client


class Shop:
    """Tasks with steps and waits; `calls` has the steps that have run."""

    def __init__(self, dsn: str) -> None:
        self.app = app = App(dsn, name="shop")
        self.calls: list[str] = []

        @app.task(name="refund")
        def refund(amount: int) -> str:
            job = current_job()
            job.step("weigh", self.calls.append, "weigh")
            answer = job.wait_for("approval", timeout=dt.timedelta(days=7))
            return f"{amount}, says {answer['by']}"

        @app.task(name="refund_async")
        async def refund_async(amount: int) -> str:
            job = current_job()
            await job.step_async("weigh", self.calls.append, "weigh")
            answer = await job.wait_for_async("approval")
            return f"{amount}, says {answer['by']}"

        @app.task(name="asks")
        def asks() -> str:
            return current_job().step("bank", self.bank, retry=Retry(3))

        self.refund, self.refund_async, self.asks = refund, refund_async, asks
        self.add_parents()

    def add_parents(self) -> None:
        """Add the tasks that have children."""
        app = self.app

        @app.task(name="square")
        def square(n: int) -> int:
            return n * n

        @app.task(name="squares")
        def squares(count: int) -> list[int]:
            job = current_job()
            with job.transaction("note") as connection:
                if connection is not None:
                    connection.execute("insert into note values (%s)", [job.id])
            return job.gather([square.prepare(n) for n in range(count)])

        @app.task(name="squares_async")
        async def squares_async(count: int) -> list[int]:
            job = current_job()
            async with job.transaction_async("note") as connection:
                if connection is not None:
                    await connection.execute("insert into note values (%s)", [job.id])
            return await job.gather_async([square.prepare(n) for n in range(count)])

        @app.task(name="gives_up")
        def gives_up() -> str:
            job = current_job()
            try:
                with job.transaction("note", retry=Retry(1)) as connection:
                    assert connection is not None
                    connection.execute("insert into note values (%s)", [job.id])
                    connection.execute("select 1 / 0")
            except StepFailed:
                return job.call(square.prepare(3))
            raise AssertionError("the step did not fail")

        self.squares, self.squares_async, self.gives_up = squares, squares_async, gives_up

    def bank(self) -> str:
        self.calls.append("bank")
        if len(self.calls) < 3:
            raise ConnectionError("the bank does not answer")
        return "paid"


@pytest.fixture
def shop(dsn: str) -> Iterator[Shop]:
    shop = Shop(dsn)
    yield shop
    shop.app.close()


@pytest.fixture
def queue(shop: Shop, dsn: str) -> Iterator[TestQueue]:
    with psycopg.connect(dsn) as connection:
        connection.execute("create table note (job bigint)")
        with TestQueue(shop.app, connection) as queue:
            yield queue
        connection.rollback()


def test_a_job_waits_for_a_signal(shop: Shop, queue: TestQueue) -> None:
    job = shop.refund.defer(50)
    assert [(ran.state, ran.error) for ran in queue.run()] == [("waiting", None)]
    assert queue.run() == []
    with pytest.raises(TimeoutError, match=r"is waiting: at its step approval it waits for signal"):
        job.result()
    shop.app.job(job).signal("approval", {"by": "Ann"})
    assert [ran.result for ran in queue.run()] == ["50, says Ann"]
    assert shop.calls == ["weigh"]


async def test_a_coroutine_waits_for_a_signal(shop: Shop, queue: TestQueue) -> None:
    job = await shop.refund_async.defer_async(50)
    assert [ran.state for ran in await queue.run_async()] == ["waiting"]
    await shop.app.job(job).signal_async("approval", {"by": "Ann"})
    assert [ran.result for ran in await queue.run_async()] == ["50, says Ann"]
    assert shop.calls == ["weigh"]


def test_a_coroutine_in_a_loop_of_its_own(shop: Shop, queue: TestQueue) -> None:
    job = shop.refund_async.defer(50)
    assert [ran.state for ran in queue.run()] == ["waiting"]
    shop.app.job(job).signal("approval", {"by": "Ann"})
    assert [ran.result for ran in queue.run()] == ["50, says Ann"]


def test_a_step_is_tried_again(shop: Shop, queue: TestQueue) -> None:
    shop.asks.defer()
    assert queue.run()[-1].result == "paid"
    assert shop.calls == ["bank"] * 3


def notes(queue: TestQueue) -> list[tuple[int]]:
    assert isinstance(queue.connection, psycopg.Connection)
    return queue.connection.execute("select job from note").fetchall()


def test_children_and_transactions(shop: Shop, queue: TestQueue) -> None:
    job = shop.squares.defer(3)
    ran = queue.run()
    assert [(run.task, run.state) for run in ran] == [
        ("squares", "waiting"),
        *[("square", "succeeded")] * 3,
        ("squares", "succeeded"),
    ]
    assert ran[-1].result == [0, 1, 4]
    assert notes(queue) == [(job.id,)]


def test_a_coroutines_children_and_transactions(shop: Shop, queue: TestQueue) -> None:
    job = shop.squares_async.defer(3)
    assert queue.run()[-1].result == [0, 1, 4]
    assert notes(queue) == [(job.id,)]


async def test_on_an_asynchronous_connection(shop: Shop, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.execute("create table note (job bigint)")
        async with TestQueue(shop.app, connection) as queue:
            await shop.squares_async.defer_async(3)
            assert (await queue.run_async())[-1].result == [0, 1, 4]
        await connection.rollback()


def test_in_a_session(shop: Shop, dsn: str) -> None:
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    with engine.connect() as connection, connection.begin() as outer:
        with orm.Session(connection, join_transaction_mode="create_savepoint") as session:
            session.execute(sa.text("create table note (job bigint)"))
            with TestQueue(shop.app, session) as queue:
                shop.squares.defer(3)
                assert queue.run()[-1].result == [0, 1, 4]
            assert session.execute(sa.text("select count(*) from note")).scalar() == 1
        outer.rollback()
    engine.dispose()


def test_a_transaction_that_fails_is_rolled_back(shop: Shop, queue: TestQueue) -> None:
    shop.gives_up.defer()
    assert queue.run()[-1].result == 9
    assert notes(queue) == []


NOTE = "insert into note values (%(id)s)"


class Waits:
    """Transactional tasks that wait, fail and have steps."""

    def __init__(
        self,
        app: App,
        maker: Any = True,
        note: Any = NOTE,
        *,
        first: type[BaseException] = ValueError,
    ) -> None:
        self.calls: list[str] = []
        self.first = first

        @app.task(name="waits", transactional=maker, retry=Retry(2, base=dt.timedelta(0)))
        def waits(connection: Any) -> list[Any]:
            job = current_job()
            connection.execute(note, {"id": job.id})
            job.step("once", self.calls.append, "once")
            job.step(lazy=True)(self.lazy)()
            if job.attempt == 1 and self.calls.count("lazy") == 1:
                raise self.first
            job.sleep("nap", dt.timedelta(hours=1))
            job.progress(50)
            return [job.step("tries", self.twice, retry=Retry(3)), job.wait_for("go")]

        @app.task(name="waits_async", transactional=True, retry=Retry(2, base=dt.timedelta(0)))
        async def waits_async(connection: Any) -> list[Any]:
            job = current_job()
            await connection.execute(NOTE, {"id": job.id})
            await job.step_async("once", self.calls.append, "once")
            await job.step_async(lazy=True)(self.lazy_async)()
            if job.attempt == 1 and self.calls.count("lazy") == 1:
                raise self.first
            await job.sleep_async("nap", dt.timedelta(hours=1))
            await job.progress_async(50)
            tried = await job.step_async("tries", self.twice, retry=Retry(3))
            return [tried, await job.wait_for_async("go")]

        @app.task(name="parent", transactional=True, retry=Retry(1))
        def parent(connection: Any) -> None:
            del connection
            current_job().call(app.tasks["square"].prepare(1))

    def lazy(self) -> None:
        self.calls.append("lazy")

    async def lazy_async(self) -> None:
        self.calls.append("lazy")

    def twice(self) -> str:
        self.calls.append("tries")
        if self.calls.count("tries") == 1:
            raise ConnectionError("once")
        return "tried"


CALLS = ["once", "lazy", "tries", "tries"]


@pytest.mark.parametrize("name", ["waits", "waits_async"])
@pytest.mark.parametrize("first", [ValueError, SystemExit, asyncio.CancelledError])
def test_a_transactional_task_waits(
    shop: Shop, queue: TestQueue, name: str, first: type[BaseException]
) -> None:
    waits = Waits(shop.app, first=first)
    job = shop.app.defer(name)
    ran = queue.run()
    queue.travel(hours=1)
    ran += queue.run()
    assert notes(queue) == []
    shop.app.job(job).signal("go", "Ann")
    ran += queue.run()
    assert ran[-1].result == ["tried", "Ann"]
    assert waits.calls == CALLS
    assert notes(queue) == [(job.id,)]


async def test_a_transactional_task_waits_in_an_asynchronous_test(shop: Shop, dsn: str) -> None:
    waits = Waits(shop.app)
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.execute("create table note (job bigint)")
        async with TestQueue(shop.app, connection) as queue:
            job = await shop.app.defer_async("waits_async")
            await queue.run_async()
            await queue.travel_async(hours=1)
            await queue.run_async()
            await shop.app.job(job).signal_async("go", "Ann")
            assert (await queue.run_async())[-1].result == ["tried", "Ann"]
        await connection.rollback()
    assert waits.calls == CALLS


def test_a_transactional_task_waits_in_a_session(shop: Shop, dsn: str) -> None:
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    with engine.connect() as connection, connection.begin() as outer:
        connection.execute(sa.text("create table note (job bigint)"))
        maker = orm.sessionmaker(connection, join_transaction_mode="create_savepoint")
        waits = Waits(shop.app, maker, sa.text("insert into note values (:id)"))
        with TestQueue(shop.app, connection) as queue:
            job = shop.app.defer("waits")
            queue.run()
            queue.travel(hours=1)
            queue.run()
            shop.app.job(job).signal("go", "Ann")
            assert queue.run()[-1].result == ["tried", "Ann"]
        assert connection.execute(sa.text("select count(*) from note")).scalar() == 1
        outer.rollback()
    engine.dispose()
    assert waits.calls == CALLS


def test_a_transactional_parent_needs_commits(shop: Shop, queue: TestQueue) -> None:
    Waits(shop.app)
    shop.app.defer("parent")
    with pytest.raises(RuntimeError, match="CommittedTestQueue"):
        queue.run()


@pytest.mark.parametrize("kind", ["connection", "session"])
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_steps_and_sleeps_on_an_asynchronous_connection_of_sqlalchemy(
    app: App, dsn: str, driver: str, kind: str
) -> None:
    steps: list[int] = []

    @app.task(name="child")
    async def child() -> str:
        return "done"

    @app.task(name="durable", retry=2)
    async def durable() -> str:
        job = current_job()
        await job.step_async("once", steps.append, job.attempt)
        await job.sleep_async("an hour", dt.timedelta(hours=1))
        if job.attempt == 2:
            raise ValueError("a failure keeps the steps")
        return await job.call_async(child.prepare()) if driver == "psycopg" else "done"

    engine = sa_async.create_async_engine(
        sa.make_url(url_of(dsn)).set(drivername=f"postgresql+{driver}")
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.dispose)
        used: Any = await stack.enter_async_context(engine.connect())
        await used.begin()
        if kind == "session":
            session = sa_async.AsyncSession(used, join_transaction_mode="create_savepoint")
            used = await stack.enter_async_context(session)
        queue = await stack.enter_async_context(TestQueue(app, used))
        job = await durable.defer_async()
        assert [ran.state for ran in await queue.run_async()] == ["scheduled"]
        await queue.travel_async(hours=1)
        await queue.run_async()
        assert await job.result_async() == "done"
        assert steps == [1]

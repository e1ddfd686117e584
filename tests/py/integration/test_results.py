"""Results, groups and chains."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.types.json import set_json_loads

from pgdefer import (
    App,
    DecodeError,
    Job,
    JobCancelled,
    JobFailed,
    JobNotFound,
    Need,
    Worker,
    current_job,
)
from pgdefer.database import results, sql
from pgdefer.database.callers import OWN
from support import url_of
from workers import working

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


def add_tasks(app: App) -> Any:
    class Tasks:
        @staticmethod
        @app.task(name="double")
        async def double(n: int) -> int:
            return 2 * n

        @staticmethod
        @app.task(name="slow")
        async def slow(seconds: float) -> dt.timedelta:
            await asyncio.sleep(seconds)
            return dt.timedelta(seconds=seconds)

        @staticmethod
        @app.task(name="fail")
        async def fail() -> int:
            raise ValueError("no")

        @staticmethod
        @app.task(name="odd")
        async def odd() -> object:
            return object()

        @staticmethod
        @app.task(name="infinite")
        async def infinite() -> float:
            return float("inf")

        @staticmethod
        @app.task(name="large")
        async def large() -> str:
            return "x" * 20_000_000

    return Tasks


def test_results(app: App, conn: Connection) -> None:
    tasks = add_tasks(app)
    with working(Worker(app)):
        assert tasks.double.defer(4).result() == 8
        assert tasks.slow.defer(0.3).result(300) == dt.timedelta(seconds=0.3)
        with pytest.raises(JobFailed, match="job 3 failed: ValueError: no") as failed:
            tasks.fail.defer().result(300)
        assert (failed.value.id, failed.value.error) == (3, "ValueError: no")
        held = tasks.double.configure(held=True).defer(1)
        begun = time.monotonic()
        late = r"job 4 has not finished within 0\.2 s: held, it is held; queue\.unhold releases it"
        with pytest.raises(TimeoutError, match=late):
            held.result(0.2)
        assert time.monotonic() - begun < 5
        conn.execute("select queue.cancel(%s)", (held.id,))
        with pytest.raises(JobCancelled, match="job 4 was cancelled"):
            held.result()
        with pytest.raises(DecodeError, match=r"of type builtins\.object, could not be stored"):
            tasks.odd.defer().result(300)
        with pytest.raises(DecodeError, match="JSON has no NaN and no infinity") as raised:
            tasks.infinite.defer().result(300)
        assert "builtins.float" in str(raised.value)
        assert raised.value.hint is None
        with pytest.raises(DecodeError, match=r"too large to be stored.*queue\.configure"):
            tasks.large.defer().result(300)
        with pytest.raises(JobNotFound):
            app.result(999_999, 1)
    with app.client.waiting_pool.connection() as connection:
        # The channel is no longer listened to.
        assert connection.execute("select pg_listening_channels()").fetchall() == []


def test_a_timeout_holds_where_the_database_does_not_answer(
    app: App, conn: Connection, dsn: str
) -> None:
    job = app.defer("t")
    with pytest.raises(TimeoutError):
        job.result(0)
    with psycopg.connect(dsn) as other:
        other.execute("lock table queue.finished in access exclusive mode")
        with pytest.raises(TimeoutError, match=f"job {job.id} has not finished within 0.1 s"):
            job.result(0.1)


@pytest.mark.parametrize("style", ["intervalstyle = iso_8601", "datestyle = German"])
def test_any_style(app: App, conn: Connection, style: str) -> None:
    conn.execute(f'alter database "{conn.info.dbname}" set {style}'.encode())

    @app.task(name="t")
    def task() -> str:
        return current_job().extend(dt.timedelta(hours=1)).isoformat()

    with working(Worker(app)):
        end = task.defer().result(300)
    assert dt.datetime.fromisoformat(end) > dt.datetime.now(dt.UTC)
    app.close()


def test_a_coroutine_may_not_block_its_worker(app: App, conn: Connection) -> None:
    tasks = add_tasks(app)

    @app.task(name="parent")
    async def parent() -> int:
        child = tasks.double.defer(4)
        with pytest.raises(RuntimeError, match="event loop: await result_async"):
            child.result(1)
        with pytest.raises(TimeoutError):
            child.result(0)
        await child.result_async(300)
        return child.result() + await asyncio.to_thread(lambda: tasks.double.defer(5).result(300))

    with working(Worker(app)):
        assert parent.defer().result(300) == 18


async def test_results_async(app: App, conn: Connection) -> None:
    tasks = add_tasks(app)
    async with running(app):
        assert await (await tasks.double.defer_async(4)).result_async() == 8
        job = await tasks.slow.defer_async(0.3)
        assert await job.result_async(300) == dt.timedelta(seconds=0.3)
        with pytest.raises(JobFailed, match="job 3 failed: ValueError: no"):
            await (await tasks.fail.defer_async()).result_async(300)
        held = await tasks.double.configure(held=True).defer_async(1)
        with pytest.raises(TimeoutError, match=r"within 0\.2 s: held, it is held; queue\.unhold"):
            await held.result_async(0.2)
        needy = await tasks.double.configure(needs=[3]).defer_async(1)
        late = r"within 0\.2 s: upstream_failed, a need failed: job 3 \(failed: retry it\)"
        with pytest.raises(TimeoutError, match=late):
            await needy.result_async(0.2)
        conn.execute("select queue.cancel(%s)", (held.id,))
        with pytest.raises(JobCancelled):
            await held.result_async()
        with pytest.raises(JobNotFound):
            await app.result_async(999_999, 1)


async def test_a_result_that_is_there_needs_no_time(
    app: App, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    monkeypatch.setattr(results, "ANSWER_TIME", 300.0)

    async def result(id: int) -> Any:
        none = dt.timedelta(0)
        return await app.result_async(id, none) if is_async else app.result(id, 0)

    tasks = add_tasks(app)
    good, bad = await tasks.double.defer_async(4), await tasks.fail.defer_async()
    with pytest.raises(TimeoutError, match="job 1 has not finished within 0 s: ready"):
        await result(good.id)
    async with running(app):
        await good.result_async()
        with pytest.raises(JobFailed):
            await bad.result_async()
    await app.close_async()
    assert await result(good.id) == 8
    with pytest.raises(JobFailed, match="job 2 failed: ValueError: no"):
        await result(bad.id)
    with pytest.raises(JobNotFound):
        await result(999_999)


async def test_waits_begin_in_several_threads_at_once(app: App) -> None:
    waiters: Any = app.client._waiters

    class Ended:
        """An event loop that has ended, which another thread forgets while it begins its own."""

        def is_closed(self) -> bool:
            waiters.pop(self)
            waiters["another loop"] = waiters["a third one"] = None
            return True

    waiters[Ended()] = None
    with pytest.raises(JobNotFound):
        await app.result_async(999_999)
    for name in ("another loop", "a third one"):
        waiters.pop(name)


async def test_a_timeout_while_the_database_is_down(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    monkeypatch.setattr(results, "ANSWER_TIME", 300.0)
    app = App("host=/nowhere")
    with pytest.raises(TimeoutError, match=r"job 1 has not finished within 0\.1 s") as late:
        await app.result_async(1, 0.1) if is_async else app.result(1, 0.1)
    assert isinstance(late.value.__cause__, psycopg.OperationalError)
    await app.close_async()


async def test_many_wait_over_one_connection(app: App, conn: Connection, jobs: Jobs) -> None:
    tasks = add_tasks(app)
    made = await tasks.double.defer_many_async([{"n": n} for n in range(100)])
    waiting = asyncio.gather(*(job.result_async(300) for job in made))
    given_up = asyncio.create_task(made[0].result_async(300))
    await until(lambda: conn.execute("select count(*) from queue.awaited").fetchone() == (100,))
    given_up.cancel()
    connections = conn.execute(
        "select count(*) from pg_stat_activity where datname = current_database()"
    ).fetchone()
    assert connections is not None
    assert connections[0] <= 4
    async with running(app):
        assert await waiting == [2 * n for n in range(100)]


async def test_who_is_cancelled_leaves_nothing_to_listen_to(app: App, conn: Connection) -> None:
    job = await app.defer_async("t")
    with pytest.raises(TimeoutError):
        await job.result_async(0.2)  # and there is a connection
    (waiter,) = app.client._waiters.values()
    real, asked = waiter.exchange, asyncio.Event()

    async def exchange(statement: Any, **parameters: object) -> Any:
        if statement.text.startswith("listen"):
            asked.set()
        return await real(statement, **parameters)

    waiter.exchange = exchange  # type: ignore[method-assign]
    waiting = asyncio.create_task(job.result_async())
    await asked.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: not waiter._asking)
    ((channels,),) = await real(sql.Statement("select array(select pg_listening_channels())"))
    assert channels == []
    assert not waiter._channels
    await app.close_async()


async def test_a_wait_is_short(app: App) -> None:
    """Woken by a notification: nobody waits for the next poll, 5 s later."""
    tasks = add_tasks(app)
    async with running(app) as worker:
        await until(lambda: worker.id)
        for _ in range(3):
            begun = time.monotonic()
            job = await tasks.slow.defer_async(0.1)
            await job.result_async(300)
            assert time.monotonic() - begun < 3


async def test_a_wait_survives_a_lost_connection(app: App, conn: Connection) -> None:
    release = asyncio.Event()

    @app.task
    async def slow() -> str:
        await release.wait()
        return "done"

    waiting_there = (
        "from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and query ilike '%await_result%' and state = 'idle'"
    )
    async with running(app):
        job = await slow.defer_async()
        waiting = asyncio.create_task(job.result_async(300))
        in_thread = asyncio.create_task(asyncio.to_thread(job.result, 300))
        await until(lambda: conn.execute(f"select count(*) {waiting_there}").fetchone() == (2,))
        conn.execute(f"select pg_terminate_backend(pid) {waiting_there}")
        release.set()
        assert await waiting == await in_thread == "done"


async def test_where_nobody_can_be_woken(dsn: str) -> None:
    app = App(dsn, pgbouncer=True)
    tasks = add_tasks(app)
    async with running(app):
        first, second = await tasks.slow.defer_async(0.2), await tasks.slow.defer_async(0.2)
        assert await first.result_async(300) == dt.timedelta(seconds=0.2)
        assert await asyncio.to_thread(second.result, 300) == dt.timedelta(seconds=0.2)


# Workflows


async def test_groups_chains_and_needs(app: App, jobs: Jobs) -> None:
    order: list[str] = []

    @app.task(name="step")
    async def step(name: str) -> str:
        await asyncio.sleep(0.01)
        order.append(name)
        return name

    group = app.group([step.prepare("a"), step.prepare("b")])
    then: Job[str] = await group.then_async(step.configure(priority=9).prepare("c"))
    after = await step.configure(needs=[then, *group.jobs]).defer_async("d")
    chain = await app.chain_async([step.prepare(name) for name in "efg"])
    with_sync = app.group([step.prepare("h")])
    last = with_sync.then(step.configure(needs=[after]).prepare("i"))
    assert app.chain([]) == []
    async with running(app):
        assert await last.result_async(300) == "i"
        await jobs.end()
    assert len(group.jobs) == 2
    assert sorted(order[:0] + order) == list("abcdefghi")

    def place(name: str) -> int:
        return order.index(name)

    assert max(place("a"), place("b")) < place("c") < place("d") < place("i")
    assert place("e") < place("f") < place("g")
    assert place("h") < place("i")
    assert [job.id for job in chain] == sorted(job.id for job in chain)


async def test_a_group_in_the_callers_transaction(app: App, jobs: Jobs, conn: Connection) -> None:
    @app.task(name="step")
    async def step() -> None: ...

    with conn.transaction(force_rollback=True):
        app.group([step.prepare()] * 2, connection=conn).then(step.prepare())
        app.chain([step.prepare()] * 2, connection=conn)
    assert jobs() == []


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_handler_asks_what_it_needed(app: App, jobs: Jobs, is_async: bool) -> None:
    @app.task(name="part")
    def part(n: int) -> dict[str, Any]:
        return {"when": dt.timedelta(seconds=10 // n)}

    def told(needs: list[Need]) -> list[Any]:
        return [[need.id, need.task, need.state, need.result, need.error] for need in needs]

    if is_async:

        @app.task(name="whole", on_need_failure="proceed")
        async def whole() -> list[Any]:
            return told(await current_job().needs_async())
    else:

        @app.task(name="whole", on_need_failure="proceed")
        def whole() -> list[Any]:
            return told(current_job().needs())

    async with running(app):
        group = app.group(part.prepare(n) for n in (2, 0, 5))
        job = await group.then_async(whole.prepare())
        result = await job.result_async(300)
    assert result == [
        [1, "part", "succeeded", {"when": dt.timedelta(seconds=5)}, None],
        [2, "part", "failed", None, "ZeroDivisionError: integer division or modulo by zero"],
        [3, "part", "succeeded", {"when": dt.timedelta(seconds=2)}, None],
    ]
    with App(app.source.conninfo()) as other:
        assert [need.state for need in other.needs(job)] == ["succeeded", "failed", "succeeded"]
        with pytest.raises(JobNotFound):
            other.needs(4242)


def decimals(text: str | bytes) -> Any:
    return json.loads(text, parse_float=Decimal)


@pytest.mark.parametrize("load", [decimals, lambda text: text])
async def test_answers_are_read_whatever_the_program_sets_for_json(
    app: App, dsn: str, load: Callable[[Any], Any]
) -> None:
    """By psycopg's set_json_loads, which holds for all connections."""

    @app.task(name="half", headers={"h": 0.5})
    def half(x: float) -> float:
        current_job().step("step", lambda: 2.5)
        current_job().emit("values", 0.5)
        return x

    @app.task(name="after")
    def after() -> list[Any]:
        return [need.result for need in current_job().needs()] + [current_job().headers]

    set_json_loads(load)
    try:
        job = half.defer(0.5)
        last = after.configure(needs=[job], headers={"h": 0.5}).defer()
        app.schedule("s", "0 0 1 1 *", "half", {"x": 0.5})
        await app.run_worker_async(drain=True)
        assert (job.result(60), await job.result_async(60)) == (0.5, 0.5)
        assert repr(last.result(60)) == "[0.5, {'h': 0.5}]"
        assert repr(app.needs(last)[0].result) == "0.5"
        assert repr(list(job.stream("values"))) == "[0.5]"
        engine = sa.create_engine(url_of(dsn))
        with psycopg.connect(dsn) as own, engine.connect() as alchemist:
            for connection in (OWN, own, alchemist):
                defaults = {one.name: one.defaults for one in app.list_tasks(connection=connection)}
                assert repr(defaults["half"]) == "{'headers': {'h': 0.5}}"
                (schedule,) = app.list_schedules(connection=connection)
                assert repr(schedule.args) == "{'x': 0.5}"
                assert isinstance(app.list_workers(connection=connection)[0].info, dict)
            # The caller's connection stays as it is.
            rows = own.execute("select '0.5'::jsonb").fetchall()
            assert rows == [(load(b"0.5"),)]
        engine.dispose()
    finally:
        set_json_loads(json.loads)
        await app.close_async()

"""What a worker waits for a moment for: the ends of jobs that have just started, and more jobs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import psycopg
import pytest

from pgdefer import App
from pgdefer.database import connection, sql
from pgdefer.worker import fetcher, prefetch
from pgdefer.worker import worker as worker_module
from pgdefer.worker.listener import Sleep, SleepListener

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

MOMENT = fetcher.MOMENT


@pytest.fixture
def long_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make moments so long that they end only with what they wait for, on a busy machine, too."""
    monkeypatch.setattr(fetcher, "MOMENT", 3600.0)


class Calls:
    """How many jobs came with each call of a worker, and how many outcomes each has held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: list[int] = []
        self.sent: list[int] = []
        self.given_back = 0
        real = connection.Connection.call

        async def call(self_: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
            if statement in (sql.FINISH_AND_FETCH, sql.FINISH_MANY):
                outcomes = json.loads(given["outcomes"])
                self.sent.append(len(outcomes))
                self.given_back += sum(each["outcome"] == "released" for each in outcomes)
            rows = await real(self_, statement, **given)
            if statement in (sql.FINISH_AND_FETCH, sql.FETCH) and rows:
                self.came.append(len(rows))
            return rows

        monkeypatch.setattr(connection.Connection, "call", call)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


class CountedSleeps(SleepListener):
    """Counts when its worker has gone to sleep, and has said that it is busy again."""

    slept: ClassVar[int] = 0
    woke: ClassVar[int] = 0

    async def before_sleep(
        self, worker: int, queues: Sequence[str] | None, options: str | None = None
    ) -> Sleep:
        sleep = await super().before_sleep(worker, queues, options)
        CountedSleeps.slept += 1
        return sleep

    async def after_sleep(self, worker: int) -> None:
        CountedSleeps.woke += self.holds_sleep_lock
        await super().after_sleep(worker)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> type[CountedSleeps]:
    """Count how often workers go to sleep."""
    monkeypatch.setattr(worker_module, "SleepListener", CountedSleeps)
    return CountedSleeps


# Outcomes


@pytest.mark.parametrize("slots", [200, 20])
@pytest.mark.usefixtures("long_moment")
async def test_the_outcomes_of_quick_jobs_go_in_one_call(
    app: App, jobs: Jobs, calls: Calls, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """They are more than start at once, or than there are slots."""
    monkeypatch.setattr(prefetch.Prefetch, "allowed", 200)
    monkeypatch.setattr(prefetch.Prefetch, "is_quick", True)

    @app.task(name="quick")
    async def quick() -> None:
        pass

    async with running(app, concurrency=slots) as worker:
        await until(lambda: worker.state.is_waiting and worker.listener.is_first)
        quick.defer_many([{}] * 150)
        await jobs.end()
    assert calls.sent == calls.came
    assert sum(calls.sent) - calls.given_back == 150  # on a busy machine some wait for too long


@pytest.mark.usefixtures("long_moment")
async def test_no_outcome_waits_for_others(app: App, jobs: Jobs) -> None:
    release = asyncio.Event()

    @app.task(name="slow")
    async def slow() -> None:
        await release.wait()

    @app.task(name="quick")
    async def quick() -> None: ...

    async with running(app, concurrency=10):
        for _ in range(9):
            await slow.defer_async()
        for _ in range(5):
            job = await quick.defer_async()
            await jobs.end(job.id)
        assert list(jobs.states().values()).count("running") == 9
        release.set()
        await jobs.end()


@pytest.mark.usefixtures("long_moment")
async def test_no_outcome_waits_for_the_start_of_others_where_some_were_slow(
    app: App, jobs: Jobs, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of those may keep the loop busy, or end the process."""
    monkeypatch.setattr(prefetch.Prefetch, "allowed", 200)

    @app.task(name="slow")
    async def slow() -> None:
        await asyncio.sleep(0.2)

    @app.task(name="quick")
    async def quick() -> None:
        pass

    async with running(app, concurrency=20) as worker:
        await until(lambda: worker.state.is_waiting and worker.listener.is_first)
        slow.defer()
        await jobs.end()
        quick.defer_many([{}] * 150)
        await jobs.end()
    assert calls.sent[:2] == [1, 20]


async def test_outcomes_do_not_wait_for_long(
    app: App, jobs: Jobs, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each handler keeps the loop busy, so all take 40 times as long as a moment."""
    monkeypatch.setattr(prefetch.Prefetch, "is_quick", True)

    @app.task(name="busy")
    async def busy() -> None:
        time.sleep(40 * MOMENT / 200)  # noqa: ASYNC251

    async with running(app, concurrency=300) as worker:
        await until(lambda: worker.state.is_waiting and worker.listener.is_first)
        busy.defer_many([{}] * 200)
        await jobs.end()
    assert sum(calls.sent) == 200
    assert len(calls.sent) > 1


async def test_outcomes_leave_while_the_worker_says_that_it_is_busy(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, may_say = asyncio.Event(), asyncio.Event()
    says = False

    class Slow(SleepListener):
        async def after_sleep(self, worker: int) -> None:
            nonlocal says
            says = self.holds_sleep_lock
            await may_say.wait()
            await super().after_sleep(worker)

    @app.task(name="slow")
    async def slow() -> None:
        await release.wait()

    monkeypatch.setattr(worker_module, "SleepListener", Slow)
    async with running(app, concurrency=1) as worker:
        may_say.set()
        await until(lambda: worker.state.is_waiting and worker.listener.is_first)
        may_say.clear()
        slow.defer()
        await until(lambda: says)
        release.set()
        await jobs.end()
        may_say.set()


# Sleeping


@pytest.mark.usefixtures("long_moment")
async def test_a_worker_that_is_free_again_in_a_moment_wakes_no_other(
    app: App, jobs: Jobs, sleeps: type[CountedSleeps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it is busy, it says only if its slots are full for longer: that wakes two others."""
    monkeypatch.setattr(prefetch.Prefetch, "allowed", 10)
    release = asyncio.Event()

    @app.task(name="quick")
    async def quick() -> None:
        await asyncio.sleep(0)

    @app.task(name="slow")
    async def slow() -> None:
        await release.wait()

    async with running(app, concurrency=2) as worker:
        woke = sleeps.woke
        for _ in range(10):
            await until(lambda: worker.id is not None and worker.listener.is_first)
            quick.defer_many([{}] * 8)
            await jobs.end()
            await until(lambda: worker.executor.is_idle and worker.state.is_waiting)
        # A notification may come while both slots are taken, as on a busy machine: then it says so.
        assert sleeps.woke - woke <= 3
        monkeypatch.setattr(fetcher, "MOMENT", MOMENT)
        slow.defer_many([{}, {}])
        await until(lambda: not worker.listener.holds_sleep_lock)
        release.set()
        await jobs.end()


@pytest.mark.usefixtures("long_moment")
async def test_a_slot_that_is_free_in_a_moment_without_an_outcome(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch.Prefetch, "allowed", 10)

    @app.task(name="own", transactional=True)
    async def own(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("select 1")

    async with running(app, concurrency=1) as worker:
        for _ in range(3):
            await until(lambda: worker.id is not None and worker.listener.is_first)
            own.defer()
            await jobs.end()


@pytest.mark.usefixtures("long_moment")
async def test_a_worker_waits_for_more_jobs_where_they_come_often(
    app: App, jobs: Jobs, sleeps: type[CountedSleeps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it goes to sleep. Where they come rarely, it goes to sleep at once."""

    @app.task(name="quick")
    async def quick() -> None:
        pass

    async with running(app) as worker:
        for often in [0.0, 3600.0, 3600.0]:  # a fourth would be a burst
            monkeypatch.setattr(fetcher, "BURST_SECONDS", often)
            await until(lambda: worker.state.is_waiting and worker.listener.is_first)
            slept = sleeps.slept
            quick.defer()
            await jobs.end()
            await until(lambda: worker.executor.is_idle and worker.state.is_waiting)
            if often:
                assert sleeps.slept == slept
            else:
                await until(lambda slept=slept: sleeps.slept > slept)
        monkeypatch.setattr(fetcher, "MOMENT", MOMENT)
        slept = sleeps.slept
        quick.defer()
        await until(lambda: sleeps.slept > slept)

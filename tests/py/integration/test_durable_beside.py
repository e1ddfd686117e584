"""Durable calls beside each other, in a TaskGroup, a gather or threads."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from pgdefer import App, ClaimLost, JobSuspended, Retry, StepFailed, Worker, current_job
from pgdefer.tasks import stepping_async
from pgdefer.tasks.raised import suspension
from pgdefer.tasks.running_steps import RunningSteps
from pgdefer.tasks.steps import Steps
from pgdefer.testing import TestQueue

from .conftest import Jobs, running, steps, until

SOON = dt.timedelta(milliseconds=20)
Connection = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Suspended runs are not logged as errors."""
    yield
    records = [r for r in caplog.get_records("call") if r.name.startswith("pgdefer")]
    assert not [record for record in records if record.levelname == "ERROR"]


class Slow:
    """A slow step, and how many of its calls ran at once."""

    def __init__(self) -> None:
        self.calls = self.most = self._now = 0

    async def __call__(self, seconds: float = 0.3) -> int:
        with self._counted():
            await asyncio.sleep(seconds)
        return self.calls

    def function(self, seconds: float = 0.3) -> int:
        with self._counted():
            time.sleep(seconds)
        return self.calls

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.calls += 1
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            yield
        finally:
            self._now -= 1


async def test_waits_beside_each_other(app: App, conn: Connection) -> None:

    @app.task(name="child")
    async def child(n: int) -> int:
        return n

    async def all_of(job: Any) -> list[Any]:
        return [
            job.sleep_async("a", SOON),
            job.sleep_async("b", SOON),
            job.wait_for_async("c", timeout=SOON),
            job.gather_async([child.prepare(1), child.prepare(2)]),
            job.call_async(child.prepare(3)),
        ]

    @app.task(name="grouped")
    async def grouped() -> list[Any]:
        async with asyncio.TaskGroup() as group:
            made = [group.create_task(one) for one in await all_of(current_job())]
        return [one.result() for one in made]

    @app.task(name="gathered")
    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*await all_of(current_job())))

    made = [await task.defer_async() for task in (grouped, gathered)]
    async with running(app):
        for job in made:
            assert await job.result_async(60) == [None, None, None, [1, 2], 3]
            states = conn.execute("select count(*) from queue.jobs where parent = %s", [job.id])
            assert states.fetchone() == (3,)


async def test_calls_of_one_task_beside_each_other(app: App, dsn: str) -> None:
    """The second child is deferred, and waited for, before the first."""

    @app.task(name="child")
    async def child(n: int) -> int:
        return n

    known: list[Steps] = []

    @app.task(name="parent")
    async def parent() -> list[int]:
        job, first = current_job(), child.configure(queueing_lock="held").prepare(1)
        known.append(job.steps)
        return await asyncio.gather(job.call_async(first), job.call_async(child.prepare(2)))

    made = await parent.defer_async()
    with psycopg.connect(dsn) as holder:
        holder.execute("select queue.defer('other', queueing_lock => 'held')")
        async with running(app):
            await until(lambda: known and known[0].running._resting)
            holder.rollback()
            assert await made.result_async(60) == [1, 2]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_thread", [False, True])
async def test_no_step_goes_on_beside_the_next_run(
    app: App, conn: Connection, is_first: bool, is_thread: bool
) -> None:
    slow = Slow()

    @app.task(name="t")
    async def t() -> list[Any]:
        job = current_job()
        step: Any = (
            asyncio.to_thread(job.step, "slow", slow.function)
            if is_thread
            else job.step_async("slow", slow)
        )
        pause = job.sleep_async("pause", dt.timedelta(0))
        return list(await asyncio.gather(*((pause, step) if is_first else (step, pause))))

    job = await t.defer_async()
    async with running(app):
        assert sorted(await job.result_async(60), key=str) == [1, None]
    assert slow.most == 1
    assert is_thread or slow.calls == 1
    assert steps(conn, job.id)["slow"] == 1


async def test_steps_that_fail_beside_each_other(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """Each waits until the other has ended, and the log has the error of the one that counted."""
    slow, failed = Slow(), Counter[str]()
    caplog.set_level("INFO", "pgdefer")

    async def fails(name: str) -> str:
        failed[name] += 1
        if failed[name] < 3:
            raise ConnectionError(f"no answer for {name}")
        return name

    @app.task(name="t")
    async def t() -> list[Any]:
        job = current_job()
        async with asyncio.TaskGroup() as group:
            made = [
                group.create_task(job.sleep_async("pause", dt.timedelta(0))),
                group.create_task(job.step_async("a", fails, "a", retry=5)),
                group.create_task(job.step_async("b", fails, "b", retry=5)),
                group.create_task(job.step_async("slow", slow)),
            ]
        return [one.result() for one in made]

    job = await t.defer_async()
    async with running(app):
        assert await job.result_async(60) == [None, "a", "b", 1]
    assert slow.calls == 1


async def test_a_step_that_waits_for_a_wait_beside_it(
    monkeypatch: pytest.MonkeyPatch, app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """They wait for each other, but not for ever."""
    monkeypatch.setattr(stepping_async, "PATIENCE", 0.2)

    @app.task(name="t")
    async def t() -> str:
        job = current_job()
        nap = asyncio.create_task(job.sleep_async("nap", SOON))

        async def rested() -> str:
            await asyncio.shield(nap)
            return "rested"

        return await job.step_async("rested", rested)

    job = await t.defer_async()
    async with running(app):
        assert await job.result_async(60) == "rested"
    assert "its run ends, though concurrent steps still run" in caplog.text


async def test_a_step_that_waits_for_the_failure_of_another(
    monkeypatch: pytest.MonkeyPatch, app: App
) -> None:
    monkeypatch.setattr(stepping_async, "PATIENCE", 0.2)
    has_failed = asyncio.Event()

    @app.task(name="t")
    async def t() -> str:
        job = current_job()

        async def refuse() -> None:
            raise ConnectionError("no answer")

        async def waits() -> str:
            await has_failed.wait()
            return "done"

        async with asyncio.TaskGroup() as group:
            beside = group.create_task(job.step_async("beside", waits))
            await asyncio.sleep(0)
            with pytest.raises(StepFailed):
                await job.step_async("fails", refuse, retry=Retry(1))
            has_failed.set()
        return beside.result()

    job = await t.defer_async()
    async with running(app):
        assert await job.result_async(30) == "done"


def test_a_handler_that_leaves_a_step_in_a_closed_loop(app: App, jobs: Jobs) -> None:
    @app.task(name="t")
    def t() -> str:
        job, loop = current_job(), asyncio.new_event_loop()

        async def begin() -> None:
            begun = asyncio.create_task(job.step_async("never", asyncio.sleep, 3600))
            await asyncio.sleep(0.05)
            assert not begun.done()

        loop.run_until_complete(begin())
        loop.close()
        return "done"

    job = t.defer()
    app.run_worker(drain=True)
    assert job.result(30) == "done"


async def test_a_wait_within_a_step_does_not_wait_for_it(app: App) -> None:
    @app.task(name="t")
    async def t() -> list[Any]:
        job = current_job()

        async def outer(name: str) -> str:
            await asyncio.gather(*(job.sleep_async(f"{name} {n}", SOON) for n in range(2)))
            return name

        return list(await asyncio.gather(*(job.step_async(name, outer, name) for name in "ab")))

    job = await t.defer_async()
    async with running(app):
        assert await job.result_async(60) == ["a", "b"]


async def test_a_function_does_not_wait_for_coroutines_that_it_stops(app: App) -> None:
    slow = Slow()

    @app.task(name="t")
    async def t() -> list[Any]:
        job = current_job()

        async def pause() -> None:
            await asyncio.sleep(0)
            job.sleep("pause", SOON)

        return list(await asyncio.gather(job.step_async("slow", slow), pause()))

    job = await t.defer_async()
    async with running(app):
        assert (await job.result_async(60))[1] is None
    assert slow.most == 1  # it was cancelled with its run


async def test_a_wait_in_a_thread_of_a_step_does_not_wait_for_it(app: App) -> None:
    """The pool's threads do not know that they are of the run, and of the step."""
    slow = Slow()

    @app.task(name="child")
    def child(n: int) -> int:
        return n

    @app.task(name="t")
    def t() -> int:
        job = current_job()
        with ThreadPoolExecutor() as pool:

            def each() -> int:
                return pool.submit(job.call, child.prepare(7)).result()  # type: ignore[no-any-return]

            pool.submit(job.step, "slow", slow.function)
            return job.step("each", each)  # type: ignore[no-any-return]

    job = t.defer()
    async with running(app):
        assert await job.result_async(60) == 7
    assert slow.most == 1


async def test_steps_end_with_the_handler(app: App) -> None:
    slow = Slow()

    async def refuse() -> None:
        raise ValueError("no")

    @app.task(name="t", retry=2)
    async def t() -> int:
        job = current_job()
        if job.attempt == 2:
            return await job.step_async("slow", slow, 0.0)  # type: ignore[no-any-return]
        await asyncio.gather(job.step_async("slow", slow, 60.0), refuse())
        raise AssertionError

    job = await t.defer_async()
    async with running(app):
        assert await job.result_async(30) == 2
    assert slow.most == 1


async def test_a_handler_that_goes_on_after_a_wait_begins_no_step(app: App) -> None:
    slow, raised = Slow(), []

    @app.task(name="t")
    async def t() -> None:
        job = current_job()
        try:
            await job.sleep_async("pause", SOON)
        except JobSuspended:
            try:
                await job.step_async("slow", slow)
            except BaseException as error:
                raised.append(type(error))
                raise

    job = await t.defer_async()
    async with running(app):
        await job.result_async(60)
    assert (slow.calls, raised) == (0, [JobSuspended])


async def test_a_stream_goes_on_after_waits_beside_each_other(app: App, jobs: Jobs) -> None:
    made = [await app.defer_async("t") for _ in range(3)]
    hour = dt.timedelta(hours=1)
    async with app.stream_jobs(drain=True) as stream:
        async for job in stream:
            with job:
                async with asyncio.TaskGroup() as group:
                    for name in "abc":
                        group.create_task(job.sleep_async(name, hour))
    assert [row["state"] for row in jobs()] == ["scheduled"] * len(made)


def test_a_test_runs_waits_beside_each_other(app: App, conn: Connection) -> None:
    hour = dt.timedelta(hours=1)

    @app.task(name="t")
    async def t() -> None:
        job = current_job()

        async def refuse() -> None:
            raise ConnectionError("no answer")

        async with asyncio.TaskGroup() as group:
            group.create_task(job.sleep_async("a", hour))
            group.create_task(job.sleep_async("b", hour))
            group.create_task(job.step_async("c", refuse, retry=3))

    with conn.transaction(force_rollback=True), TestQueue(app, conn) as queue:
        t.defer()
        assert [ran.state for ran in queue.run(raise_errors=False)] == ["scheduled"]


async def test_a_worker_that_stops_cuts_short_what_follows_a_wait(app: App, jobs: Jobs) -> None:
    cut: list[type[BaseException]] = []

    @app.task(name="t")
    async def t() -> None:
        try:
            await current_job().wait_for_async("go")
        finally:
            try:
                await asyncio.sleep(60)
            except BaseException as error:
                cut.append(type(error))
                raise

    await t.defer_async()
    worker = Worker(app, shutdown_timeout=0.1)
    task = asyncio.create_task(worker.run_async())
    await until(lambda: jobs()[0]["state"] == "waiting")
    worker.stop()
    await task
    await app.close_async()
    assert cut == [asyncio.CancelledError]
    assert jobs()[0]["state"] == "waiting"


def test_what_suspends_a_run() -> None:
    ended = Steps(None)
    ended.suspended("slept", "scheduled")
    caused = JobSuspended()
    caused.__cause__ = ValueError("no answer")
    lost, plain = ClaimLost("lost"), JobSuspended()

    def group(*errors: BaseException) -> BaseException:
        return BaseExceptionGroup("", errors)

    for error, found in (
        (None, None),
        (plain, plain),
        (lost, None),
        (group(lost), None),
        (group(plain, lost), plain),
        (group(lost, group(plain, caused)), caused),
        (group(plain, ValueError()), None),
    ):
        assert suspension(error, ended) is found
    assert suspension(group(plain, lost), Steps(None)) is None
    assert suspension(group(group(plain)), Steps(None)) is plain


async def test_a_function_does_not_wait_for_a_reader_of_its_own_loop() -> None:
    running_steps = RunningSteps()
    assert running_steps.has_read()
    with running_steps.reading():
        assert not running_steps.has_read_async()
        assert running_steps.has_read()
        assert not await asyncio.to_thread(running_steps.has_read)
    assert await asyncio.to_thread(running_steps.has_read)

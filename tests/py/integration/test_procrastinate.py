"""What Procrastinate's acceptance tests check, as behaviours here.

docs/moving.md lists each of its tests with the one of these that stands for it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pgdefer import (
    AlreadyQueued,
    App,
    JobNotFound,
    Retry,
    Worker,
    current_job,
)

from .conftest import Jobs, running, until, wait_for

pytestmark = pytest.mark.client

DOCS = Path(__file__).parents[3] / "docs"


def drain(app: App, queues: list[str] | None = None) -> None:
    """Run what is ready, one job at a time as Procrastinate does by default."""
    Worker(app, queues, concurrency=1, drain=True).run()


@dataclass
class Point:
    x: int
    y: int


@pytest.fixture
def sums(app: App) -> list[int]:
    """The task add, and what its jobs have computed."""
    found: list[int] = []

    @app.task(name="add")
    def add(a: int, b: int) -> int:
        found.append(a + b)
        return a + b

    return found


def test_jobs_run_with_their_arguments(app: App, sums: list[int]) -> None:
    app.defer("add", {"a": 1, "b": 2})
    app.defer("add", {"a": 3, "b": 4})
    drain(app)
    assert sums == [3, 7]


def test_arguments_may_be_objects(app: App) -> None:
    found = []

    @app.task
    def length(point: Point) -> None:
        found.append(abs(point.x) + abs(point.y))

    length.defer(Point(3, 4))
    drain(app)
    assert found == [7]


def test_a_worker_serves_only_its_queues(app: App, sums: list[int]) -> None:
    app.defer("add", {"a": 5, "b": 4}, queue="products")
    drain(app, ["default"])
    assert sums == []
    drain(app, ["products"])
    assert sums == [9]


def test_many_jobs_are_deferred_at_once(app: App, sums: list[int]) -> None:
    app.defer_many(app.prepare("add", {"a": n, "b": n + 1}) for n in range(1, 12, 2))
    drain(app)
    assert sums == [3, 7, 11, 15, 19, 23]


async def test_many_jobs_are_deferred_at_once_from_a_coroutine(
    app: App, sums: list[int], jobs: Jobs
) -> None:
    await app.defer_many_async(app.prepare("add", {"a": n, "b": n}) for n in range(6))
    assert (len(jobs()), sums) == (6, [])


def test_a_job_that_fails_is_retried(app: App, jobs: Jobs) -> None:
    @app.task(retry=Retry(3))
    def fails_twice() -> int:
        if current_job().attempt < 3:
            raise RuntimeError("not yet")
        return current_job().attempt

    fails_twice.defer()
    drain(app)
    (job,) = jobs()
    assert (job["state"], job["result"], job["failures"]) == ("succeeded", 3, 2)
    assert [row["outcome"] for row in jobs.attempts()] == ["failed", "failed"]


def test_retries_end_after_the_last_attempt(app: App, jobs: Jobs) -> None:
    @app.task(retry=Retry(3))
    def fails() -> None:
        raise RuntimeError("never")

    fails.defer()
    drain(app)
    (job,) = jobs()
    assert (job["state"], job["failures"]) == ("failed", 3)


def test_the_highest_priority_runs_first(app: App, sums: list[int]) -> None:
    for a, priority in ((5, 5), (7, 7), (6, 6)):
        app.defer("add", {"a": a, "b": 0}, priority=priority)
    drain(app)
    assert sums == [7, 6, 5]


def test_a_task_has_a_default_priority(app: App) -> None:
    found = []

    @app.task(priority=5)
    def note(text: str) -> None:
        found.append(text)

    note.configure(priority=3).defer("low")
    note.defer("default")
    note.configure(priority=7).defer("high")
    drain(app)
    assert found == ["high", "default", "low"]


async def test_jobs_of_one_lock_run_one_after_another(app: App, jobs: Jobs) -> None:
    written: list[str] = []
    go_on = asyncio.Event()

    @app.task(lock="a")
    async def write(text: str) -> None:
        written.append(f"before {text}")
        await go_on.wait()
        written.append(f"after {text}")

    async with running(app), running(app):
        write.configure(priority=1).defer("1")
        await until(lambda: written)
        write.configure(priority=2).defer("2")
        await until(lambda: list(jobs.states().values()) == ["running", "blocked"])
        go_on.set()
        await jobs.end()
    assert written == ["before 1", "after 1", "before 2", "after 2"]


def test_priority_within_a_lock(app: App) -> None:
    """It decides in a lock that keeps no order; by default the oldest job is next."""
    for mode, order in (("mutex", ["high", "low"]), ("ordered", ["low", "high"])):
        found: list[str] = []

        def echo(text: str, found: list[str] = found) -> None:
            found.append(text)

        task = app.task(name=mode, lock="a", lock_mode=mode)(echo)
        task.configure(priority=5).defer("low")
        task.configure(priority=10).defer("high")
        drain(app)
        assert found == order


def test_a_queueing_lock_admits_one_waiting_job(app: App, sums: list[int]) -> None:
    first = app.defer("add", {"a": 1, "b": 1}, queueing_lock="a")
    app.defer("add", {"a": 2, "b": 2}, queueing_lock="b")
    with pytest.raises(AlreadyQueued):
        app.defer("add", {"a": 3, "b": 3}, queueing_lock="a")
    same = app.defer("add", {"a": 3, "b": 3}, queueing_lock="a", on_conflict="ignore")
    assert same.id == first.id
    drain(app)
    assert sums == [2, 4]


async def test_recurring_tasks(app: App, jobs: Jobs) -> None:
    @app.recurring("* * * * * *")
    @app.task(priority=7)
    def tick(scheduled_for: dt.datetime) -> float:
        return scheduled_for.timestamp()

    async with running(app):
        await until(lambda: sum(row["state"] == "succeeded" for row in jobs()) >= 2)
    first, second = [row for row in jobs() if row["state"] == "succeeded"][:2]
    assert second["result"] > first["result"]
    assert (first["priority"], first["result"] % 1) == (7, 0)


def test_a_cancelled_job_does_not_run(app: App, sums: list[int], jobs: Jobs) -> None:
    job = app.defer("add", {"a": 1, "b": 2})
    app.defer("add", {"a": 3, "b": 4})
    assert job.cancel() == job.state() == "cancelled"
    assert len(jobs()) == 2
    drain(app)
    assert sums == [7]


def test_a_deleted_job_leaves_nothing(app: App, sums: list[int], jobs: Jobs) -> None:
    job = app.defer("add", {"a": 1, "b": 2})
    app.defer("add", {"a": 3, "b": 4})
    job.delete()
    assert len(jobs()) == 1
    drain(app)
    assert sums == [7]


def test_to_cancel_a_job_that_does_not_exist(app: App) -> None:
    job = app.defer("add", {"a": 1, "b": 2})
    with pytest.raises(JobNotFound):
        app.job(job.id + 1).cancel()
    assert job.state() == "ready"


@pytest.fixture(params=["coroutine", "thread"])
def endless(app: App, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A task that ends only if it is told to."""

    async def coroutine() -> None:
        await asyncio.Event().wait()

    def thread() -> None:
        forever = threading.Event()
        while not forever.wait(0.01):
            current_job().check_abort()

    handler: Any = {"coroutine": coroutine, "thread": thread}[request.param]

    def make(**options: Any) -> Any:
        return app.task(name="endless", **options)(handler)

    return make


@pytest.mark.parametrize("mode", ["listen", "poll"])
async def test_a_running_job_is_aborted(
    dsn: str, app: App, jobs: Jobs, endless: Callable[..., Any], mode: str
) -> None:
    if mode == "poll":
        app.move(dsn, pgbouncer=True)  # hears no notifications
    job = endless().defer()
    async with running(app, heartbeat_every=0.1):
        await until(lambda: jobs.states() == {job.id: "running"})
        assert await job.cancel_async(abort=True) == "running"
        await jobs.end()
    assert jobs.states() == {job.id: "cancelled"}


async def test_an_aborted_job_is_not_retried(app: App, jobs: Jobs) -> None:
    @app.task(retry=Retry(None))
    async def asks_for_its_end() -> None:
        await app.job(current_job().id).cancel_async(abort=True)
        raise ValueError

    await asks_for_its_end.defer_async()
    async with running(app):
        await jobs.end()
    (job,) = jobs()
    assert (job["state"], job["claims"]) == ("cancelled", 1)


async def test_as_many_jobs_run_at_once_as_asked_for(app: App, jobs: Jobs) -> None:
    at_once = [0]
    full = asyncio.Event()

    @app.task
    async def note() -> None:
        at_once.append(at_once[-1] + 1)
        if at_once[-1] == 20:
            full.set()
        await full.wait()
        at_once.append(at_once[-1] - 1)

    await note.defer_many_async({} for _ in range(100))
    async with running(app, concurrency=20):
        await jobs.end()
    assert max(at_once) == 20


async def test_a_worker_without_notifications_polls(dsn: str, jobs: Jobs) -> None:
    app = App(dsn, pgbouncer=True)

    @app.task
    def nine() -> int:
        return 9

    async with running(app) as worker:
        await until(lambda: worker.id is not None)
        nine.defer()
        await jobs.end()
    assert [row["result"] for row in jobs()] == [9]
    app.close()


async def test_a_worker_is_stopped_by_cancelling_its_task(app: App, jobs: Jobs) -> None:
    @app.task
    def nothing() -> None: ...

    for _ in range(2):
        nothing.defer()
    task = asyncio.create_task(Worker(app, concurrency=2).run_async())
    await jobs.end()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 300)
    assert set(jobs.states().values()) == {"succeeded"}


@pytest.mark.parametrize("retry", [None, Retry(2)])
async def test_jobs_that_outlast_a_stop_are_given_back(
    app: App, jobs: Jobs, endless: Callable[..., Any], retry: Retry | None
) -> None:
    """With and without retries: a stop is not the job's fault."""

    @app.task
    def short() -> None: ...

    ended = short.defer()
    endless = endless(retry=retry)
    slow = endless.defer()
    worker = Worker(app, shutdown_timeout=0.3)
    task = asyncio.create_task(worker.run_async())
    await until(lambda: jobs.states() == {ended.id: "succeeded", slow.id: "running"})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_for(lambda: jobs.states()[slow.id] == "ready")
    assert jobs.attempts() == []


def test_a_handler_in_a_thread_may_run_a_loop_of_its_own(app: App) -> None:
    found = []

    @app.task
    def nested() -> None:
        async def inner() -> None:
            await asyncio.to_thread(found.append, 3)

        asyncio.run(inner())

    nested.defer()
    drain(app)
    assert found == [3]


def test_threads_run_beside_each_other(app: App) -> None:
    both = threading.Barrier(2)

    @app.task
    def meet() -> None:
        both.wait(300)

    for _ in range(2):
        meet.defer()
    Worker(app, concurrency=2, drain=True).run()


def test_the_documentation_names_these_tests() -> None:
    here = {name for name in globals() if name.startswith("test_")}
    named = set(re.findall(r"`(test_\w+)` *\|$", (DOCS / "moving.md").read_text(), re.MULTILINE))
    assert named == here - {"test_the_documentation_names_these_tests"}

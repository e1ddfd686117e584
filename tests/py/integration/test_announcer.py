"""What the application hears of its jobs: log records, hooks, middleware."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import importlib
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App, Deferral, JobContext, JobEvent, Retry, RetryLater, Worker, current_job
from pgdefer.worker import announcer

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str, int, str]]:
    return [
        (record.levelname, record.task, record.outcome, record.attempt, record.state)  # type: ignore[attr-defined]
        for record in caplog.records
        if record.name == "pgdefer.job"
    ]


BREAKING = """
from pgdefer import App

app = App({dsn!r})


@app.task(name="bad_process", run_in="process", queue="q")
def bad_process():
    raise ValueError("no")
"""


async def test_a_broken_meter_stops_nothing(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    measured: list[float] = []

    def breaks(job: JobContext, outcome: str, seconds: float) -> None:
        raise RuntimeError("the meter is broken")

    app.meters += [breaks, lambda _job, _outcome, seconds: measured.append(seconds)]

    @app.task(name="good")
    async def good() -> None:
        await asyncio.sleep(0.01)

    async with running(app):
        await good.defer_async()
        await until(lambda: measured)
    assert jobs.states() == {1: "succeeded"}
    assert measured[0] >= 0.01
    assert "the meter is broken" in caplog.text


async def test_records_have_fields(
    app: App,
    jobs: Jobs,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)

    @app.task(name="good", queue="q")
    async def good() -> int:
        return 1

    @app.task(name="bad", retry=2, queue="q")
    def bad() -> None:
        raise ValueError("no")

    (tmp_path / "breaking.py").write_text(BREAKING.format(dsn=app.source.conninfo()))
    monkeypatch.syspath_prepend(tmp_path)
    in_process = app.add(importlib.import_module("breaking").bad_process)
    async with running(app):
        ids = [(await task.defer_async()).id for task in (good, bad, in_process)]
        await jobs.end()
        await until(lambda: len(told(caplog)) == 4)
    assert sorted(told(caplog)) == [
        ("ERROR", "bad", "failed", 2, "failed"),
        ("ERROR", "bad_process", "failed", 1, "failed"),
        ("INFO", "good", "succeeded", 1, "succeeded"),
        ("WARNING", "bad", "failed", 1, "ready"),
    ]
    for record in (record for record in caplog.records if record.name == "pgdefer.job"):
        shown: Any = record
        assert shown.id in ids
        assert shown.queue == "q"
        assert shown.duration >= 0
        if record.levelno >= logging.WARNING:
            assert "ValueError: no" in record.getMessage()
            assert "Traceback" in str(record.exc_text)


async def test_hooks_are_called_at_their_events(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Any] = []

    @app.on("exhausted")
    async def on_exhausted(event: JobEvent) -> None:
        heard.append(("exhausted", event.job.task, event.outcome, event.error, event.exception))

    @app.on("retry")
    def on_retry(event: JobEvent) -> None:
        heard.append(("retry", event.job.task, event.state))

    @app.on("worker_start")
    async def on_start(worker: Worker) -> None:
        heard.append(("start", worker.name))

    @app.on("worker_stop")
    def on_stop(worker: Worker) -> None:
        heard.append(("stop", worker.finished))

    @app.on("exhausted")
    def broken(event: JobEvent) -> None:
        raise OSError("broken hook")

    error = ValueError("no")

    @app.task(name="bad", retry=2)
    async def bad() -> None:
        raise error

    async with running(app, name="w"):
        await bad.defer_async()
        await jobs.end()
    assert heard[0] == ("start", "w")
    assert ("retry", "bad", "ready") in heard
    assert ("exhausted", "bad", "failed", "ValueError: no", error) in heard
    assert ("stop", 2) in heard
    assert "broken hook" in caplog.text


@contextlib.asynccontextmanager
async def doubling(job: JobContext) -> AsyncIterator[None]:
    await asyncio.sleep(0)
    yield
    seen.append(("async", job.task, job.result))


@contextlib.contextmanager
def noting(job: JobContext) -> Iterator[None]:
    yield
    seen.append(("sync", job.task, job.result))


seen: list[Any] = []


async def test_middleware_of_both_kinds_sees_results(dsn: str, jobs: Jobs) -> None:
    seen.clear()
    app = App(dsn, middleware=[noting])

    @app.task(name="coroutine", middleware=[doubling])
    async def coroutine() -> int:
        return 1

    @app.task(name="function", middleware=[noting])
    def function() -> int:
        return 2

    @app.task(name="paid", transactional=True)
    def paid(connection: Any) -> int:
        return 3

    async with running(app):
        for task in (coroutine, function, paid):
            await task.defer_async()
        await jobs.end()
    assert sorted(seen) == [
        ("async", "coroutine", 1),
        ("sync", "coroutine", 1),
        ("sync", "function", 2),
        ("sync", "function", 2),
        ("sync", "paid", 3),
    ]


async def test_middleware_around_deferring(dsn: str) -> None:
    lines: list[Any] = []

    @contextlib.contextmanager
    def around(deferral: Deferral) -> Iterator[None]:
        lines.append([call.task for call in deferral.calls])
        yield
        lines.append([job.id for job in deferral.jobs])

    app = App(dsn, defer_middleware=[around])

    @app.task(name="t")
    def task() -> None: ...

    task.defer()
    await task.defer_async()
    task.defer_many([{}, {}])
    app.chain([task.prepare()])
    app.group([task.prepare()]).then(task.prepare())
    app.defer("u")
    assert [lines[at] for at in (0, 2, 4, 6, 8, 10)] == [
        ["t"],
        ["t"],
        ["t"] * 2,
        ["t"],
        ["t"] * 2,
        ["u"],
    ]
    assert [lines[at] for at in (1, 3, 5, 7, 9, 11)] == [[1], [2], [3, 4], [5], [6, 7], [8]]
    await app.close_async()


async def test_the_last_attempt(app: App, jobs: Jobs) -> None:
    asked: list[Any] = []

    @app.task(name="coroutine", retry=Retry(2))
    async def coroutine() -> None:
        job = current_job()
        asked.append((await job.max_attempts_async(), await job.is_last_attempt_async()))
        raise ValueError

    @app.task(name="function")
    def function() -> None:
        asked.append((current_job().max_attempts(), current_job().is_last_attempt()))

    async with running(app):
        await coroutine.defer_async()
        await jobs.end()
        await function.defer_async()
        await jobs.end()
    assert asked == [(2, False), (2, True), (1, True)]


@pytest.mark.parametrize("has_time", [True, False])
async def test_a_cancelled_worker_lets_jobs_end(app: App, jobs: Jobs, has_time: bool) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    @app.task(name="t")
    async def task() -> str:
        begun.set()
        await may_end.wait()
        return "done"

    job = await task.defer_async()
    options: Any = {"shutdown_timeout": 300} if has_time else {}
    worker = asyncio.create_task(app.run_worker_async(**options))
    await begun.wait()
    worker.cancel()
    if has_time:
        await asyncio.sleep(0)
        assert not worker.done()
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await worker
    assert await job.state_async() == ("succeeded" if has_time else "ready")
    await app.close_async()


def test_what_does_not_fit_is_refused_at_once() -> None:
    async def coroutine(job: JobContext) -> None: ...

    def generator(job: JobContext) -> Iterator[None]:
        yield

    async def async_generator(job: JobContext) -> AsyncIterator[None]:
        yield

    @contextlib.contextmanager
    def too_many(job: JobContext, more: int) -> Iterator[None]:
        yield

    for wrong, message in (
        (coroutine, "is a coroutine: write it with `yield`"),
        (generator, "decorate .*generator.* with contextlib.contextmanager$"),
        (async_generator, "decorate .* with contextlib.asynccontextmanager$"),
        (too_many, "is called with a JobContext: missing a required argument: 'more'"),
        (5, "must be functions of a JobContext, not 5"),
    ):
        given: Any = wrong
        with pytest.raises(TypeError, match=message):
            App("dbname=nowhere", middleware=[given])
        app = App("dbname=nowhere")
        with pytest.raises(TypeError, match=message):
            app.task(name="t", middleware=[given])(lambda: None)
    app = App("dbname=nowhere", middleware=[doubling])
    with pytest.raises(TypeError, match=r"task 't' is not a coroutine, but its middleware .*doub"):
        app.task(name="t")(lambda: None)
    wrong_event: Any = "exhaused"
    with pytest.raises(ValueError, match="there is no event 'exhaused': events are exhausted,"):
        app.on(wrong_event)(print)
    with pytest.raises(TypeError, match="is called with a JobEvent: missing a required"):
        app.on("retry")(lambda a, b: None)  # type: ignore[misc,arg-type]


async def test_a_yield_is_not_told_as_a_success(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    @app.task(name="t")
    async def task() -> None:
        if current_job().attempt == 1:
            raise RetryLater(at=dt.datetime.now(dt.UTC))

    async with running(app):
        await task.defer_async()
        await jobs.end()
    assert told(caplog) == [("INFO", "t", "succeeded", 2, "succeeded")]


async def test_hooks_that_return_coroutines(app: App) -> None:
    heard: list[str] = []

    async def send(worker: Worker) -> None:
        await asyncio.sleep(0)
        heard.append("sent")

    class Sender:
        async def __call__(self, worker: Worker) -> None:
            await send(worker)

    app.on("worker_start")(lambda worker: send(worker))  # noqa: PLW0108 (no coroutine)
    app.on("worker_start")(Sender())
    async with running(app):
        await until(lambda: heard == ["sent", "sent"])


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, StopIteration])
async def test_a_hook_ends_no_worker(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    @app.on("worker_start")
    @app.on("exhausted")
    @app.on("worker_stop")
    async def coroutine(about: Any) -> None:
        raise kind

    @app.on("worker_start")
    @app.on("exhausted")
    @app.on("worker_stop")
    def function(about: Any) -> None:
        raise kind

    @app.task(name="bad")
    async def bad() -> None:
        raise ValueError

    async with running(app):
        await bad.defer_async()
        await jobs.end()
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("the hook")]
    assert len(said) == 6


HANGING = """
import sys, threading
from pgdefer import App
from pgdefer.worker import announcer

app = App({dsn!r})
announcer.HOOK_SECONDS = 0.2


@app.task(name="bad")
def bad():
    raise ValueError("no")


@app.on(sys.argv[1])
def hang(about):
    print("hangs", flush=True)
    threading.Event().wait()


app.run_worker(drain=True)
print("ended", flush=True)
"""


@pytest.mark.parametrize("event", ["worker_start", "exhausted", "worker_stop"])
def test_a_hook_that_hangs_does_not_keep_the_worker(
    app: App, tmp_path: Path, dsn: str, event: str
) -> None:
    app.defer("bad")
    (tmp_path / "hanging.py").write_text(HANGING.format(dsn=dsn))
    command = [sys.executable, "hanging.py", event]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "hangs\n"
            if event == "worker_start":
                process.terminate()
            assert process.communicate(timeout=120)[0] == "ended\n"
        finally:
            process.kill()


@pytest.mark.parametrize("event", ["worker_start", "worker_stop"])
async def test_a_hook_that_swallows_its_cancel_does_not_keep_the_worker(
    app: App, monkeypatch: pytest.MonkeyPatch, event: Any
) -> None:
    monkeypatch.setattr(announcer, "HOOK_SECONDS", 0.1)
    begun, is_over = asyncio.Event(), asyncio.Event()

    @app.on(event)
    async def hang(worker: Worker) -> None:
        begun.set()
        while not is_over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await is_over.wait()

    worker = Worker(app)
    working = asyncio.create_task(worker.run_async())
    if event == "worker_stop":
        await until(lambda: worker.id)
        worker.stop()
    await begun.wait()
    worker.stop()
    done, _ = await asyncio.wait([working], timeout=300)
    is_over.set()
    await working
    assert done == {working}
    await app.close_async()


async def test_a_worker_is_cancelled_while_hooks_hang(app: App) -> None:
    begun, ends = asyncio.Event(), list[str]()

    @app.on("worker_start")
    async def hang(worker: Worker) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("start")

    @app.on("worker_stop")
    async def stop(worker: Worker) -> None:
        ends.append("stop")

    worker = asyncio.create_task(app.run_worker_async())
    await begun.wait()
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    assert ends == ["start", "stop"]
    await app.close_async()


def stopped_in_hooks(app: App, begun: asyncio.Event) -> None:
    """Run a worker in an event loop that ends while the hooks of worker_stop are called."""

    async def main() -> None:
        worker = Worker(app)
        working = asyncio.create_task(worker.run_async())
        await until(lambda: worker.id)
        worker.stop()
        await until(begun.is_set)
        assert not working.done()

    asyncio.run(main())  # its end cancels all tasks, that of the worker's end, too


def test_the_end_of_the_event_loop_repeats_no_hook(app: App, conn: psycopg.Connection[Any]) -> None:
    """The hooks that were still to be called are called, and the worker ends as a whole."""
    calls: list[str] = []
    begun = asyncio.Event()

    @app.on("worker_stop")
    async def first(worker: Worker) -> None:
        calls.append("first")

    @app.on("worker_stop")
    async def hang(worker: Worker) -> None:
        calls.append("hang")
        begun.set()
        await asyncio.Event().wait()

    @app.on("worker_stop")
    async def last(worker: Worker) -> None:
        calls.append("last")

    stopped_in_hooks(app, begun)
    assert calls == ["first", "hang", "last"]
    assert conn.execute("select from queue.workers where is_alive").fetchall() == []


def test_a_hook_in_a_thread_outlives_the_event_loop(app: App) -> None:
    """It is waited for, and not called again."""
    calls: list[str] = []
    begun, may_end = asyncio.Event(), threading.Event()
    others: list[asyncio.Task[None]] = []

    async def release() -> None:
        try:
            await asyncio.Event().wait()
        finally:  # after a moment in which a worker that does not wait has ended
            asyncio.get_running_loop().call_later(0.2, may_end.set)

    @app.on("worker_stop")
    async def prepare(worker: Worker) -> None:
        others.append(asyncio.create_task(release()))

    @app.on("worker_stop")
    def block(worker: Worker) -> None:
        calls.append("begun")
        begun.set()
        may_end.wait()
        calls.append("ended")

    stopped_in_hooks(app, begun)
    assert calls == ["begun", "ended"]


def test_a_hook_that_fails_when_it_is_cancelled_stops_no_end(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[str] = []
    begun = asyncio.Event()

    @app.on("worker_stop")
    async def fail(worker: Worker) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("cut short")

    @app.on("worker_stop")
    async def last(worker: Worker) -> None:
        ends.append("last")

    stopped_in_hooks(app, begun)
    assert ends == ["last"]
    assert [str(r.exc_info[1]) for r in caplog.records if r.exc_info] == ["cut short"]


async def test_records_about_a_job_have_its_fields(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(name="known")
    def known() -> None: ...

    caplog.set_level(logging.DEBUG)
    jobs = {known.defer().id: "known", app.defer("unknown").id: "unknown"}
    async with running(app):
        await until(lambda: "does not know" in caplog.text and "has ended" in caplog.text)
    found = {
        (said, record.__dict__["id"], record.__dict__["task"], record.__dict__["queue"])
        for record in caplog.records
        for said in ("starts", "has ended", "does not know")
        if said in record.getMessage() and record.getMessage().startswith("<job")
    }
    expected = {(said, id, task, "default") for id, task in jobs.items() for said in ("starts",)}
    unknown = next(id for id, task in jobs.items() if task == "unknown")
    assert found >= expected | {("does not know", unknown, "unknown", "default")}
    assert any(said == "has ended" for said, *_ in found)

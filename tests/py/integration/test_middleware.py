"""Middleware around handlers, and headers of jobs: `App(middleware=..., headers=...)`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime as dt
import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, orm

from pgdefer import (
    App,
    Deferral,
    InvalidParameter,
    JobAborted,
    JobContext,
    Middleware,
    RetryLater,
    current_job,
)
from support import url_of

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]

trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace")


class Notes:
    """Middleware that records when it is entered and left, where, and with which error."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def named(self, name: str) -> Any:
        @contextlib.contextmanager
        def surround(job: JobContext) -> Iterator[None]:
            assert current_job() is job
            self.lines.append(f"{name} enters {job.task} in {self._where()}")
            try:
                yield
            except BaseException as error:
                self.lines.append(f"{name} sees {type(error).__name__}")
                raise
            self.lines.append(f"{name} leaves {job.task} in {self._where()}")

        return surround

    def _where(self) -> str:
        is_main = threading.current_thread() is threading.main_thread()
        return "the loop" if is_main else "a thread"


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def app(dsn: str, notes: Notes) -> Iterator[App]:
    app = App(dsn, middleware=[notes.named("outer"), notes.named("inner")])
    yield app
    app.close()


@pytest.mark.parametrize("kind", ["coroutine", "function", "connection", "session"])
async def test_it_surrounds_the_handler_where_that_runs(
    app: App, jobs: Jobs, notes: Notes, dsn: str, kind: str
) -> None:
    engine = create_engine(url_of(dsn))
    where = "a thread"
    match kind:
        case "coroutine":
            where = "the loop"

            @app.task(name="t")
            async def task() -> str:
                await asyncio.sleep(0)
                notes.lines.append("handler")
                return "done"
        case "function":

            @app.task(name="t")
            def task() -> str:
                notes.lines.append("handler")
                return "done"
        case "connection":

            @app.task(name="t", transactional=True)
            def task(connection: Connection) -> str:
                notes.lines.append("handler")
                return "done"
        case "session":

            @app.task(name="t", transactional=orm.sessionmaker(engine))
            def task(session: orm.Session) -> str:
                notes.lines.append("handler")
                return "done"

    async with running(app):
        await app.defer_async("t")
        (row,) = await jobs.end()
    engine.dispose()
    assert (row["state"], row["result"]) == ("succeeded", "done")
    assert notes.lines == [
        f"outer enters t in {where}",
        f"inner enters t in {where}",
        "handler",
        f"inner leaves t in {where}",
        f"outer leaves t in {where}",
    ]


@pytest.mark.parametrize("is_async", [True, False])
async def test_it_sees_errors_and_no_retry_later(
    app: App, jobs: Jobs, notes: Notes, is_async: bool
) -> None:
    def work() -> None:
        if current_job().attempt == 1:
            raise RetryLater("once more")
        raise KeyError("x")

    if is_async:

        @app.task(name="t")
        async def task() -> None:
            work()
    else:
        app.task(name="t")(work)
    async with running(app):
        await app.defer_async("t")
        (row,) = await jobs.end()
    assert (row["state"], row["attempts"], row["error"]) == ("failed", 2, "KeyError: 'x'")
    assert [line for line in notes.lines if "enters" not in line] == [
        f"inner leaves t in {'the loop' if is_async else 'a thread'}",
        f"outer leaves t in {'the loop' if is_async else 'a thread'}",
        "inner sees KeyError",
        "outer sees KeyError",
    ]


def _swallow(job: JobContext) -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(ValueError)


@contextlib.contextmanager
def _refuse(job: JobContext) -> Iterator[None]:
    raise PermissionError("not you")
    yield


@contextlib.contextmanager
def _put_off(job: JobContext) -> Iterator[None]:
    if job.attempt == 1:
        raise RetryLater("not yet")
    yield


@contextlib.contextmanager
def _spoil(job: JobContext) -> Iterator[None]:
    yield
    raise OSError("disk full")


@contextlib.contextmanager
def _replace(job: JobContext) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise JobAborted("given up") from error


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("middleware", "fails", "state", "said", "runs"),
    [
        (_refuse, False, "failed", "PermissionError: not you", 0),
        (_put_off, False, "succeeded", 2, 1),
        (_swallow, True, "succeeded", None, 1),
        (_spoil, False, "failed", "OSError: disk full", 1),
        (_replace, True, "cancelled", "JobAborted: given up", 1),
    ],
)
async def test_it_decides_like_the_handler(
    dsn: str,
    jobs: Jobs,
    *,
    middleware: Middleware,
    fails: bool,
    state: str,
    said: object,
    runs: int,
    is_async: bool,
) -> None:
    app = App(dsn, middleware=[middleware])
    ran: list[int] = []

    def work() -> int:
        ran.append(1)
        if fails:
            raise ValueError("no matter")
        return current_job().attempt

    async def work_async() -> int:
        return work()

    app.task(name="t")(work_async if is_async else work)
    async with running(app):
        await app.defer_async("t")
        (row,) = await jobs.end()
    assert (row["state"], row["error"] or row["result"], len(ran)) == (state, said, runs)


async def test_an_error_that_it_swallows_has_rolled_back(
    dsn: str, jobs: Jobs, conn: Connection
) -> None:
    app = App(dsn, middleware=[_swallow])

    @app.task(name="t", transactional=True)
    def task(connection: Connection) -> None:
        connection.execute("create table half_done ()")
        raise ValueError("no matter")

    async with running(app):
        await app.defer_async("t")
        (row,) = await jobs.end()
    assert row["state"] == "succeeded"
    assert conn.execute("select to_regclass('half_done')").fetchone() == (None,)


async def test_a_cancelled_coroutine_unwinds_through_it(
    app: App, jobs: Jobs, notes: Notes, conn: Connection
) -> None:
    begun = asyncio.Event()

    @app.task(name="t", timeout=dt.timedelta(seconds=0.2))
    async def task() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with running(app):
        await task.defer_async()
        (row,) = await jobs.end()
    assert (row["state"], row["error"]) == (
        "failed",
        "TimeoutError: not done within 0:00:00.200000",
    )
    assert notes.lines[-2:] == ["inner sees CancelledError", "outer sees CancelledError"]


MODULE = """
import contextlib, os
from pgdefer import App

@contextlib.contextmanager
def surround(job):
    os.environ["SURROUNDED_BY"] = str(os.getpid())
    yield
    del os.environ["SURROUNDED_BY"]

app = App({dsn!r}, middleware=[surround])

@app.task(name="t", run_in="process")
def task() -> list[str]:
    return [str(os.getpid()), os.environ["SURROUNDED_BY"]]
"""


async def test_it_is_entered_in_the_process(
    dsn: str, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "surrounded.py").write_text(MODULE.format(dsn=dsn))
    monkeypatch.syspath_prepend(tmp_path)
    app = importlib.import_module("surrounded").app
    async with running(app):
        await app.defer_async("t")
        (row,) = await jobs.end()
    process, surrounded_by = row["result"]
    assert process == surrounded_by != str(os.getpid())


async def test_headers_go_with_every_job(dsn: str, jobs: Jobs) -> None:
    """A trace of the caller reaches the handler, and through it the jobs that it defers."""
    seen: list[tuple[str, str, bool]] = []

    @contextlib.contextmanager
    def continued(job: JobContext) -> Iterator[None]:
        trace.set(job.headers["trace"])
        yield

    def headers(task: str) -> dict[str, str]:
        return {"trace": trace.get(), "for": task} if trace.get(None) else {}

    app = App(dsn, middleware=[continued], headers=headers)

    @app.task(name="parent")
    async def parent() -> None:
        seen.append(("parent", current_job().headers["trace"], True))
        child.defer()

    @app.task(name="child")
    def child() -> None:
        job = current_job()
        seen.append((job.headers["for"], job.headers["trace"], job.parent is not None))

    trace.set("abc")
    async with running(app):
        await parent.defer_async()
        await until(lambda: len(seen) == 2)
        child.configure(headers={"trace": "mine", "more": 1}).defer()
        app.defer("child", headers={"for": "else"})
        await app.defer_many_async([child.prepare(), app.prepare("child")])
        child.defer_many([{}])
        app.chain([child.prepare()])
        app.group([child.prepare()]).then(child.prepare())
        rows = await jobs.end()
        trace.set("")
        plain = child.defer()
        await until(lambda: jobs()[-1]["id"] == plain.id and jobs()[-1]["state"] != "ready")
    assert seen[:2] == [("parent", "abc", True), ("child", "abc", True)]
    assert [row["headers"] for row in rows][2:] == [
        {"trace": "mine", "for": "child", "more": 1},
        {"trace": "abc", "for": "else"},
        *[{"trace": "abc", "for": "child"}] * 6,
    ]
    assert jobs()[-1]["headers"] is None


async def test_headers_of_the_task_stay(dsn: str, jobs: Jobs) -> None:
    app = App(dsn, headers=lambda task: {"trace": "T", "both": "app"})

    @app.task(name="t", headers={"tenant": "acme", "both": "task"})
    def task() -> None: ...

    task.defer()
    app.defer("t", headers={"tenant": "other"})
    assert [row["headers"] for row in jobs()] == [
        {"tenant": "acme", "trace": "T", "both": "app"},
        {"tenant": "other", "trace": "T", "both": "app"},
    ]
    app.close()


@pytest.mark.parametrize("is_async", [True, False])
async def test_children_of_a_durable_job_pass_middleware_and_get_headers_once(
    dsn: str, jobs: Jobs, *, is_async: bool
) -> None:
    """A later run prepares its children again, and defers none."""
    deferred: list[tuple[list[str], int]] = []
    asked: list[str] = []

    @contextlib.contextmanager
    def noted(deferral: Deferral) -> Iterator[None]:
        yield
        deferred.append(([call.task for call in deferral.calls], len(deferral.jobs)))

    def headers(task: str) -> dict[str, int]:
        asked.append(task)
        return {"no": len(asked)}

    app = App(dsn, defer_middleware=[noted], headers=headers)

    @app.task(name="child")
    def child() -> int:
        return 1

    def parent() -> int:
        job = current_job()
        job.gather([])
        return sum(job.gather([child.prepare(), child.prepare()])) + job.call(child.prepare())

    async def parent_async() -> int:
        job = current_job()
        await job.gather_async([])
        both = await job.gather_async([child.prepare(), child.prepare()])
        return sum(both) + await job.call_async(child.prepare())

    task = app.task(parent_async if is_async else parent, name="parent")
    async with running(app):
        job = await task.defer_async()
        rows = await jobs.end(job.id)
    assert rows[0]["result"] == 3
    assert deferred == [(["parent"], 1), (["child", "child"], 2), (["child"], 1)]
    assert asked == ["parent", "child", "child", "child"]
    assert [row["headers"]["no"] for row in jobs()] == [1, 2, 3, 4]
    await app.close_async()


async def test_a_call_whose_error_is_swallowed(dsn: str, jobs: Jobs) -> None:
    @contextlib.contextmanager
    def swallow(_: object) -> Iterator[None]:
        with contextlib.suppress(InvalidParameter):
            yield

    with App(dsn, defer_middleware=[swallow]) as app:
        call = app.prepare("t", {}, queue="x*")
        swallowed = pytest.raises(
            RuntimeError, match="defer_middleware has swallowed the call's error"
        )
        with swallowed:
            app.defer("t", queue="x*")
        with swallowed:
            app.defer_many([call])
        with swallowed:
            await app.defer_async("t", queue="x*")
        app.defer("t")
        await app.close_async()
    assert len(jobs()) == 1


def test_what_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="middleware must be a list"):
        App("host=nowhere", middleware="trace")
    with pytest.raises(TypeError, match=r"middleware .*, not 3"):
        App("host=nowhere", middleware=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"headers .*, not {}"):
        App("host=nowhere", headers={})  # type: ignore[arg-type]

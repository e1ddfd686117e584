"""Steps as decorators, and lazy steps, which are stored later."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App, JobContext, JobFailed, RetryLater, StepChanged, current_job

from .conftest import running, steps

Connection = psycopg.Connection[Any]

CRASHING = """
import os, signal
from pgdefer import App, current_job

app = App({dsn!r})

@app.task(name="crashing", run_in="process")
def crashing() -> None:
    job = current_job()
    job.step("stored", note, "stored")
    job.step("lazy", lazy=True)(note)("lazy")
    if job.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def note(line: str) -> None:
    with open({runs!r}, "a") as file:
        print(line, file=file)
"""


async def test_each_call_of_a_decorated_function_is_a_step(
    app: App, conn: Connection, is_async: bool
) -> None:
    runs: list[object] = []

    @app.task(name="async", retry=2)
    async def coroutine() -> list[int]:
        job = current_job()

        @job.step_async
        async def double(n: int) -> int:
            """Double."""
            runs.append(n)
            return 2 * n

        @job.step_async("named", fingerprint="v1")
        async def other(n: int, *, more: int = 0) -> int:
            runs.append((n, more))
            return n + more

        assert double.__doc__ == "Double."
        found = [await double(n) for n in range(3)] + [await other(7, more=1)]
        if job.attempt == 1:
            raise ValueError("later")
        return found

    @app.task(name="sync", retry=2)
    def function() -> list[int]:
        job = current_job()

        @job.step
        def double(n: int) -> int:
            """Double."""
            runs.append(n)
            return 2 * n

        @job.step("named", fingerprint="v1")
        def other(n: int, *, more: int = 0) -> int:
            runs.append((n, more))
            return n + more

        assert double.__doc__ == "Double."
        found = [double(n) for n in range(3)] + [other(7, more=1)]
        if job.attempt == 1:
            raise ValueError("later")
        return found

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        assert await job.result_async(60) == [0, 2, 4, 8]
    assert runs == [0, 1, 2, (7, 1)]
    assert steps(conn, job.id) == {"double": 0, "double#2": 2, "double#3": 4, "named": 8}
    fingerprints = "select fingerprint from queue.steps where name = 'named'"
    assert conn.execute(fingerprints).fetchall() == [("v1",)]


async def test_names_may_contain_numbers(app: App, conn: Connection) -> None:
    runs: list[int] = []

    @app.task(name="t", retry=2)
    def t() -> None:
        job = current_job()
        for n in range(1, 4):
            job.step(f"item #{n}", runs.append, n)
        if job.attempt == 1:
            raise ValueError("later")

    job = app.defer("t")
    async with running(app):
        await job.result_async(60)
    assert runs == [1, 2, 3]
    assert steps(conn, job.id).keys() == {"item #1", "item #2", "item #3"}


async def test_what_is_no_step(app: App, is_async: bool) -> None:
    said: list[str] = []

    @app.task(name="t", retry=2)
    def t() -> None:
        job = current_job()
        step: Any = job.step_async if is_async else job.step
        calls: list[Callable[[], object]] = [
            lambda: step(lambda: None),
            lambda: step("a", None, 5),
            lambda: step("a", durable=False),
            lambda: step(5)(len),
        ]
        for call in calls:
            try:
                call()
            except TypeError as error:
                said.append(str(error).partition(": ")[2])
        current_job().step("a", fingerprint=f"v{job.attempt}")(lambda: 5)()
        if job.attempt == 1:
            raise ValueError("later")

    job = app.defer("t")
    async with running(app):
        with pytest.raises(Exception, match=StepChanged.__name__):
            await job.result_async(60)
    named = "pass the step's name as a text"
    after = 'step("name", function, ...)'
    assert said == [named, after, after, after] * 2


async def test_a_lazy_step_is_stored_with_what_comes_next(
    app: App, conn: Connection, is_async: bool
) -> None:
    runs: list[object] = []
    seen: list[list[str]] = []
    go_on: dict[int, BaseException] = {1: ValueError("later"), 4: RetryLater("again")}

    def see(id: int) -> None:
        seen.append(sorted(steps(conn, id)))

    def made(n: object) -> object:
        runs.append(n)
        return n

    async def made_async(n: object) -> object:
        return made(n)

    @app.task(name="async", retry=2)
    async def coroutine() -> int:
        job = current_job()
        lazy = job.step_async("lazy", lazy=True)(made_async)
        await lazy(1)
        see(job.id)
        if error := go_on.pop(1, None):
            raise error
        await lazy(2)
        see(job.id)
        await job.step_async("stored", made, 3)
        see(job.id)
        await lazy(4)
        await job.sleep_async("sleep", dt.timedelta(0))
        await lazy(5)
        async with job.transaction_async("transaction"):
            pass
        see(job.id)
        await lazy(6)
        await lazy("x" * 3_000)
        see(job.id)
        await lazy(7)
        if error := go_on.pop(4, None):
            raise error
        await job.step_async("fingerprint", lazy=True, fingerprint="v1")(made_async)(8)
        return len(runs)

    @app.task(name="sync", retry=2)
    def function() -> int:
        job = current_job()
        lazy = job.step("lazy", lazy=True)(made)
        lazy(1)
        see(job.id)
        if error := go_on.pop(1, None):
            raise error
        lazy(2)
        see(job.id)
        job.step("stored", made, 3)
        see(job.id)
        lazy(4)
        job.sleep("sleep", dt.timedelta(0))
        lazy(5)
        with job.transaction("transaction"):
            pass
        see(job.id)
        lazy(6)
        lazy("x" * 3_000)
        see(job.id)
        lazy(7)
        if error := go_on.pop(4, None):
            raise error
        job.step("fingerprint", lazy=True, fingerprint="v1")(made)(8)
        return len(runs)

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        assert await job.result_async(60) == 9
    assert runs == [1, 2, 3, 4, 5, 6, "x" * 3_000, 7, 8]  # each once, in four runs
    one = ["lazy"]
    three = ["lazy", "lazy#2", "stored"]
    five = ["lazy", "lazy#2", "lazy#3", "lazy#4", "sleep", "stored", "transaction"]
    seven = ["lazy", "lazy#2", "lazy#3", "lazy#4", "lazy#5", "lazy#6", *five[4:]]
    assert seen[:4] == [[], one, one, three]
    assert seen[4:9] == [[*three[:2], "lazy#3", "sleep", "stored"]] * 3 + [five, seven]
    found = conn.execute(
        "select name from queue.steps where job_id = %s order by claim, finished_at", [job.id]
    ).fetchall()
    assert [name for (name,) in found[:5]] == ["lazy", "lazy#2", "stored", "lazy#3", "sleep"]
    assert [name for (name,) in found[-2:]] == ["lazy#7", "fingerprint"]


async def test_a_lazy_step_in_the_handlers_transaction(
    app: App, conn: Connection, is_async: bool
) -> None:
    @app.task(name="async", transactional=True)
    async def coroutine(connection: psycopg.AsyncConnection[Any]) -> object:
        return await step_in(current_job())

    @app.task(name="sync", transactional=True)
    def function(connection: psycopg.Connection[Any]) -> int:
        return current_job().step("lazy", lazy=True)(len)("abc")

    async def step_in(job: JobContext) -> object:
        async def count() -> int:
            return 3

        return await job.step_async("lazy", lazy=True)(count)()

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        assert await job.result_async(60) == 3
    assert steps(conn, job.id) == {"lazy": 3}


@pytest.fixture
def child(conn: Connection) -> str:
    """A statement whose transaction fails when it commits."""
    conn.execute(
        "create table child (id int, parent int references child deferrable initially deferred,"
        " primary key (id))"
    )
    return "insert into child values (1, 2)"


async def test_a_transaction_that_fails_loses_no_lazy_step(
    app: App, conn: Connection, child: str, is_async: bool
) -> None:
    @app.task(name="async")
    async def coroutine() -> None:
        job = current_job()
        await job.step_async("lazy", lazy=True)(three)()
        with contextlib.suppress(psycopg.errors.ForeignKeyViolation):
            async with job.transaction_async("write") as connection:
                assert connection is not None
                await connection.execute(child)
        await job.step_async("after", len, "a")

    async def three() -> int:
        return 3

    @app.task(name="sync")
    def function() -> None:
        job = current_job()
        job.step("lazy", lazy=True)(len)("abc")
        with (
            contextlib.suppress(psycopg.errors.ForeignKeyViolation),
            job.transaction("write") as connection,
        ):
            assert connection is not None
            connection.execute(child)
        job.step("after", len, "a")

    job = app.defer("async" if is_async else "sync")
    async with running(app):
        await job.result_async(60)
    assert steps(conn, job.id) == {"lazy": 3, "after": 1}


async def test_nor_does_the_handlers_transaction(app: App, conn: Connection, child: str) -> None:
    @app.task(name="own", transactional=True)
    def function(connection: psycopg.Connection[Any]) -> None:
        current_job().step("lazy", lazy=True)(len)("abc")
        connection.execute(child)

    job = function.defer()
    async with running(app):
        with pytest.raises(JobFailed, match="child_parent_fkey"):
            await job.result_async(60)
    assert steps(conn, job.id) == {"lazy": 3}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is missing. Give a name of 1 to 1,000 bytes"),
        ("é" * 501, r"is too long \(1002 bytes\). Names are at most 1,000 bytes"),
        ("a\0", r"has a character that PostgreSQL can't store \('a\\x00'\)"),
        ("\ud800", r"has a character that PostgreSQL can't store \('\\ud800'\)"),
    ],
)
async def test_a_text_of_a_step_that_cannot_be_stored(
    app: App, conn: Connection, text: str, said: str, lazy: bool
) -> None:
    """It ends the run before the step runs, and no other step is lost."""
    runs: list[int] = []

    @app.task(name="misnamed")
    def function(*, name: str | None = None, fingerprint: str | None = None) -> None:
        job = current_job()
        job.step("before", lazy=lazy)(len)("abc")
        name = text if name is None else name
        fingerprint = text if fingerprint is None else None
        job.step(name, lazy=lazy, fingerprint=fingerprint)(runs.append)(1)

    unnamed, other = function.defer(fingerprint="none"), function.defer(name="a")
    async with running(app):
        with pytest.raises(JobFailed, match=f"InvalidParameter: name {said}"):
            await unnamed.result_async(60)
        with pytest.raises(JobFailed, match=f"InvalidParameter: fingerprint {said}"):
            await other.result_async(60)
    assert runs == []
    assert steps(conn, unnamed.id) == steps(conn, other.id) == {"before": 3}


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_use_skips_the_numbers_that_others_name(
    app: App, conn: Connection, lazy: bool
) -> None:
    runs: list[int] = []

    @app.task(name="t", retry=2)
    def t() -> None:
        job = current_job()
        for n, name in enumerate(("a#2", "a", "a", "a", "a#3", "a#3")):
            job.step(name, lazy=lazy)(runs.append)(n)
        if job.attempt == 1:
            raise ValueError("later")

    job = t.defer()
    async with running(app):
        await job.result_async(60)
    assert runs == [0, 1, 2, 3, 4, 5]
    assert steps(conn, job.id).keys() == {"a#2", "a", "a#3", "a#4", "a#3#2", "a#3#3"}


async def test_a_crash_loses_lazy_steps(
    dsn: str, conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a process sends them with its outcome."""
    runs = tmp_path / "runs"
    (tmp_path / "crashing_steps.py").write_text(CRASHING.format(dsn=dsn, runs=str(runs)))
    monkeypatch.syspath_prepend(tmp_path)
    app = importlib.import_module("crashing_steps").app
    try:
        job = app.defer("crashing")
        async with running(app):
            await job.result_async(120)
    finally:
        app.close()
        del sys.modules["crashing_steps"]
    assert runs.read_text().split() == ["stored", "lazy", "lazy"]
    assert steps(conn, job.id) == {"stored": None, "lazy": None}


@pytest.mark.parametrize("is_lazy", [False, True])
async def test_a_value_that_cannot_be_stored_names_its_step(
    app: App, is_async: bool, is_lazy: bool
) -> None:
    @app.task(name="async")
    async def coroutine() -> None:
        await current_job().step_async("price", lazy=is_lazy)(object)()

    @app.task(name="sync")
    def function() -> None:
        current_job().step("price", lazy=is_lazy)(object)()

    async with running(app):
        job = (coroutine if is_async else function).defer()
        with pytest.raises(JobFailed, match="the value of the step 'price': builtins"):
            await job.result_async(300)

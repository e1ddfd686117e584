"""Children of durable jobs that are cancelled with their parent."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from pgdefer import App, JobCancelled, JobFailed, current_job

from .conftest import Jobs, running, until

Connection = psycopg.Connection[Any]
# The states of what `define` defines, once all that can start has.
WAITING = ["waiting", "running", "held", "waiting", "held"]


def define(app: App) -> list[str]:
    """Define a parent that awaits a running child and two that wait, of which one is a parent."""
    ended: list[str] = []

    @app.task(name="runs")
    async def runs() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("stopped")
            raise

    @app.task(name="waits")
    async def waits() -> None:
        ended.append("ran")

    @app.task(name="inner")
    async def inner() -> None:
        await current_job().call_async(waits.configure(held=True).prepare())

    @app.task(name="outer")
    async def outer() -> None:
        calls = [runs.prepare(), waits.configure(held=True).prepare(), inner.prepare()]
        await current_job().gather_async(calls)

    return ended


async def test_a_cancelled_job_cancels_its_children(app: App, jobs: Jobs, is_async: bool) -> None:
    ended = define(app)
    job = app.defer("outer")
    async with running(app):
        await until(lambda: [row["state"] for row in jobs()] == WAITING)
        if is_async:
            assert await job.cancel_async(children=True) == "cancelled"
            assert await job.cancel_children_async() == []
        else:
            assert await asyncio.to_thread(job.cancel, children=True) == "cancelled"
            assert job.cancel_children() == []
        states = [row["state"] for row in jobs()]
        assert states == ["cancelled", "running", *["cancelled"] * 3]
        with pytest.raises(JobCancelled):
            await job.result_async(60)
        if is_async:
            found = await job.cancel_children_async(abort=True)
        else:
            found = job.cancel_children(abort=True)
        rows = await jobs.end()
    assert found == [rows[1]["id"]]
    assert {row["state"] for row in rows} == {"cancelled"}
    assert ended == ["stopped"]


async def test_its_running_children_are_stopped(app: App, jobs: Jobs) -> None:
    ended = define(app)
    job = app.defer("outer")
    async with running(app):
        # Only then has the inner one begun to wait for the last: until then that is nobody's child.
        await until(lambda: [row["state"] for row in jobs()] == WAITING)
        assert await job.cancel_async(abort=True, children=True) == "cancelled"
        rows = await jobs.end()
    assert {row["state"] for row in rows} == {"cancelled"}
    assert ended == ["stopped"]


async def test_a_deleted_child_is_gone(app: App, jobs: Jobs) -> None:
    @app.task(name="child")
    async def child() -> None: ...

    @app.task(name="parent")
    async def parent() -> list[str]:
        calls = [child.configure(held=True).prepare()]
        (found,) = await current_job().gather_async(calls, return_errors=True)
        assert isinstance(found, JobFailed)
        return [str(found), found.error or ""]

    job = app.defer("parent")
    async with running(app):
        await until(lambda: [row["state"] for row in jobs()] == ["waiting", "held"])
        gone = jobs()[1]["id"]
        await app.job(gone).delete_async(force=True)
        why = "it is gone, and its result with it"
        assert await job.result_async(60) == [f"job {gone} was deleted: {why}", why]


async def test_a_name_that_is_too_long_defers_nothing(
    app: App, conn: Connection, is_async: bool
) -> None:
    @app.task(name="child")
    def child() -> None: ...

    @app.task(name="t")
    async def coroutine() -> None:
        await current_job().gather_async([child.prepare()], name="x" * 995)

    @app.task(name="sync")
    def function() -> None:
        current_job().gather([child.prepare()], name="x" * 995)

    job = coroutine.defer() if is_async else function.defer()
    async with running(app):
        with pytest.raises(JobFailed, match=r"name, with ' ended', is too long \(1001 bytes\)"):
            await job.result_async(60)
    assert conn.execute("select task from queue.jobs where id <> %s", [job.id]).fetchall() == []


async def test_what_is_no_prepared_job_is_refused(app: App, is_async: bool) -> None:
    said: list[str] = []

    @app.task(name="child")
    def child(n: int) -> int:
        return n

    async def attempt(function: Any, given: Any) -> None:
        try:
            done = function(given)
            if is_async:
                await done
        except TypeError as error:
            said.append(str(error))

    @app.task(name="outer")
    async def outer() -> None:
        job = current_job()
        call, gather = (job.call_async, job.gather_async) if is_async else (job.call, job.gather)
        await attempt(call, child)
        await attempt(call, child(1))
        await attempt(gather, child.prepare(1))
        await attempt(gather, [child.prepare(1), child])

    job = app.defer("outer")
    async with running(app):
        await job.result_async(60)
    assert [text.partition(", not ")[0] for text in said] == [
        "a call must come from task.prepare(...)",
        "a call must come from task.prepare(...)",
        "calls must be a list",
        "a call must come from task.prepare(...)",
    ]


@pytest.mark.parametrize("value", [[1, 2], ["a"], "a"])
async def test_a_call_under_the_name_of_another_step(
    app: App, jobs: Jobs, is_async: bool, value: object
) -> None:
    @app.task(name="child")
    async def child() -> None: ...

    @app.task(name="async", retry=2)
    async def coroutine() -> None:
        job = current_job()
        if job.attempt == 1:
            await job.step_async("child", lambda: value)
            raise OSError
        await job.call_async(child.prepare())

    @app.task(name="sync", retry=2)
    def function() -> None:
        job = current_job()
        if job.attempt == 1:
            job.step("child", lambda: value)
            raise OSError
        job.call(child.prepare())

    async with running(app):
        (coroutine if is_async else function).defer()
        (row,) = await jobs.end()
    assert row["error"] == (
        "DecodeError: the step 'child' was another one when it finished: give this one another name"
    )

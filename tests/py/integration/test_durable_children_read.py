"""The results of a durable job's children: how often a run reads them, and what it then knows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pgdefer import App, current_job
from pgdefer.client.client import Client
from pgdefer.database import sql

from .conftest import Jobs, running, until


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each reading of children appends the job's id."""
    found: list[int] = []
    call, call_async = Client.call, Client.call_async

    def counted(
        self: Client, statement: sql.Statement, parameters: Any, *args: Any, **kw: Any
    ) -> Any:
        if statement is sql.NEEDS:
            found.append(parameters["id"])
        return call(self, statement, parameters, *args, **kw)

    async def counted_async(
        self: Client, statement: sql.Statement, parameters: Any, *args: Any, **kw: Any
    ) -> Any:
        if statement is sql.NEEDS:
            found.append(parameters["id"])
        return await call_async(self, statement, parameters, *args, **kw)

    monkeypatch.setattr(Client, "call", counted)
    monkeypatch.setattr(Client, "call_async", counted_async)
    return found


async def test_each_run_reads_its_children_once(
    app: App, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reads(monkeypatch)

    @app.task(name="double")
    def double(n: int) -> int:
        return 2 * n

    if is_async:

        @app.task(name="t")
        async def coroutine() -> list[int]:
            return [await current_job().call_async(double.prepare(n)) for n in range(20)]
    else:

        @app.task(name="t")
        def function() -> list[int]:
            return [current_job().call(double.prepare(n)) for n in range(20)]

    job = app.defer("t")
    async with running(app):
        assert await job.result_async(60) == [2 * n for n in range(20)]
    assert len(found) == 20


@pytest.mark.parametrize("is_gather", [False, True])
async def test_concurrent_calls_read_their_children_once_a_run(
    app: App, monkeypatch: pytest.MonkeyPatch, is_gather: bool
) -> None:
    found = reads(monkeypatch)
    runs: list[int] = []

    @app.task(name="double")
    def double(n: int) -> int:
        return 2 * n

    @app.task(name="t")
    async def at_once() -> list[int]:
        runs.append(1)
        job = current_job()
        calls = [job.call_async(double.prepare(n), name=f"c{n}") for n in range(20)]
        if is_gather:
            return await asyncio.gather(*calls)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
        return [task.result() for task in tasks]

    job = at_once.defer()
    async with running(app):
        assert await job.result_async(300) == [2 * n for n in range(20)]
    assert len(found) <= len(runs)


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_child_that_is_retried_is_awaited_again_unless_its_end_was_read(
    app: App, jobs: Jobs, is_async: bool, is_read: bool
) -> None:
    runs: list[list[str]] = []
    tried: set[str] = set()
    release = asyncio.Event()

    @app.task(name="child")
    async def child(name: str) -> str:
        if name not in tried:
            tried.add(name)
            raise ValueError(name)
        await release.wait()
        return name

    def retry(when: bool) -> None:
        if len(runs) == 3 and len(runs[-1]) < 2 and when is is_read:
            app.job(parent.id + 2).retry()

    if is_async:

        @app.task(name="t")
        async def coroutine() -> None:
            runs.append([])
            retry(False)
            for name in "abc":
                calls = [child.prepare(name)]
                runs[-1] += map(str, await current_job().gather_async(calls, return_errors=True))
                retry(True)
    else:

        @app.task(name="t")
        def function() -> None:
            runs.append([])
            retry(False)
            for name in "abc":
                calls = [child.prepare(name)]
                runs[-1] += map(str, current_job().gather(calls, return_errors=True))
                retry(True)

    parent = app.defer("t")
    async with running(app):
        shown = {1: "waiting", 2: "failed", 3: "running"} | ({4: "failed"} if is_read else {})
        states = {parent.id + n - 1: state for n, state in shown.items()}
        await until(lambda: len(runs) == 3 and jobs.states() == states, 10)
        release.set()
        await parent.result_async(60)
    a, b, c = (f"job {parent.id + n} failed: ValueError: {'xabc'[n]}" for n in (1, 2, 3))
    third = [[a, b]] if is_read else [[a], [a, "b"]]
    assert runs == [[], [a], *third, [a, "b", c]]

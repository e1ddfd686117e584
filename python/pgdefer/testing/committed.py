"""A queue that commits its jobs, and runs them with a real worker.

Tests: integration/test_testing.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from pgdefer.database import sql
from pgdefer.database.callers import Rows
from pgdefer.database.own_threads import has_running_loop
from pgdefer.database.sql import Statement
from pgdefer.errors import JobFailed
from pgdefer.testing.base import PAGE, TestQueueBase
from pgdefer.testing.connections import at_once
from pgdefer.testing.jobs import DeferredJob
from pgdefer.testing.threads import run_apart

__all__ = ["CommittedTestQueue"]


class CommittedTestQueue(TestQueueBase):
    """The queue in the App's own database, with a worker that runs until nothing is due.

    Use it for tests that are not possible in a rolled-back transaction: of commits, processes,
    timeouts, several connections. The jobs deferred in the block are removed at its end. The App's
    recurring tasks are not registered.
    """

    def __enter__(self) -> Self:
        self.app.import_tasks()
        ((self._after,),) = self.app.client.call(sql.LAST_ID, {})
        return self

    def __exit__(self, *_: object) -> None:
        try:
            at_once(self._remove(self._call_here))
        finally:
            self.app.close()

    async def __aenter__(self) -> Self:
        self.app.import_tasks()
        ((self._after,),) = await self.app.client.call_async(sql.LAST_ID, {})
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._remove(self.app.client.call_async)
        finally:
            await self.app.close_async()

    async def _remove(self, call: Callable[..., Awaitable[Rows]]) -> None:
        """Remove the jobs, undecodable ones too, as many at once as one call takes."""
        after = self._after
        while rows := await call(sql.DEFERRED, {"after": after, "max_jobs": PAGE}):
            ids = [row[0] for row in rows]
            await call(sql.DELETE, {"ids": ids, "force": True})
            after = ids[-1]

    async def _call_here(self, statement: Statement, parameters: Mapping[str, Any]) -> Rows:
        return self.app.client.call(statement, parameters)

    async def _call(self, statement: Statement, parameters: Mapping[str, Any]) -> Rows:
        if has_running_loop():
            return await self.app.client.call_async(statement, parameters)
        return self.app.client.call(statement, parameters)

    def run(
        self,
        queues: Sequence[str] | None = None,
        *,
        max_jobs: int = 1000,
        raise_errors: bool = True,
    ) -> list[DeferredJob]:
        """Let a worker run the jobs that are due until none is left; return the test's jobs.

        Raises JobFailed if one has failed for good, unless `raise_errors` is false, and
        AssertionError if jobs may be left after `max_jobs`.
        """
        run_apart(self._work(queues, max_jobs, keep_open=False))
        # Apart from that event loop: Django refuses to fetch rows, as arguments, within one.
        return _checked(self.deferred(), raise_errors=raise_errors)

    async def run_async(
        self,
        queues: Sequence[str] | None = None,
        *,
        max_jobs: int = 1000,
        raise_errors: bool = True,
    ) -> list[DeferredJob]:
        """Let a worker run the jobs that are due: as `run`."""
        await self._work(queues, max_jobs, keep_open=True)
        return _checked(await self.deferred_async(), raise_errors=raise_errors)

    async def _work(self, queues: Sequence[str] | None, max_jobs: int, *, keep_open: bool) -> None:
        from pgdefer.worker.worker import Worker  # noqa: PLC0415 (few tests need one)

        worker = Worker(
            self.app, queues, drain=True, max_jobs=max_jobs + 1, register_schedules=False
        )
        await worker.run_async()
        if worker.finished > max_jobs:
            raise AssertionError(f"{max_jobs} jobs have run, and there may be more")
        if not keep_open:
            await self.app.close_async()


def _checked(jobs: list[DeferredJob], *, raise_errors: bool) -> list[DeferredJob]:
    """Return jobs. Raises JobFailed if one has failed for good."""
    for job in jobs if raise_errors else ():
        if job.state == "failed":
            raise JobFailed(job.id, job.error)
    return jobs

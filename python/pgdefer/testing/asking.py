"""The common part of both test queues: deferred jobs, assertions, and the passing of time."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from pgdefer.app import App
from pgdefer.database import sql
from pgdefer.database.callers import Rows
from pgdefer.database.sql import Statement
from pgdefer.options import JobOptions, interval_text
from pgdefer.tasks.parameters import SCHEDULED_FOR
from pgdefer.tasks.task import Task
from pgdefer.testing.connections import at_once
from pgdefer.testing.jobs import DeferredJob, arguments, deferred_job, found, name_of

__all__ = ["AskingQueue"]

T = TypeVar("T")


class AskingQueue:
    """Asks about the jobs of a test, and shifts their times."""

    def __init__(self, app: App) -> None:
        self.app = app
        # The last job deferred before the test.
        self._after = 0
        self._travelled = dt.timedelta()

    async def _call(self, statement: Statement, parameters: Mapping[str, Any]) -> Rows:
        raise NotImplementedError

    def _at_once(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that waits for nothing, and return its value."""
        return at_once(coroutine)

    async def _rehearse(self) -> None:
        """Have the database admit uncommitted jobs, and let the test take its time."""

    # Deferred jobs

    def deferred(
        self, task: Task[..., Any] | str | None = None, /, *args: Any, **kwargs: Any
    ) -> list[DeferredJob]:
        """Return the jobs deferred in this test, by id, including those that have ended.

        With a task, only its jobs; with arguments, only jobs that have these, and perhaps others.
        """
        return self._at_once(self.deferred_async(task, *args, **kwargs))

    async def deferred_async(
        self, task: Task[..., Any] | str | None = None, /, *args: Any, **kwargs: Any
    ) -> list[DeferredJob]:
        """Return the jobs deferred in this test: as `deferred`."""
        rows = await self._call(sql.DEFERRED, {"after": self._after})
        jobs = [deferred_job(self.app.client, row) for row in rows]
        return jobs if task is None else found(jobs, task, arguments(task, args, kwargs))

    def assert_deferred(
        self, task: Task[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> DeferredJob:
        """Check that a task was deferred with these arguments, and perhaps others.

        Returns the last such job. For the number of jobs use `len(deferred(task, ...))`.
        """
        return self._at_once(self.assert_deferred_async(task, *args, **kwargs))

    async def assert_deferred_async(
        self, task: Task[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> DeferredJob:
        """Check that a task was deferred: as `assert_deferred`."""
        jobs = await self.deferred_async()
        expected = arguments(task, args, kwargs)
        matching = found(jobs, task, expected)
        if not matching:
            wanted = _call_text(name_of(task), expected)
            raise AssertionError(f"{wanted} was not deferred, but\n{_listed(jobs)}")
        return matching[-1]

    def assert_not_deferred(
        self, task: Task[..., Any] | str | None = None, /, *args: Any, **kwargs: Any
    ) -> None:
        """Check that nothing was deferred: no job, none of a task, or none with these arguments."""
        self._at_once(self.assert_not_deferred_async(task, *args, **kwargs))

    async def assert_not_deferred_async(
        self, task: Task[..., Any] | str | None = None, /, *args: Any, **kwargs: Any
    ) -> None:
        """Check that nothing was deferred: as `assert_not_deferred`."""
        jobs = await self.deferred_async(task, *args, **kwargs)
        if jobs:
            raise AssertionError(f"deferred:\n{_listed(jobs)}")

    # Time

    def travel(self, *, schedules: bool = False, **duration: float) -> list[DeferredJob]:
        """Let time pass, as in `travel(hours=2)`; return the jobs that are due because of this.

        The times of jobs that wait for theirs, retries included, are shifted; deadlines, expiry,
        rates and idempotency keys are not. With `schedules`, the runs that the code's recurring
        tasks have within that time are deferred as well, each for its own time.
        """
        return self._at_once(self.travel_async(schedules=schedules, **duration))

    async def travel_async(
        self, *, schedules: bool = False, **duration: float
    ) -> list[DeferredJob]:
        """Let time pass: as `travel`."""
        length = dt.timedelta(**duration)
        if length <= dt.timedelta():
            raise ValueError("time passes forward: use travel(hours=1) or the like")
        ((now,),) = await self._call(sql.CLOCK, {})
        due = []
        await self._rehearse()
        for job in await self.deferred_async():
            if job.state == "scheduled" and job.scheduled_at is not None:
                at = job.scheduled_at - length
                parameters = {"id": job.id, "at": None if at <= now else at.isoformat()}
                await self._call(sql.RESCHEDULE, parameters)
                due += [job.id] if at <= now else []
        if schedules:
            due += await self._recur(length)
        self._travelled += length
        await self._rehearse()
        return [job for job in await self.deferred_async() if job.id in due]

    async def _recur(self, length: dt.timedelta) -> list[int]:
        """Defer the runs that the code's schedules have within the next time; return their ids."""
        runs = []
        for schedule in self.app.schedules.values():
            parameters = {
                "cron": schedule.cron,
                "timezone": schedule.timezone,
                "start": interval_text(self._travelled),
                "length": interval_text(length),
            }
            rows = await self._call(sql.RUNS_WITHIN, parameters)
            runs += [(run_at, schedule) for (run_at,) in rows]
        options_of = {"catch_up", "max_delay", "overlap", "enabled", "deadline"}
        ids = []
        for run_at, schedule in sorted(runs, key=lambda run: (run[0], run[1].name)):
            args = json.loads(schedule.args) | {SCHEDULED_FOR: run_at.isoformat()}
            rest = {k: v for k, v in schedule.options.items() if k not in options_of}
            job = {"task": schedule.task, "args": args, **_nested(rest)}
            rows = await self._call(sql.DEFER_MANY, {"jobs": json.dumps([job])})
            ids.append(rows[0][0])
        return ids


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as queue.defer_many takes them."""
    job = JobOptions.of(options)
    return {**job.arguments, **({"options": job.options} if job.options else {})}


def _call_text(task: str, args: Mapping[str, Any]) -> str:
    return f"{task}({', '.join(f'{name}={value!r}' for name, value in args.items())})"


def _listed(jobs: Sequence[DeferredJob]) -> str:
    lines = [f"  {job.id}: {_call_text(job.task, job.args)}, {job.state}" for job in jobs]
    return "\n".join(lines) or "  (nothing)"

"""What both queues on a database have in common: their jobs, and the passing of time.

Tests: integration/test_testing.py.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from typing import Any

from pgdefer.app import App
from pgdefer.database import sql
from pgdefer.database.callers import Rows
from pgdefer.database.sql import Statement
from pgdefer.options import ENDED, interval_text
from pgdefer.tasks.parameters import SCHEDULED_FOR
from pgdefer.testing.assertions import Assertions, checked_app
from pgdefer.testing.jobs import DeferredJob, deferred_job
from pgdefer.testing.threads import Threads

__all__ = ["PAGE", "TestQueueBase"]

# How many jobs one call returns, and one call deletes.
PAGE = 1000
_LONGEST = dt.timedelta(days=365_000)
# The options of a schedule that queue.defer does not take, or not in this form.
_OF_SCHEDULES = {"catch_up", "max_delay", "overlap", "enabled", "deadline"}


class TestQueueBase(Assertions[DeferredJob]):
    """Returns the jobs of a test, and shifts their times."""

    def __init__(self, app: App) -> None:
        self.app = checked_app(app)
        # The last job deferred before the test.
        self._after = 0
        self._travelled = dt.timedelta()
        self._threads = Threads()

    async def _call(self, statement: Statement, parameters: Mapping[str, Any]) -> Rows:
        raise NotImplementedError

    async def _rehearse(self) -> None:
        """Let the database admit uncommitted jobs, and the test take as long as it needs."""

    async def _deferred_jobs(self) -> list[DeferredJob]:
        """Return the jobs deferred in this test."""
        found: list[DeferredJob] = []
        after = self._after
        while True:
            rows = await self._call(sql.DEFERRED, {"after": after, "max_jobs": PAGE})
            texts = [text for row in rows for text in (row[2], row[-2])]  # args and headers
            found += await self._threads.decode(self.app.codec, texts, self._deferred, rows)
            if len(rows) < PAGE:
                return found
            after = found[-1].id

    def _deferred(self, rows: Rows) -> list[DeferredJob]:
        return [deferred_job(self.app.client, row) for row in rows]

    # Time

    def travel(self, *, schedules: bool = False, **duration: float) -> list[DeferredJob]:
        """Let time pass, as in `travel(hours=2)`; return the jobs that are due because of this.

        The times of scheduled jobs, retries included, are shifted; deadlines, expiry, rates,
        idempotency keys and the timeouts of waits are not. With `schedules`, the runs that the
        code's recurring tasks have within that time are deferred as well, each for its own time.
        Raises ValueError for a negative duration, or one of more than a thousand years.
        """
        return self._at_once(self.travel_async(schedules=schedules, **duration))

    async def travel_async(
        self, *, schedules: bool = False, **duration: float
    ) -> list[DeferredJob]:
        """Let time pass: as `travel`."""
        length = _length(duration)
        ((now,),) = await self._call(sql.CLOCK, {})
        due = []
        await self._rehearse()
        for job in await self.deferred_async():
            if job.scheduled_at is None or job.state in (*ENDED, "running"):
                continue
            is_waiting = job.state != "scheduled"  # for its needs, or held
            if not is_waiting or job.scheduled_at > now:
                at = job.scheduled_at - length
                parameters = {"id": job.id, "at": None if at <= now else at.isoformat()}
                await self._call(sql.RESCHEDULE, parameters)
                due += [job.id] if at <= now and not is_waiting else []
        if schedules:
            due += await self._recur(length)
        self._travelled += length
        await self._rehearse()
        return [job for job in await self.deferred_async() if job.id in due]

    async def _recur(self, length: dt.timedelta) -> list[int]:
        """Defer the runs that the code's schedules have within the next time; return their ids."""
        runs = []
        for schedule in self.app.schedules.values():
            if schedule.options.get("enabled") is False:
                continue
            parameters = {
                "cron": schedule.cron,
                "timezone": schedule.timezone,
                "start": interval_text(self._travelled),
                "length": interval_text(length),
                "deadline": schedule.options.get("deadline"),
                "after": None,
                "n": PAGE,
            }
            while rows := await self._call(sql.RUNS_WITHIN, parameters):
                runs += [(run_at, deadline, schedule) for run_at, deadline in rows]
                if len(rows) < PAGE:
                    break
                parameters["after"] = rows[-1][0].isoformat()
        ids = []
        for run_at, deadline, schedule in sorted(runs, key=lambda run: (run[0], run[2].name)):
            args = json.loads(schedule.args) | {SCHEDULED_FOR: run_at.isoformat()}
            rest = {k: v for k, v in schedule.options.items() if k not in _OF_SCHEDULES}
            job = {"task": schedule.task, "args": args, **rest}
            if deadline is not None:
                job["deadline"] = deadline
            rows = await self._call(sql.DEFER_MANY, {"jobs": json.dumps([job])})
            ids.append(rows[0][0])
        return ids


def _length(duration: Mapping[str, float]) -> dt.timedelta:
    """Return the time that is to pass, as dt.timedelta takes it."""
    try:
        length = dt.timedelta(**duration)
    except (OverflowError, TypeError, ValueError):  # also of other names, too large numbers, nan
        length = dt.timedelta()
    if not dt.timedelta() < length <= _LONGEST:
        given = ", ".join(f"{name}={value!r}" for name, value in duration.items())
        raise ValueError(
            "time passes forward, by at most a thousand years: use travel(hours=1) or the like, "
            f"not travel({given})"
        )
    return length

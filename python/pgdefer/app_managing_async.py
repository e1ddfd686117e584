"""An App's calls for operators: they list and change jobs, queues, limits and schedules.

Tests: integration/test_managing.py, integration/test_managing_lists.py.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Unpack

from pgdefer.checks import check_text
from pgdefer.database import sql
from pgdefer.database.callers import OWN, AnyAsyncConnection
from pgdefer.errors import Naming
from pgdefer.options import (
    HasId,
    JobOptions,
    RecurringOptions,
    checked_interval,
    checked_mapping,
    checked_time,
    ids_of,
    settings_json,
)
from pgdefer.tasks.answers import check_outcomes
from pgdefer.tasks.infos import (
    GroupInfo,
    HealthCheck,
    JobInfo,
    LimitInfo,
    LockInfo,
    QueueInfo,
    ScheduleInfo,
    ShareInfo,
    TaskInfo,
    TaskStats,
    WorkerInfo,
    with_json,
)
from pgdefer.tasks.job import Job
from pgdefer.tasks.option_checks import check_cron, check_options
from pgdefer.tasks.registry import Registry
from pgdefer.tasks.task import Task, task_name

__all__ = ["AsyncManaging"]


class AsyncManaging(Registry):
    """Lists, queues, schedules and many jobs. Each call takes a `connection`, as deferring does."""

    # Reading

    async def list_jobs_async(
        self,
        task: str | Task[..., Any] | None = None,
        *,
        queue: str | None = None,
        state: str | None = None,
        pattern: str | None = None,
        by: Literal["text", "path", "key"] = "text",
        before: int | None = None,
        max_jobs: int = 100,
        connection: AnyAsyncConnection = OWN,
    ) -> list[JobInfo]:
        """Return jobs, finished ones too, newest first; with `before`, only those of smaller ids.

        `pattern` is searched in their args: a text, a jsonpath (`by="path"`), or a whole lock,
        queueing lock, idempotency key or concurrency key (`by="key"`). The search stops after
        reading 50 MB.
        """
        parameters = {
            "pattern": pattern,
            "queue": queue,
            "state": state,
            "max_bytes": 50_000_000,
            "by": by,
            "task": task_name(task),
            "before": before,
            "max_jobs": max_jobs,
        }
        rows = await self.client.call_async(sql.LIST_JOBS, parameters, connection)
        return [JobInfo(*row) for row in rows]

    async def list_queues_async(self, *, connection: AnyAsyncConnection = OWN) -> list[QueueInfo]:
        """Return the queues, by name."""
        rows = await self.client.call_async(sql.QUEUES, {}, connection)
        return [QueueInfo(*row) for row in rows]

    async def list_tasks_async(self, *, connection: AnyAsyncConnection = OWN) -> list[TaskInfo]:
        """Return the tasks that are registered in the database, by name."""
        rows = await self.client.call_async(sql.LIST_TASKS, {}, connection)
        return [with_json(TaskInfo, row) for row in rows]

    async def list_locks_async(self, *, connection: AnyAsyncConnection = OWN) -> list[LockInfo]:
        """Return the locks of unfinished jobs, those with the most waiting jobs first."""
        rows = await self.client.call_async(sql.LOCKS, {}, connection)
        return [LockInfo(*row) for row in rows]

    async def list_limits_async(self, *, connection: AnyAsyncConnection = OWN) -> list[LimitInfo]:
        """Return the limits, and how much of each is in use."""
        rows = await self.client.call_async(sql.SEMAPHORES, {}, connection)
        return [LimitInfo(*row) for row in rows]

    async def list_shares_async(self, *, connection: AnyAsyncConnection = OWN) -> list[ShareInfo]:
        """Return the shares, by queue and priority."""
        rows = await self.client.call_async(sql.SHARES, {}, connection)
        return [ShareInfo(*row) for row in rows]

    async def list_groups_async(
        self, name: str | None = None, *, connection: AnyAsyncConnection = OWN
    ) -> list[GroupInfo]:
        """Return the groups, newest first; with `name`, only that one."""
        rows = await self.client.call_async(sql.GROUPS, {"name": name}, connection)
        return [GroupInfo(*row) for row in rows]

    async def list_workers_async(self, *, connection: AnyAsyncConnection = OWN) -> list[WorkerInfo]:
        """Return the workers, including those that have gone within the last minute."""
        rows = await self.client.call_async(sql.LIST_WORKERS, {}, connection)
        return [with_json(WorkerInfo, row) for row in rows]

    async def list_schedules_async(
        self, *, connection: AnyAsyncConnection = OWN
    ) -> list[ScheduleInfo]:
        """Return the schedules, by name."""
        rows = await self.client.call_async(sql.LIST_SCHEDULES, {}, connection)
        return [with_json(ScheduleInfo, row) for row in rows]

    async def stats_async(self, *, connection: AnyAsyncConnection = OWN) -> list[TaskStats]:
        """Return the numbers of jobs, by queue and task."""
        rows = await self.client.call_async(sql.TASK_STATS, {}, connection)
        return [TaskStats(*row) for row in rows]

    async def health_async(self, *, connection: AnyAsyncConnection = OWN) -> list[HealthCheck]:
        """Return a row for each check of what may stop or slow the queue."""
        rows = await self.client.call_async(sql.HEALTH, {}, connection)
        return [HealthCheck(*row) for row in rows]

    # Queues

    async def pause_async(
        self,
        queue: str | None = None,
        *,
        task: str | Task[..., Any] | None = None,
        until: dt.datetime | None = None,
        connection: AnyAsyncConnection = OWN,
    ) -> int:
        """Stop jobs of a queue (a name, prefix* or *; None: all) or of a task from starting.

        This lasts until `resume`, or until the time `until`. Running jobs continue. Returns the
        number of affected jobs (unfinished and not running). Raises InvalidParameter if `until` is
        past, and WrongIsolation if the transaction is not READ COMMITTED. Until the transaction
        ends, workers admit no new jobs: keep it short.
        """
        at = checked_time("until", until)
        parameters = {"queue": queue, "task": task_name(task), "until": at}
        ((jobs,),) = await self.client.call_async(sql.PAUSE, parameters, connection)
        return int(jobs)

    async def resume_async(
        self,
        queue: str | None = None,
        *,
        task: str | Task[..., Any] | None = None,
        connection: AnyAsyncConnection = OWN,
    ) -> int:
        """End a pause: the latest call of `pause` or `resume` that matches a queue wins.

        Without a task it also ends the pauses of tasks on those queues; with a task, a pause of the
        queue stays. Returns and raises as `pause`.
        """
        parameters = {"queue": queue, "task": task_name(task)}
        ((jobs,),) = await self.client.call_async(sql.RESUME, parameters, connection)
        return int(jobs)

    async def create_queue_async(
        self, name: str, *, paused: bool = False, connection: AnyAsyncConnection = OWN
    ) -> bool:
        """Create a queue, as its first job would; return whether it is new. Raises as `pause`."""
        parameters = {"name": name, "paused": paused}
        ((is_new,),) = await self.client.call_async(sql.CREATE_QUEUE, parameters, connection)
        return bool(is_new)

    async def configure_queue_async(
        self, name: str, options: Mapping[str, Any], *, connection: AnyAsyncConnection = OWN
    ) -> None:
        """Set a queue's limits: `{"max_running": 2, "retain": timedelta(days=7)}`.

        A rate is `{"limit": 10, "per": timedelta(minutes=1)}`; intervals may be text, too. None
        removes a setting; settings that are left out stay as they are. The SQL function
        `queue.configure_queue` documents all of them. Raises as `pause`.
        """
        parameters = {"name": name, "options": settings_json(options)}
        await self.client.call_async(sql.CONFIGURE_QUEUE, parameters, connection)

    async def delete_queue_async(
        self, name: str, *, force: bool = False, connection: AnyAsyncConnection = OWN
    ) -> int:
        """Remove a queue with its settings and finished jobs; return how many jobs are removed.

        Raises QueueNotEmpty without `force` if it has unfinished jobs, or jobs that those of
        another queue need; with `force` these are removed too. Raises also as `pause`.
        """
        parameters = {"name": name, "force": force}
        ((jobs,),) = await self.client.call_async(sql.DELETE_QUEUE, parameters, connection)
        return int(jobs)

    async def configure_key_async(
        self, pattern: str, options: Mapping[str, Any], *, connection: AnyAsyncConnection = OWN
    ) -> None:
        """Set the limit and the rate of concurrency keys that match a name or prefix*.

        For example `{"limit": 2, "rate": {"limit": 10, "per": timedelta(minutes=1)}}`. They
        override the limits that jobs give. None removes a setting; settings that are left out stay
        as they are. Raises as `pause`.
        """
        parameters = {"pattern": pattern, "options": settings_json(options)}
        await self.client.call_async(sql.CONFIGURE_KEY, parameters, connection)

    async def configure_share_async(
        self, pattern: str, options: Mapping[str, Any], *, connection: AnyAsyncConnection = OWN
    ) -> None:
        """Set the weight of shares that match a name or prefix*: `{"weight": 3}`.

        None restores the default, 1. Raises as `pause`.
        """
        parameters = {"pattern": pattern, "options": settings_json(options)}
        await self.client.call_async(sql.CONFIGURE_SHARE, parameters, connection)

    async def unblock_async(self, *, connection: AnyAsyncConnection = OWN) -> int | None:
        """End the session that keeps others from admitting jobs; return its process id, or None.

        `health` says when that is needed: its check `admission` fails.
        """
        ((session,),) = await self.client.call_async(sql.UNBLOCK, {}, connection)
        found: int | None = session
        return found

    # Schedules

    async def schedule_async(
        self,
        name: str,
        cron: str,
        task: str | Task[..., Any],
        args: Mapping[str, Any] | None = None,
        *,
        timezone: str = "UTC",
        connection: AnyAsyncConnection = OWN,
        **options: Unpack[RecurringOptions],
    ) -> dt.datetime | None:
        """Create or change a schedule at run time, as for one customer; return its next run.

        Workers do not remove it: they remove only schedules that their code has defined. A second
        call with the same arguments changes nothing. `args` are checked only if `task` is a Task,
        not a name. Returns None if the schedule is disabled.
        """
        what = f"the schedule {name!r}"
        named = task_name(task)
        check_cron(what, cron)
        check_text("timezone", timezone, "Europe/Berlin")
        check_options(what, options, RecurringOptions)
        if isinstance(task, Task):
            with Naming(what):
                args = task.parameters.bind_run(checked_mapping("args", args or {}))
        stored = json.dumps(JobOptions.of(options).defaults(), allow_nan=False)
        parameters = {
            "name": name,
            "cron": cron,
            "task": named,
            "args": self.client.dumps_args(named, args),
            "timezone": timezone,
            "options": stored if options else None,
        }
        ((next_run,),) = await self.client.call_async(sql.SCHEDULE_ONE, parameters, connection)
        found: dt.datetime | None = next_run
        return found

    async def unschedule_async(self, name: str, *, connection: AnyAsyncConnection = OWN) -> bool:
        """Remove a schedule; return whether there was one."""
        ((was_there,),) = await self.client.call_async(sql.UNSCHEDULE, {"name": name}, connection)
        return bool(was_there)

    async def enable_schedule_async(
        self, name: str, enabled: bool = True, *, connection: AnyAsyncConnection = OWN
    ) -> dt.datetime | None:
        """Enable or disable a schedule; return its next run, None if it is disabled.

        Runs that it missed while it was disabled are skipped.
        """
        parameters = {"name": name, "enabled": enabled}
        ((next_run,),) = await self.client.call_async(sql.ENABLE_SCHEDULE, parameters, connection)
        found: dt.datetime | None = next_run
        return found

    async def next_runs_async(
        self,
        cron: str,
        *,
        timezone: str = "UTC",
        n: int = 5,
        connection: AnyAsyncConnection = OWN,
    ) -> list[dt.datetime]:
        """Return the next `n` runs of a cron expression, for example to show them in a form."""
        check_cron("the schedule", cron)
        check_text("timezone", timezone, "Europe/Berlin")
        parameters = {"cron": cron, "timezone": timezone, "n": n}
        rows = await self.client.call_async(sql.NEXT_RUNS, parameters, connection)
        return [run_at for run_at, _ in rows]

    async def run_now_async(self, name: str, *, connection: AnyAsyncConnection = OWN) -> Job[Any]:
        """Defer a job of a schedule now, in addition to its runs."""
        ((id,),) = await self.client.call_async(sql.RUN_NOW, {"name": name}, connection)
        return Job(id, self.client)

    # Many jobs

    async def retry_failed_async(
        self,
        task: str | Task[..., Any] | None = None,
        *,
        queue: str | None = None,
        max_jobs: int = 1000,
        connection: AnyAsyncConnection = OWN,
    ) -> list[Job[Any]]:
        """Run failed jobs again, oldest first; return those that will run."""
        parameters = {"task": task_name(task), "queue": queue, "max_jobs": max_jobs, "after": None}
        rows = await self.client.call_async(sql.RETRY_FAILED, parameters, connection)
        return [Job(id, self.client) for id, _, error in rows if error is None]

    async def move_jobs_async(
        self,
        jobs: Iterable[int | HasId],
        queue: str,
        *,
        force: bool = False,
        connection: AnyAsyncConnection = OWN,
    ) -> None:
        """Move jobs to another queue.

        If some are refused, it moves the others, and raises the error of the first refused one.
        """
        parameters = {"ids": ids_of(jobs), "queue": queue, "force": force}
        check_outcomes(await self.client.call_async(sql.MOVE, parameters, connection))

    async def retry_jobs_async(
        self,
        jobs: Iterable[int | HasId],
        *,
        force: bool = False,
        connection: AnyAsyncConnection = OWN,
    ) -> None:
        """Run jobs again, as `Job.retry`. Raises as `move_jobs`."""
        parameters = {"ids": ids_of(jobs), "force": force, "from_step": None, "changes": None}
        check_outcomes(await self.client.call_async(sql.RETRY, parameters, connection))

    async def delete_jobs_async(
        self,
        jobs: Iterable[int | HasId],
        *,
        force: bool = False,
        connection: AnyAsyncConnection = OWN,
    ) -> None:
        """Remove jobs and every trace of them, as `Job.delete`. Raises as `move_jobs`."""
        parameters = {"ids": ids_of(jobs), "force": force}
        check_outcomes(await self.client.call_async(sql.DELETE, parameters, connection))

    async def fail_jobs_async(
        self,
        jobs: Iterable[int | HasId],
        message: str,
        *,
        connection: AnyAsyncConnection = OWN,
    ) -> None:
        """End jobs as failed for good, as `Job.fail`. Raises as `move_jobs`."""
        parameters = {"ids": ids_of(jobs), "message": message}
        check_outcomes(await self.client.call_async(sql.FAIL_JOBS, parameters, connection))

    async def done_jobs_async(
        self, jobs: Iterable[int | HasId], *, connection: AnyAsyncConnection = OWN
    ) -> None:
        """End jobs as succeeded, as `Job.done`. Raises as `move_jobs`."""
        rows = await self.client.call_async(sql.DONE, {"ids": ids_of(jobs)}, connection)
        check_outcomes(rows)

    async def prune_async(
        self,
        state: str | None = None,
        *,
        older_than: dt.timedelta | None = None,
        max_jobs: int = 1000,
        connection: AnyAsyncConnection = OWN,
    ) -> int:
        """Delete finished jobs whose retention is over; return their number.

        With `state` and `older_than`, delete the jobs in that state that ended at least so long
        ago, whatever their retention. One call deletes at most `max_jobs`, and never more than
        10,000: repeat it until it returns 0.
        """
        parameters = {
            "max_jobs": max_jobs,
            "state": state,
            "older_than": checked_interval("older_than", older_than),
        }
        ((jobs,),) = await self.client.call_async(sql.PRUNE, parameters, connection)
        return int(jobs)

# Generated from app_managing_async.py: change that, and run `make generate`.
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
from pgdefer.database.callers import OWN, AnyConnection
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

__all__ = ["Managing"]


class Managing(Registry):
    """Lists, queues, schedules and many jobs. Each call takes a `connection`, as deferring does."""

    # Reading

    def list_jobs(
        self,
        task: str | Task[..., Any] | None = None,
        *,
        queue: str | None = None,
        state: str | None = None,
        pattern: str | None = None,
        by: Literal["text", "path", "key"] = "text",
        before: int | None = None,
        max_jobs: int = 100,
        connection: AnyConnection = OWN,
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
        rows = self.client.call(sql.LIST_JOBS, parameters, connection)
        return [JobInfo(*row) for row in rows]

    def list_queues(self, *, connection: AnyConnection = OWN) -> list[QueueInfo]:
        """Return the queues, by name."""
        rows = self.client.call(sql.QUEUES, {}, connection)
        return [QueueInfo(*row) for row in rows]

    def list_tasks(self, *, connection: AnyConnection = OWN) -> list[TaskInfo]:
        """Return the tasks that are registered in the database, by name."""
        rows = self.client.call(sql.LIST_TASKS, {}, connection)
        return [with_json(TaskInfo, row) for row in rows]

    def list_locks(self, *, connection: AnyConnection = OWN) -> list[LockInfo]:
        """Return the locks of unfinished jobs, those with the most waiting jobs first."""
        rows = self.client.call(sql.LOCKS, {}, connection)
        return [LockInfo(*row) for row in rows]

    def list_limits(self, *, connection: AnyConnection = OWN) -> list[LimitInfo]:
        """Return the limits, and how much of each is in use."""
        rows = self.client.call(sql.SEMAPHORES, {}, connection)
        return [LimitInfo(*row) for row in rows]

    def list_shares(self, *, connection: AnyConnection = OWN) -> list[ShareInfo]:
        """Return the shares, by queue and priority."""
        rows = self.client.call(sql.SHARES, {}, connection)
        return [ShareInfo(*row) for row in rows]

    def list_groups(
        self, name: str | None = None, *, connection: AnyConnection = OWN
    ) -> list[GroupInfo]:
        """Return the groups, newest first; with `name`, only that one."""
        rows = self.client.call(sql.GROUPS, {"name": name}, connection)
        return [GroupInfo(*row) for row in rows]

    def list_workers(self, *, connection: AnyConnection = OWN) -> list[WorkerInfo]:
        """Return the workers, including those that have gone within the last minute."""
        rows = self.client.call(sql.LIST_WORKERS, {}, connection)
        return [with_json(WorkerInfo, row) for row in rows]

    def list_schedules(self, *, connection: AnyConnection = OWN) -> list[ScheduleInfo]:
        """Return the schedules, by name."""
        rows = self.client.call(sql.LIST_SCHEDULES, {}, connection)
        return [with_json(ScheduleInfo, row) for row in rows]

    def stats(self, *, connection: AnyConnection = OWN) -> list[TaskStats]:
        """Return the numbers of jobs, by queue and task."""
        rows = self.client.call(sql.TASK_STATS, {}, connection)
        return [TaskStats(*row) for row in rows]

    def health(self, *, connection: AnyConnection = OWN) -> list[HealthCheck]:
        """Return a row for each check of what may stop or slow the queue."""
        rows = self.client.call(sql.HEALTH, {}, connection)
        return [HealthCheck(*row) for row in rows]

    # Queues

    def pause(
        self,
        queue: str | None = None,
        *,
        task: str | Task[..., Any] | None = None,
        until: dt.datetime | None = None,
        connection: AnyConnection = OWN,
    ) -> int:
        """Stop jobs of a queue (a name, prefix* or *; None: all) or of a task from starting.

        This lasts until `resume`, or until the time `until`. Running jobs continue. Returns the
        number of affected jobs (unfinished and not running). Raises InvalidParameter if `until` is
        past, and WrongIsolation if the transaction is not READ COMMITTED. Until the transaction
        ends, workers admit no new jobs: keep it short.
        """
        at = checked_time("until", until)
        parameters = {"queue": queue, "task": task_name(task), "until": at}
        ((jobs,),) = self.client.call(sql.PAUSE, parameters, connection)
        return int(jobs)

    def resume(
        self,
        queue: str | None = None,
        *,
        task: str | Task[..., Any] | None = None,
        connection: AnyConnection = OWN,
    ) -> int:
        """End a pause: the latest call of `pause` or `resume` that matches a queue wins.

        Without a task it also ends the pauses of tasks on those queues; with a task, a pause of the
        queue stays. Returns and raises as `pause`.
        """
        parameters = {"queue": queue, "task": task_name(task)}
        ((jobs,),) = self.client.call(sql.RESUME, parameters, connection)
        return int(jobs)

    def create_queue(
        self, name: str, *, paused: bool = False, connection: AnyConnection = OWN
    ) -> bool:
        """Create a queue, as its first job would; return whether it is new. Raises as `pause`."""
        parameters = {"name": name, "paused": paused}
        ((is_new,),) = self.client.call(sql.CREATE_QUEUE, parameters, connection)
        return bool(is_new)

    def configure_queue(
        self, name: str, options: Mapping[str, Any], *, connection: AnyConnection = OWN
    ) -> None:
        """Set a queue's limits: `{"max_running": 2, "retain": timedelta(days=7)}`.

        A rate is `{"limit": 10, "per": timedelta(minutes=1)}`; intervals may be text, too. None
        removes a setting; settings that are left out stay as they are. The SQL function
        `queue.configure_queue` documents all of them. Raises as `pause`.
        """
        parameters = {"name": name, "options": settings_json(options)}
        self.client.call(sql.CONFIGURE_QUEUE, parameters, connection)

    def delete_queue(
        self, name: str, *, force: bool = False, connection: AnyConnection = OWN
    ) -> int:
        """Remove a queue with its settings and finished jobs; return how many jobs are removed.

        Raises QueueNotEmpty without `force` if it has unfinished jobs, or jobs that those of
        another queue need; with `force` these are removed too. Raises also as `pause`.
        """
        parameters = {"name": name, "force": force}
        ((jobs,),) = self.client.call(sql.DELETE_QUEUE, parameters, connection)
        return int(jobs)

    def configure_key(
        self, pattern: str, options: Mapping[str, Any], *, connection: AnyConnection = OWN
    ) -> None:
        """Set the limit and the rate of concurrency keys that match a name or prefix*.

        For example `{"limit": 2, "rate": {"limit": 10, "per": timedelta(minutes=1)}}`. They
        override the limits that jobs give. None removes a setting; settings that are left out stay
        as they are. Raises as `pause`.
        """
        parameters = {"pattern": pattern, "options": settings_json(options)}
        self.client.call(sql.CONFIGURE_KEY, parameters, connection)

    def configure_share(
        self, pattern: str, options: Mapping[str, Any], *, connection: AnyConnection = OWN
    ) -> None:
        """Set the weight of shares that match a name or prefix*: `{"weight": 3}`.

        None restores the default, 1. Raises as `pause`.
        """
        parameters = {"pattern": pattern, "options": settings_json(options)}
        self.client.call(sql.CONFIGURE_SHARE, parameters, connection)

    def unblock(self, *, connection: AnyConnection = OWN) -> int | None:
        """End the session that keeps others from admitting jobs; return its process id, or None.

        `health` says when that is needed: its check `admission` fails.
        """
        ((session,),) = self.client.call(sql.UNBLOCK, {}, connection)
        found: int | None = session
        return found

    # Schedules

    def schedule(
        self,
        name: str,
        cron: str,
        task: str | Task[..., Any],
        args: Mapping[str, Any] | None = None,
        *,
        timezone: str = "UTC",
        connection: AnyConnection = OWN,
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
        ((next_run,),) = self.client.call(sql.SCHEDULE_ONE, parameters, connection)
        found: dt.datetime | None = next_run
        return found

    def unschedule(self, name: str, *, connection: AnyConnection = OWN) -> bool:
        """Remove a schedule; return whether there was one."""
        ((was_there,),) = self.client.call(sql.UNSCHEDULE, {"name": name}, connection)
        return bool(was_there)

    def enable_schedule(
        self, name: str, enabled: bool = True, *, connection: AnyConnection = OWN
    ) -> dt.datetime | None:
        """Enable or disable a schedule; return its next run, None if it is disabled.

        Runs that it missed while it was disabled are skipped.
        """
        parameters = {"name": name, "enabled": enabled}
        ((next_run,),) = self.client.call(sql.ENABLE_SCHEDULE, parameters, connection)
        found: dt.datetime | None = next_run
        return found

    def next_runs(
        self,
        cron: str,
        *,
        timezone: str = "UTC",
        n: int = 5,
        connection: AnyConnection = OWN,
    ) -> list[dt.datetime]:
        """Return the next `n` runs of a cron expression, for example to show them in a form."""
        check_cron("the schedule", cron)
        check_text("timezone", timezone, "Europe/Berlin")
        parameters = {"cron": cron, "timezone": timezone, "n": n}
        rows = self.client.call(sql.NEXT_RUNS, parameters, connection)
        return [run_at for run_at, _ in rows]

    def run_now(self, name: str, *, connection: AnyConnection = OWN) -> Job[Any]:
        """Defer a job of a schedule now, in addition to its runs."""
        ((id,),) = self.client.call(sql.RUN_NOW, {"name": name}, connection)
        return Job(id, self.client)

    # Many jobs

    def retry_failed(
        self,
        task: str | Task[..., Any] | None = None,
        *,
        queue: str | None = None,
        max_jobs: int = 1000,
        connection: AnyConnection = OWN,
    ) -> list[Job[Any]]:
        """Run failed jobs again, oldest first; return those that will run."""
        parameters = {"task": task_name(task), "queue": queue, "max_jobs": max_jobs, "after": None}
        rows = self.client.call(sql.RETRY_FAILED, parameters, connection)
        return [Job(id, self.client) for id, _, error in rows if error is None]

    def move_jobs(
        self,
        jobs: Iterable[int | HasId],
        queue: str,
        *,
        force: bool = False,
        connection: AnyConnection = OWN,
    ) -> None:
        """Move jobs to another queue.

        If some are refused, it moves the others, and raises the error of the first refused one.
        """
        parameters = {"ids": ids_of(jobs), "queue": queue, "force": force}
        check_outcomes(self.client.call(sql.MOVE, parameters, connection))

    def retry_jobs(
        self,
        jobs: Iterable[int | HasId],
        *,
        force: bool = False,
        connection: AnyConnection = OWN,
    ) -> None:
        """Run jobs again, as `Job.retry`. Raises as `move_jobs`."""
        parameters = {"ids": ids_of(jobs), "force": force, "from_step": None, "changes": None}
        check_outcomes(self.client.call(sql.RETRY, parameters, connection))

    def delete_jobs(
        self,
        jobs: Iterable[int | HasId],
        *,
        force: bool = False,
        connection: AnyConnection = OWN,
    ) -> None:
        """Remove jobs and every trace of them, as `Job.delete`. Raises as `move_jobs`."""
        parameters = {"ids": ids_of(jobs), "force": force}
        check_outcomes(self.client.call(sql.DELETE, parameters, connection))

    def fail_jobs(
        self,
        jobs: Iterable[int | HasId],
        message: str,
        *,
        connection: AnyConnection = OWN,
    ) -> None:
        """End jobs as failed for good, as `Job.fail`. Raises as `move_jobs`."""
        parameters = {"ids": ids_of(jobs), "message": message}
        check_outcomes(self.client.call(sql.FAIL_JOBS, parameters, connection))

    def done_jobs(self, jobs: Iterable[int | HasId], *, connection: AnyConnection = OWN) -> None:
        """End jobs as succeeded, as `Job.done`. Raises as `move_jobs`."""
        rows = self.client.call(sql.DONE, {"ids": ids_of(jobs)}, connection)
        check_outcomes(rows)

    def prune(
        self,
        state: str | None = None,
        *,
        older_than: dt.timedelta | None = None,
        max_jobs: int = 1000,
        connection: AnyConnection = OWN,
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
        ((jobs,),) = self.client.call(sql.PRUNE, parameters, connection)
        return int(jobs)

"""The backend of `TASKS`, for Django 6: the queue defers and runs tasks made by `@task`.

Tests: contrib/test_django_tasks.py, contrib/test_django_own.py.
"""

# mypy: disable-error-code="type-arg"
# Tasks are generic for type checkers only.

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.tasks import Task, TaskResult
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
from django.tasks.signals import task_enqueued
from django.utils import timezone

from pgdefer.contrib.django import app
from pgdefer.contrib.django.models import Job
from pgdefer.contrib.django.results import JobResult, plain, result_of, status_of
from pgdefer.contrib.django.task_handlers import arguments_of, handler_of, parameters_of
from pgdefer.database import sql
from pgdefer.errors import DecodeError
from pgdefer.options import DeferOptions, defer_parameters, job_id
from pgdefer.tasks.deferral import deferring
from pgdefer.tasks.handling import HandlingOptions
from pgdefer.tasks.job import Job as DeferredJob
from pgdefer.tasks.prepared_job import PreparedJob

__all__ = ["PgDeferBackend", "PgDeferTask"]

# Django's own fields set these.
_OTHERWISE = frozenset({"queue", "priority", "scheduled_at"})
_OF_JOBS = frozenset(DeferOptions.__annotations__) - _OTHERWISE
_OF_TASKS = frozenset(HandlingOptions.__annotations__) | {"transactional"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, init=False)
class PgDeferTask(Task):
    """A Django task with the queue's options, such as `lock`, `retry` or `deadline`."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __init__(self, *, options: Mapping[str, Any] | None = None, **values: Any) -> None:
        own = {field.name for field in dataclasses.fields(Task)}
        more = {name: value for name, value in values.items() if name not in own}
        if unknown := sorted(more.keys() - _OF_JOBS - _OF_TASKS):
            raise TypeError(f"a task has no option {', '.join(unknown)}")
        object.__setattr__(self, "options", {**(options or {}), **more})
        Task.__init__(self, **{name: value for name, value in values.items() if name in own})
        backend = self.get_backend()
        if isinstance(backend, PgDeferBackend):
            backend.adopt(self)

    def using(self, **changes: Any) -> PgDeferTask:
        """Return the task with other options, including the queue's."""
        if unknown := sorted(changes.keys() & _OF_TASKS):
            raise TypeError(f"{', '.join(unknown)}: say it in the decorator, as workers must know")
        changes = {name: value for name, value in changes.items() if value is not None}
        after = changes.get("run_after")
        if isinstance(after, dt.timedelta):
            changes.update(run_after=None, delay=after)  # by the database's clock
        elif after is not None:  # in place of an earlier one
            changes["options"] = {k: v for k, v in self.options.items() if k != "delay"}
        return dataclasses.replace(self, **changes)

    def __hash__(self) -> int:
        return hash((self.module_path, self.queue_name, self.priority, self.run_after))


class PgDeferBackend(BaseTaskBackend):
    """Runs tasks as jobs. `enqueue` uses Django's connection, so it is part of `atomic()`."""

    task_class = PgDeferTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Any) -> None:
        super().__init__(alias, params)
        if self.options:
            raise ImproperlyConfigured("the queue's settings are in PGDEFER, not in OPTIONS")

    def validate_task(self, task: Task) -> None:
        """Refuse also a task of another backend: workers would not know its jobs."""
        super().validate_task(task)
        if not isinstance(task, PgDeferTask):
            raise InvalidTask(
                f"{task.module_path} is a task of another backend, which workers would not know: "
                f"declare it by @task(backend={self.alias!r})"
            )

    def adopt(self, task: Task) -> None:
        """Add a task to the project's App; the first task of a function sets its defaults."""
        known = app.tasks.get(task.module_path)
        if known is not None and getattr(known.function, "django_func", None) is task.func:
            return
        options = getattr(task, "options", {})
        defaults = {"queue": task.queue_name, "priority": int(task.priority), **options}
        app.task(name=task.module_path, **defaults)(handler_of(self, task))

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        """Defer a job. Raises TypeError for arguments that the task does not take."""
        self.validate_task(task)
        # As in Django, a result has its arguments in their JSON form.
        args, kwargs = plain(list(args)), plain(dict(kwargs))
        id, enqueued_at = _defer(self.prepared(task, args, kwargs))
        result = JobResult(
            task=task,
            id=str(id),
            status=status_of("ready"),
            enqueued_at=enqueued_at,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=copy.deepcopy(args),
            kwargs=copy.deepcopy(kwargs),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        task_enqueued.send(type(self), task_result=result)
        return result

    def prepared(self, task: Task, args: list[Any], kwargs: dict[str, Any]) -> PreparedJob[Any]:
        """Return the call to defer, with the options of `using`."""
        self.adopt(task)
        defaults = getattr(self.task_of(task.module_path), "options", {})
        options = {
            name: value
            for name, value in getattr(task, "options", {}).items()
            if name not in defaults or defaults[name] != value
        }
        run_after = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)
        if args:
            # So that a result says which ones were positional.
            options["headers"] = {**options.get("headers", {}), "positional": len(args)}
        options.update(queue=task.queue_name, priority=int(task.priority))
        if run_after is not None:
            options["scheduled_at"] = run_after
        named = parameters_of(task).bind(tuple(args), kwargs)
        return app.prepare(task.module_path, named, **options)

    def get_result(self, result_id: str) -> TaskResult:
        """Return the result of a task. Raises TaskResultDoesNotExist."""
        text = str(result_id)  # a pgdefer.Job has a number
        if not (text.isascii() and text.isdecimal()):
            raise TaskResultDoesNotExist(result_id)
        try:
            job = Job.objects.get(id=job_id(int(text)))
        except (ValueError, Job.DoesNotExist) as error:
            raise TaskResultDoesNotExist(result_id) from error
        known = self.task_of(job.task)
        if known is None:
            raise TaskResultDoesNotExist(result_id)
        changes = {"priority": job.priority, "queue_name": job.queue, "backend": self.alias}
        try:
            task: Task = dataclasses.replace(known, run_after=job.scheduled_at, **changes)
        except InvalidTask:  # an operator's change has made it invalid
            task = known
        try:
            given = arguments_of(known, job, app.client.codec)
        except (AttributeError, DecodeError, TypeError, ValueError):
            given = [], job.args  # as they are stored: a row may have gone, or SQL deferred the job
        return result_of(task, job, given, self.alias, app.client.codec)

    def task_of(self, name: str) -> Task | None:
        """Return a Django task by its path, None if it belongs to another backend."""
        try:
            found = app.get(name).function
        except LookupError:
            return None
        task: Task | None = getattr(found, "django_task", None)
        return task

    def check(self, **_options: Any) -> list[checks.CheckMessage]:
        """Check that the queue is an app of the project; that app has checks of its own."""
        if apps.is_installed("pgdefer.contrib.django"):
            return []
        hint = "Add pgdefer.contrib.django to INSTALLED_APPS."
        return [checks.Error("the queue is no app of this project", hint=hint, id="pgdefer.E005")]


def _defer(call: PreparedJob[Any]) -> tuple[int, dt.datetime]:
    """Defer a job; return its id, and the time at which the database did so."""
    with deferring(app.client, [call]) as deferral:
        parameters = defer_parameters(call.task, call.args, call.options) or {}
        ((id, at),) = app.client.call(sql.DEFER_WITH_TIME, parameters, tasks=[call.task])
        if deferral is not None:
            deferral.jobs.append(DeferredJob(id, app.client))
    return id, at if settings.USE_TZ else timezone.make_naive(at)

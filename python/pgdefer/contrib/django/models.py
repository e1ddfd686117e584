"""Models of the queue's views, only for reading: functions of schema `queue` change jobs.

Tests: contrib/test_django.py.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from django.contrib.postgres.fields import ArrayField
from django.core.checks import CheckMessage
from django.db import models

from pgdefer import options
from pgdefer.codec import is_deep
from pgdefer.contrib.django import conf
from pgdefer.database.source import FIRST, LAST
from pgdefer.errors import PgDeferError

__all__ = [
    "Attempt",
    "Job",
    "Lock",
    "Queue",
    "ReadOnly",
    "Schedule",
    "ScheduleRun",
    "Semaphore",
    "Task",
    "Worker",
]


# JSON with more levels is given as text.
LEVELS = 500


class ReadOnly(PgDeferError):  # noqa: N818 (as the others)
    """The models are views: nothing can be written through them."""


class Moment(models.DateTimeField):  # type: ignore[type-arg]
    """A time that may be infinite. A datetime can't be; infinity is read as the year 1 or 9999."""

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        """Let the database put the value within the years that Python supports."""
        del compiler
        first, last = (f"timestamptz '{moment.isoformat()}'" for moment in (FIRST, LAST))
        return f"case when {sql} is not null then least(greatest({sql}, {first}), {last}) end", [
            *params,
            *params,
        ]


class List(ArrayField):  # type: ignore[type-arg]
    """An array that is only read: the project need not have `django.contrib.postgres`."""

    def check(self, **options: Any) -> list[CheckMessage]:
        """Do not require that app, which is for forms and migrations of arrays."""
        return [found for found in super().check(**options) if found.id != "postgres.E005"]


class Json(models.JSONField):
    """JSON of any client. What Python can't read is given as text: huge numbers, deep nesting."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return the value, or its text."""
        try:
            found = super().from_db_value(value, expression, connection)
        except (RecursionError, ValueError):
            return value
        # deeper in the stack, in a template, Python could not write what it has read
        return value if is_deep(found, LEVELS) else found


class ViewRows(models.QuerySet[Any]):
    """Rows of a view, only for reading."""

    def update(self, **_values: Any) -> NoReturn:
        """Raise ReadOnly."""
        _refuse(self.model)

    def delete(self) -> NoReturn:
        """Raise ReadOnly."""
        _refuse(self.model)

    def bulk_create(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise ReadOnly."""
        _refuse(self.model)

    def bulk_update(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise ReadOnly."""
        _refuse(self.model)


class ViewManager(models.Manager[Any]):
    """Reads from the database that the settings name, unless told otherwise."""

    _queryset_class = ViewRows

    def get_queryset(self) -> models.QuerySet[Any]:
        """Return the view's rows."""
        return super().get_queryset().using(self._db or conf.read().DATABASE)


class View(models.Model):
    """A row of a view."""

    objects = ViewManager()

    class Meta:
        abstract = True
        managed = False
        base_manager_name = "objects"

    def save(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise ReadOnly."""
        _refuse(type(self))

    def delete(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise ReadOnly."""
        _refuse(type(self))


def _refuse(model: type[models.Model]) -> NoReturn:
    raise ReadOnly(
        f"{model._meta.db_table} is a view of the queue's and can't be written",
        hint="Change jobs by app.job(id).cancel() and its like.",
    )


def _to(model: str, column: str, related: str = "+") -> Any:
    """Return a relation without a constraint in the database: the row may have gone."""
    return models.ForeignKey(
        model,
        models.DO_NOTHING,
        db_column=column,
        db_constraint=False,
        null=True,
        related_name=related,
    )


class Job(View):
    """A job, in its state as far as the database knows it."""

    STATES: ClassVar[tuple[str, ...]] = options.STATES

    id = models.BigIntegerField(primary_key=True)
    task = models.TextField()
    queue = models.TextField()
    state = models.TextField(choices=[(state, state) for state in STATES])
    reason = models.TextField(null=True)
    args = Json()
    priority = models.IntegerField()
    lock = models.TextField(null=True)
    queueing_lock = models.TextField(null=True)
    concurrency_key = models.TextField(null=True)
    needs = List(models.BigIntegerField(), null=True)
    deadline = Moment(null=True)
    scheduled_at = Moment(null=True)
    expires_at = Moment(null=True)
    created_at = Moment()
    started_at = Moment(null=True)
    finished_at = Moment(null=True)
    attempts = models.IntegerField()
    failures = models.IntegerField()
    crashes = models.IntegerField()
    claims = models.IntegerField()
    claim = models.BigIntegerField(null=True)
    worker = _to("Worker", "worker_id", "jobs")
    error = models.TextField(null=True)
    result = Json(null=True)
    description = models.TextField(null=True)
    headers = Json(null=True)
    parent = _to("self", "parent", "children")
    progress = models.IntegerField()
    options = Json(null=True)

    class Meta(View.Meta):
        db_table = '"queue"."jobs"'
        # Of the admin; of everything else the database decides.
        permissions = (("view_sensitive_args", "Can view sensitive args"),)

    def __str__(self) -> str:
        return f"{self.task} {self.id}"


class Attempt(View):
    """An attempt that did not succeed."""

    claim = models.BigIntegerField(primary_key=True)
    job = _to("Job", "job_id", "history")
    attempt = models.IntegerField()
    worker = _to("Worker", "worker_id")
    started_at = Moment()
    finished_at = Moment()
    outcome = models.TextField()
    error = models.TextField(null=True)
    details = Json(null=True)

    class Meta(View.Meta):
        db_table = '"queue"."attempts"'

    def __str__(self) -> str:
        return f"{self.attempt}: {self.outcome}"

    def detail(self, name: str) -> Any:
        """Return a part of the details, None if there is none."""
        return self.details.get(name) if isinstance(self.details, dict) else None


class Worker(View):
    """A registered worker, or one that has gone within the last minute."""

    id = models.BigIntegerField(primary_key=True)
    name = models.TextField()
    queues = List(models.TextField(), null=True)
    info = Json()
    registered_at = Moment()
    last_seen_at = Moment()
    dead_after = models.DurationField()
    is_alive = models.BooleanField()
    running = models.IntegerField()
    memory = models.BigIntegerField(null=True)
    has_left = models.BooleanField()

    class Meta(View.Meta):
        db_table = '"queue"."workers"'

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"


class Task(View):
    """A registered task, its defaults, and the queues in which it is paused."""

    name = models.TextField(primary_key=True)
    defaults = Json()
    paused_in = List(models.TextField())

    class Meta(View.Meta):
        db_table = '"queue"."tasks"'

    def __str__(self) -> str:
        return self.name


class Queue(View):
    """A queue that is configured, has had ready jobs, or has jobs that are not admitted yet."""

    name = models.TextField(primary_key=True)
    created_at = Moment(null=True)
    max_running = models.IntegerField(null=True)
    rate_limit = models.IntegerField(null=True)
    rate_per = models.DurationField(null=True)
    retain = models.DurationField(null=True)
    ready = models.BigIntegerField()
    running = models.BigIntegerField()
    paused_until = Moment(null=True)

    class Meta(View.Meta):
        db_table = '"queue"."queues"'

    def __str__(self) -> str:
        return self.name


class Lock(View):
    """A lock with unfinished jobs."""

    lock = models.TextField(primary_key=True)
    job = _to("Job", "job_id")
    running = models.IntegerField()
    waiting = models.IntegerField()
    has_mutex = models.BooleanField()

    class Meta(View.Meta):
        db_table = '"queue"."locks"'

    def __str__(self) -> str:
        return self.lock


class Semaphore(View):
    """A limit of a concurrency key, a mutex lock or a queue; its `key` is unique in its `kind`."""

    key = models.TextField(primary_key=True)
    kind = models.TextField()
    limit = models.IntegerField()
    used = models.IntegerField()
    ready = models.IntegerField()
    waiting = models.IntegerField()

    class Meta(View.Meta):
        db_table = '"queue"."semaphores"'

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


class Schedule(View):
    """A recurring run."""

    name = models.TextField(primary_key=True)
    cron = models.TextField()
    timezone = models.TextField()
    task = models.TextField()
    args = Json()
    options = Json()
    enabled = models.BooleanField()
    next_run_at = Moment(null=True)
    last_run_at = Moment(null=True)
    last_job = _to("Job", "last_job_id")
    reason = models.TextField(null=True)
    catch_up = models.TextField()
    max_delay = models.DurationField(null=True)
    overlap = models.TextField()
    source = models.TextField(null=True)
    created_at = Moment()
    changed_at = Moment()

    class Meta(View.Meta):
        db_table = '"queue"."schedules"'

    def __str__(self) -> str:
        return self.name


class ScheduleRun(View):
    """One run of a schedule: its job, or why it was skipped. `run_at` is unique in a schedule."""

    run_at = Moment(primary_key=True)
    schedule = _to("Schedule", "name", "runs")
    job = _to("Job", "job_id")
    skipped = models.TextField(null=True)
    detail = models.TextField(null=True)
    manual = models.BooleanField()
    decided_at = Moment()

    class Meta(View.Meta):
        db_table = '"queue"."schedule_runs"'

    def __str__(self) -> str:
        return f"{self.schedule_id} {self.run_at}"

"""The public views as SQLAlchemy models, to read.

The models have their own metadata, separate from the application's. They are read-only: only the
functions of schema `queue` change jobs. docs/reference.md explains the columns.

    with Session(engine) as session:
        for job in session.scalars(select(Job).where(Job.state == "failed").limit(10)):
            print(job.task, job.error, [attempt.outcome for attempt in job.history])
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
from typing import Annotated, Any, ClassVar, NoReturn

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects.postgresql import ARRAY, INTERVAL, JSONB
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Mapper,
    ORMExecuteState,
    Session,
    foreign,
    mapped_column,
    relationship,
    remote,
)

from pgdefer.database.source import FIRST, LAST
from pgdefer.errors import PgDeferError

__all__ = [
    "LAST",
    "Attempt",
    "Audit",
    "Base",
    "Group",
    "Job",
    "Lock",
    "Metrics",
    "Minute",
    "Queue",
    "ReadOnly",
    "Schedule",
    "ScheduleRun",
    "Semaphore",
    "Share",
    "Step",
    "Task",
    "Worker",
]


class ReadOnly(PgDeferError):  # noqa: N818 (as the others)
    """The models are views; nothing can be written through them."""


class _Endless(sa.types.TypeDecorator[dt.datetime]):
    """A timestamptz that may be infinite. No datetime can hold that, so it is read as LAST."""

    impl = sa.TIMESTAMP(timezone=True)
    cache_ok = True

    def column_expression(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        raw = sa.type_coerce(column, self.impl_instance)
        first, last = (
            sa.literal_column(f"timestamptz '{moment.isoformat()}'", self.impl_instance)
            for moment in (FIRST, LAST)
        )
        return sa.case((raw > last, last), (raw < first, first), else_=raw)


class _JsonText(sa.types.TypeDecorator[Any]):
    """JSON that was fetched as text."""

    impl = sa.Text
    cache_ok = True

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        if value is None:
            return None
        loads = getattr(dialect, "_json_deserializer", None) or json.loads  # the engine's
        try:
            return loads(value)
        except (RecursionError, ValueError):
            return value


class _Json(sa.types.TypeDecorator[Any]):
    """JSON of any client. What Python can't read is given as text: huge numbers, deep nesting.

    It is fetched as text, because a driver would fail before the value gets here. Where the
    statement does not let it be, as one in the application's own text, the driver reads it.
    """

    impl = JSONB
    cache_ok = True

    def column_expression(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.type_coerce(sa.cast(column, sa.Text), _JsonText())

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        return self.impl_instance.coerce_compared_value(op, value)


_Int = Annotated[int, mapped_column(sa.Integer)]
_Until = Annotated[dt.datetime, mapped_column(_Endless)]


class Base(DeclarativeBase):
    """The base of the models; its metadata has only these, in schema `queue`."""

    metadata = sa.MetaData(schema="queue")
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: sa.BigInteger,
        str: sa.Text,
        dt.datetime: sa.TIMESTAMP(timezone=True),
        dt.timedelta: INTERVAL,
        dict[str, Any]: _Json,
        list[int]: ARRAY(sa.BigInteger),
        list[str]: ARRAY(sa.Text),
    }

    def __repr__(self) -> str:
        state = sa.inspect(self)
        names = [state.mapper.get_property_by_column(c).key for c in state.mapper.primary_key]
        values = state.identity or [state.dict.get(name) for name in names]
        key = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        return f"{type(self).__name__}({key})"


class Job(Base):
    """A job that has not been removed, with its state as far as it is known."""

    __tablename__ = "jobs"

    id: Mapped[int] = mapped_column(primary_key=True)
    task: Mapped[str]
    queue: Mapped[str]
    state: Mapped[str]
    reason: Mapped[str | None]
    args: Mapped[dict[str, Any]]
    priority: Mapped[_Int]
    lock: Mapped[str | None]
    queueing_lock: Mapped[str | None]
    concurrency_key: Mapped[str | None]
    needs: Mapped[list[int] | None]
    deadline: Mapped[_Until | None]
    scheduled_at: Mapped[dt.datetime | None]
    expires_at: Mapped[_Until | None]
    created_at: Mapped[dt.datetime]
    started_at: Mapped[dt.datetime | None]
    finished_at: Mapped[dt.datetime | None]
    attempts: Mapped[_Int]
    failures: Mapped[_Int]
    crashes: Mapped[_Int]
    claims: Mapped[_Int]
    claim: Mapped[int | None]
    worker_id: Mapped[int | None]
    error: Mapped[str | None]
    result: Mapped[Any | None] = mapped_column(_Json)
    description: Mapped[str | None]
    headers: Mapped[dict[str, Any] | None]
    parent: Mapped[int | None]
    idempotency_key: Mapped[str | None]
    progress: Mapped[_Int]
    percent: Mapped[decimal.Decimal | None]
    message: Mapped[str | None]
    options: Mapped[dict[str, Any] | None]

    #: The attempts that did not succeed, in order; `attempts` is the number of all attempts.
    history: Mapped[list[Attempt]] = relationship(
        primaryjoin=lambda: Job.id == foreign(Attempt.job_id),
        order_by=lambda: Attempt.claim,
        back_populates="job",
        viewonly=True,
    )
    #: The jobs of `needs` that have not been removed, by id.
    needed_jobs: Mapped[list[Job]] = relationship(
        primaryjoin=lambda: remote(Job.id) == sa.any_(foreign(Job.needs)),
        order_by=lambda: Job.id,
        uselist=True,
        viewonly=True,
    )
    #: The job of `parent`, if it has not been removed.
    parent_job: Mapped[Job | None] = relationship(
        primaryjoin=lambda: remote(Job.id) == foreign(Job.parent), viewonly=True
    )
    #: The worker that runs it or ended it; None also if it left more than a minute ago.
    worker: Mapped[Worker | None] = relationship(
        primaryjoin=lambda: foreign(Job.worker_id) == Worker.id, viewonly=True
    )


class Attempt(Base):
    """An attempt that did not succeed."""

    __tablename__ = "attempts"

    job_id: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[_Int]
    claim: Mapped[int] = mapped_column(primary_key=True)
    worker_id: Mapped[int | None]
    started_at: Mapped[dt.datetime]
    finished_at: Mapped[dt.datetime]
    outcome: Mapped[str]
    error: Mapped[str | None]
    details: Mapped[Any | None] = mapped_column(_Json)

    job: Mapped[Job | None] = relationship(
        primaryjoin=lambda: foreign(Attempt.job_id) == Job.id,
        back_populates="history",
        viewonly=True,
    )
    #: None also if the worker left more than a minute ago.
    worker: Mapped[Worker | None] = relationship(
        primaryjoin=lambda: foreign(Attempt.worker_id) == Worker.id, viewonly=True
    )


class Step(Base):
    """A finished step of a durable job."""

    __tablename__ = "steps"

    job_id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[Any | None] = mapped_column(_Json)
    fingerprint: Mapped[str | None]
    claim: Mapped[int]
    finished_at: Mapped[dt.datetime]
    failures: Mapped[_Int]
    error: Mapped[str | None]


class Worker(Base):
    """A registered worker, or one that has left within the last minute."""

    __tablename__ = "workers"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    queues: Mapped[list[str] | None]
    info: Mapped[dict[str, Any]]
    registered_at: Mapped[dt.datetime]
    last_seen_at: Mapped[dt.datetime]
    dead_after: Mapped[dt.timedelta]
    is_alive: Mapped[bool]
    running: Mapped[_Int]
    memory: Mapped[int | None]
    has_left: Mapped[bool]


class Task(Base):
    """A registered task, its defaults, and the queues in which it is paused."""

    __tablename__ = "tasks"

    name: Mapped[str] = mapped_column(primary_key=True)
    defaults: Mapped[dict[str, Any]]
    paused_in: Mapped[list[str]]


class Audit(Base):
    """A call that changed something."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[dt.datetime]
    role: Mapped[str]
    login: Mapped[str]
    call: Mapped[str]
    args: Mapped[dict[str, Any]]
    ids: Mapped[list[int] | None]
    queues: Mapped[list[str] | None]
    before: Mapped[Any | None] = mapped_column(_Json)


class Queue(Base):
    """A queue that is configured, has unfinished jobs, or has had ready ones."""

    __tablename__ = "queues"

    name: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[dt.datetime | None]
    max_running: Mapped[_Int | None]
    rate_limit: Mapped[_Int | None]
    rate_per: Mapped[dt.timedelta | None]
    retain: Mapped[dt.timedelta | None]
    ready: Mapped[int]
    running: Mapped[int]
    #: LAST if it is paused until somebody resumes it.
    paused_until: Mapped[_Until | None]


class Metrics(Base):
    """A queue's figures, for exporters."""

    __tablename__ = "metrics"

    queue: Mapped[str] = mapped_column(primary_key=True)
    paused: Mapped[_Int]
    scheduled: Mapped[int]
    waiting: Mapped[int]
    upstream_failed: Mapped[int]
    blocked: Mapped[int]
    ready: Mapped[int]
    running: Mapped[int]
    held: Mapped[int]
    failed: Mapped[int]
    oldest_ready_seconds: Mapped[float] = mapped_column(sa.Double)
    succeeded_5m: Mapped[int]
    failed_5m: Mapped[int]
    cancelled_5m: Mapped[int]
    workers: Mapped[int]


class Lock(Base):
    """A lock with unfinished jobs."""

    __tablename__ = "locks"

    lock: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[int]
    running: Mapped[_Int]
    waiting: Mapped[_Int]
    has_mutex: Mapped[bool]

    #: The job that runs, or is the next.
    job: Mapped[Job | None] = relationship(
        primaryjoin=lambda: foreign(Lock.job_id) == Job.id, viewonly=True
    )


class Semaphore(Base):
    """A limit of a concurrency key, a mutex lock or a queue, and its use."""

    __tablename__ = "semaphores"

    kind: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    limit: Mapped[_Int | None]
    used: Mapped[_Int]
    ready: Mapped[_Int]
    waiting: Mapped[_Int]
    rate_limit: Mapped[_Int | None]
    rate_per: Mapped[dt.timedelta | None]


class Share(Base):
    """A share that takes turns in a queue and priority; an empty one is that of all other jobs."""

    __tablename__ = "shares"

    queue: Mapped[str] = mapped_column(primary_key=True)
    priority: Mapped[_Int] = mapped_column(primary_key=True)
    share: Mapped[str] = mapped_column(primary_key=True)
    weight: Mapped[float] = mapped_column(sa.Double)
    waiting: Mapped[int]
    started: Mapped[int]


class Minute(Base):
    """How many jobs of a queue and task ended in a minute; `failures` counts their attempts."""

    __tablename__ = "minutes"

    minute: Mapped[dt.datetime] = mapped_column(primary_key=True)
    queue: Mapped[str] = mapped_column(primary_key=True)
    task: Mapped[str] = mapped_column(primary_key=True)
    succeeded: Mapped[_Int]
    failed: Mapped[_Int]
    cancelled: Mapped[_Int]
    failures: Mapped[_Int]


class Group(Base):
    """A group of jobs."""

    __tablename__ = "groups"

    name: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    jobs: Mapped[_Int]
    unfinished: Mapped[_Int]
    succeeded: Mapped[_Int]
    failed: Mapped[_Int]
    cancelled: Mapped[_Int]
    on_end_id: Mapped[int | None]
    on_success_id: Mapped[int | None]
    on_failure_id: Mapped[int | None]
    error: Mapped[str | None]
    opened_at: Mapped[dt.datetime]
    closed_at: Mapped[dt.datetime | None]
    ended_at: Mapped[dt.datetime | None]


class Schedule(Base):
    """A schedule."""

    __tablename__ = "schedules"

    name: Mapped[str] = mapped_column(primary_key=True)
    cron: Mapped[str]
    timezone: Mapped[str]
    task: Mapped[str]
    args: Mapped[dict[str, Any]]
    options: Mapped[dict[str, Any]]
    enabled: Mapped[bool]
    next_run_at: Mapped[dt.datetime | None]
    last_run_at: Mapped[dt.datetime | None]
    last_job_id: Mapped[int | None]
    reason: Mapped[str | None]
    catch_up: Mapped[str]
    max_delay: Mapped[dt.timedelta | None]
    overlap: Mapped[str]
    source: Mapped[str | None]
    created_at: Mapped[dt.datetime]
    changed_at: Mapped[dt.datetime]

    #: Its last runs, in order.
    runs: Mapped[list[ScheduleRun]] = relationship(
        primaryjoin=lambda: Schedule.name == foreign(ScheduleRun.name),
        order_by=lambda: ScheduleRun.run_at,
        back_populates="schedule",
        viewonly=True,
    )
    last_job: Mapped[Job | None] = relationship(
        primaryjoin=lambda: foreign(Schedule.last_job_id) == Job.id, viewonly=True
    )


class ScheduleRun(Base):
    """One run of a schedule: its job, or why it was skipped."""

    __tablename__ = "schedule_runs"

    name: Mapped[str] = mapped_column(primary_key=True)
    run_at: Mapped[dt.datetime] = mapped_column(primary_key=True)
    job_id: Mapped[int | None]
    skipped: Mapped[str | None]
    detail: Mapped[str | None]
    manual: Mapped[bool]
    decided_at: Mapped[dt.datetime]

    schedule: Mapped[Schedule | None] = relationship(
        primaryjoin=lambda: foreign(ScheduleRun.name) == Schedule.name,
        back_populates="runs",
        viewonly=True,
    )
    job: Mapped[Job | None] = relationship(
        primaryjoin=lambda: foreign(ScheduleRun.job_id) == Job.id, viewonly=True
    )


def _refuse(name: str) -> NoReturn:
    raise ReadOnly(
        f"{name} is a view of the queue's and can't be written",
        hint="Defer with task.defer or queue.defer, and change jobs with the functions of "
        "schema queue.",
    )


@event.listens_for(Base, "before_insert", propagate=True)
@event.listens_for(Base, "before_update", propagate=True)
@event.listens_for(Base, "before_delete", propagate=True)
def _refuse_flush(mapper: Mapper[Any], _connection: sa.Connection, _target: object) -> None:
    _refuse(mapper.class_.__name__)


# On every session, because only there SQLAlchemy reports INSERT, UPDATE and DELETE statements.
@event.listens_for(Session, "do_orm_execute")
def _refuse_statement(state: ORMExecuteState) -> None:
    if state.is_insert or state.is_update or state.is_delete:
        table = getattr(state.statement, "table", None)
        if table is not None and getattr(table, "metadata", None) is Base.metadata:
            _refuse(table.fullname)


@event.listens_for(Base.metadata, "before_create")
@event.listens_for(Base.metadata, "before_drop")
def _refuse_ddl(_target: sa.MetaData, _connection: sa.Connection, **_options: object) -> None:
    raise ReadOnly("these tables are views of the queue's", hint="Make them with queue.install().")

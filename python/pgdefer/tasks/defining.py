"""Defining tasks and schedules: the common part of an App and a Blueprint.

Tests: unit/test_task.py, integration/test_wrong_usages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload

from pgdefer.options import RecurringOptions
from pgdefer.tasks.decorators import (
    BatchDecorator,
    ConnectionDecorator,
    RecurringDecorator,
    SessionDecorator,
    TaskDecorator,
)
from pgdefer.tasks.registry import Registry
from pgdefer.tasks.task import AllTaskOptions, AsyncTask, SyncTask

if TYPE_CHECKING:
    import sqlalchemy.ext.asyncio as sa_async
    import sqlalchemy.orm as sa_orm

__all__ = ["Defining"]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class Defining(Registry):
    """The decorators of tasks and schedules."""

    #: Options of all tasks; a task's own options override them.
    defaults: Mapping[str, Any]

    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        *,
        transactional: Literal[True],
        name: str | None = None,
        **options: Unpack[AllTaskOptions],
    ) -> ConnectionDecorator: ...
    @overload
    def task(
        self,
        *,
        transactional: sa_orm.sessionmaker[Any] | sa_async.async_sessionmaker[Any],
        name: str | None = None,
        **options: Unpack[AllTaskOptions],
    ) -> SessionDecorator: ...
    @overload
    def task(
        self,
        *,
        batch: int,
        batch_of: Callable[P, A],
        name: str | None = None,
        **options: Unpack[AllTaskOptions],
    ) -> BatchDecorator[P, A]: ...
    @overload
    def task(
        self, *, batch: int, name: str | None = None, **options: Unpack[AllTaskOptions]
    ) -> BatchDecorator[..., dict[str, Any]]: ...
    @overload
    def task(
        self, *, name: str | None = None, **options: Unpack[AllTaskOptions]
    ) -> TaskDecorator: ...
    def task(  # type: ignore[misc]
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        **options: Any,
    ) -> object:
        """Make a function a task. Its name is `name`, or else that of its module and its own.

        The options are registered in the database as the task's defaults, so that jobs deferred
        by SQL have them too. `lock`, `queueing_lock` and `concurrency_key` may contain `{field}`,
        filled from the arguments; `{{` and `}}` are braces. `HandlingOptions` are not registered:
        only the worker uses them.

        With `transactional=True` the handler's first parameter, which is not an argument of the
        job, is a psycopg connection. The handler's writes on it and the end of the job are one
        transaction: both commit or neither. With a `sessionmaker` or `async_sessionmaker` in place
        of True, the parameter is a SQLAlchemy session. Returning or raising RetryLater commits,
        too; any other exception rolls back.

        With `batch=100` the handler's parameter is a list of up to 100 jobs (`BatchJob`), which it
        runs at once. The jobs take any arguments by name, and `job.args` is a dict. With
        `batch_of`, a class such as a dataclass, they take its arguments, and `job.args` is an
        object of that class. The handler returns None (all have succeeded), a list with an outcome
        for each job, or a dict of outcomes by job or id. An outcome is a result, or an exception
        for that job alone. If the handler raises, all jobs of the batch get that exception.
        """
        decorator = TaskDecorator(self, name, {**self.defaults, **options})
        return decorator if function is None else decorator(function)

    def recurring(
        self,
        cron: str,
        *,
        timezone: str = "UTC",
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        **options: Unpack[RecurringOptions],
    ) -> RecurringDecorator:
        """Defer the task at each run of a cron expression in a time zone.

        Put it above `@app.task`, or in its place; one task may have several. Workers register the
        schedules when they start. A schedule's name is `name`, or else that of its task; the others
        of a task are `task#2`, `task#3` and so on, from the lowest decorator up. A handler with a
        parameter `scheduled_for` receives the time of the run; `current_job().scheduled_for` has it
        too.
        """
        return RecurringDecorator(
            self,
            self.defaults,
            cron=cron,
            timezone=timezone,
            name=name,
            args=args,
            options=options,
        )

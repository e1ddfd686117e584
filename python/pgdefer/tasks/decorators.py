"""The decorators `App.task(...)` and `App.recurring(...)`.

Tests: unit/test_task.py, unit/test_recurring.py.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import psycopg

from pgdefer.checks import check_text
from pgdefer.errors import Naming
from pgdefer.options import JobOptions, RecurringOptions, checked_mapping
from pgdefer.tasks.batch import BatchJob
from pgdefer.tasks.option_checks import check_cron, check_options
from pgdefer.tasks.registry import DjangoTask, Registry, name_of, task_of
from pgdefer.tasks.schedule import Schedule
from pgdefer.tasks.task import AsyncTask, SyncTask, Task

if TYPE_CHECKING:
    import sqlalchemy.ext.asyncio as sa_async
    import sqlalchemy.orm as sa_orm

__all__ = [
    "BatchDecorator",
    "ConnectionDecorator",
    "RecurringDecorator",
    "SessionDecorator",
    "TaskDecorator",
]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
D = TypeVar("D", bound=DjangoTask)


class BatchDecorator(Protocol[P, A]):
    """The decorator `App.task(batch=...)`. P: a job's parameters; A: the type of `job.args`."""

    @overload
    def __call__(
        self, function: Callable[[list[BatchJob[A]]], Coroutine[Any, Any, Any]], /
    ) -> AsyncTask[P, Any]: ...
    @overload
    def __call__(self, function: Callable[[list[BatchJob[A]]], Any], /) -> SyncTask[P, Any]: ...


class ConnectionDecorator(Protocol):
    """The decorator `App.task(transactional=True)`."""

    @overload
    def __call__(
        self,
        function: Callable[Concatenate[psycopg.AsyncConnection[Any], P], Coroutine[Any, Any, R]],
        /,
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[psycopg.Connection[Any], P], R], /
    ) -> SyncTask[P, R]: ...


class SessionDecorator(Protocol):
    """The decorator `App.task(transactional=sessionmaker)`."""

    @overload
    def __call__(
        self,
        function: Callable[Concatenate[sa_async.AsyncSession, P], Coroutine[Any, Any, R]],
        /,
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[sa_orm.Session, P], R], /
    ) -> SyncTask[P, R]: ...


class TaskDecorator:
    """The decorator `App.task(...)`."""

    def __init__(self, registry: Registry, name: str | None, options: Mapping[str, Any]) -> None:
        if name is not None:
            check_text("the name of a task", name, "mail.send")
        self._registry = registry
        self._name = name
        self._options = options

    # A coroutine function is also a function, so the overloads overlap.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]:
        """Make the task."""
        given: Any = function
        is_plain = hasattr(given, "__qualname__")
        name = self._name or (name_of(function) if is_plain else repr(function))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"the task {name!r} is a generator, whose code nobody would run: "
                "replace `yield` by `return`, or defer further jobs"
            )
        if not is_plain or isinstance(given, type):
            raise TypeError(f"a task must be a function, not {function!r}: {_instead_of(given)}")
        kind: type[Task[..., Any]] = (
            AsyncTask if inspect.iscoroutinefunction(function) else SyncTask
        )
        with Naming(f"the task {name!r}"):
            task = kind(self._registry.client, function, name, self._options)
        return self._registry.add(task)


def _instead_of(given: object) -> str:
    """Say what to write instead of a task that is no function."""
    if isinstance(given, str):
        return f"write name={given!r}"
    return "put @app.recurring above @app.task" if isinstance(given, Task) else "write a `def`"


class RecurringDecorator:
    """The decorator `App.recurring(...)`."""

    def __init__(
        self,
        registry: Registry,
        defaults: Mapping[str, Any],
        *,
        cron: Any,
        timezone: str,
        name: str | None,
        args: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        if not isinstance(cron, str):  # such as the function below a bare `@app.recurring`
            check_cron("the schedule", cron)
        self._registry = registry
        self._defaults = defaults
        self._cron = cron
        self._timezone = timezone
        self._name = name
        self._args = {} if args is None else args
        self._options = options

    # As above; and a task is a function, too.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: D, /) -> D: ...
    def __call__(self, function: Any, /) -> Any:
        """Record the schedule; make the function a task if it is not one yet."""
        known = task_of(self._registry, function)
        task = known or TaskDecorator(self._registry, None, self._defaults)(function)
        what = f"the schedule of the task {task.name!r}"
        with Naming(what):
            self._schedule(what, task)
        return task if known is None else function

    def _schedule(self, what: str, task: Task[..., Any]) -> None:
        """Record the schedule of a task."""
        bound = task.parameters.bind_run(checked_mapping("args", self._args))
        check_cron(what, self._cron)
        check_text("timezone", self._timezone, "Europe/Berlin")
        if self._name is not None:
            check_text("name", self._name, "nightly")
        check_options(what, self._options, RecurringOptions, besides=("args", "name", "timezone"))
        schedule = Schedule(
            name=self._name or task.name,
            cron=self._cron,
            timezone=self._timezone,
            task=task.name,
            args=self._registry.client.codec.dumps_args(bound),
            options=JobOptions.of(self._options).defaults(),
        )
        taken, number = self._registry.schedules, 1
        while taken.get(schedule.name, schedule) != schedule:
            if self._name is not None:
                raise ValueError(f"there are two schedules named {self._name!r}")
            number += 1
            schedule = dataclasses.replace(schedule, name=f"{task.name}#{number}")
        taken[schedule.name] = schedule

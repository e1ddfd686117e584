"""The tasks and the schedules that a program defines.

Tests: unit/test_task.py, integration/test_recurring.py.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import psycopg

from pgdefer._text import logger
from pgdefer.checks import check_texts
from pgdefer.client.client import Client, client_here
from pgdefer.database import sql
from pgdefer.database.execute_async import execute_async
from pgdefer.database.source import AsyncPsycopgConnection
from pgdefer.errors import InvalidParameter, Naming, UnknownTask
from pgdefer.options import as_list
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.schedule import Schedule, removed_schedules, schedules_json
from pgdefer.tasks.task import Task

__all__ = ["DjangoTask", "Registry", "check_names", "module_name", "name_of", "task_of"]

log = logger("pgdefer")

T = TypeVar("T", bound="Task[..., Any]")


class DjangoTask(Protocol):
    """A task made by Django's `@task`, whose path is its name here."""

    @property
    def module_path(self) -> str:
        """The name of its module, a dot, and its own name."""


def name_of(function: Callable[..., Any]) -> str:
    """Return a task's default name, its module and name: the same in every process."""
    return f"{module_name(function.__module__)}.{function.__qualname__}"


def check_names(
    tasks: Mapping[str, Task[..., Any]], task: Task[..., Any], names: Sequence[str]
) -> None:
    """Raise ValueError if another task has one of the names that this one is to have."""
    for name in names:
        other = tasks.get(name)
        if other is None or _identity(other.function) == _identity(task.function):
            continue
        if name_of(other.function) == name_of(task.function):
            raise ValueError(
                f"there are two tasks named {name!r}: a decorator below @app.task gives "
                "both functions its own name; let it use functools.wraps, or pass name=..."
            )
        both = f": {other.name!r} and {names[0]!r}" if other.name != names[0] else ""
        raise ValueError(
            f"there are two tasks named {name!r}{both}; if one is a former version of the "
            "other, make a new App"
        )


def _identity(function: Callable[..., Any]) -> list[str]:
    """Return what stays the same of a function when its module is loaded again.

    These are its name, and the names of the functions that it closes over.
    """
    closed_over = (name_of(one) for one in _closed_over(function) if inspect.isfunction(one))
    return [name_of(function), *closed_over]


def _values(function: Callable[..., Any]) -> list[str]:
    """Return the plain values that a function closes over."""
    return [repr(one) for one in _closed_over(function) if isinstance(one, str | int | float)]


def _closed_over(function: Callable[..., Any]) -> list[Any]:
    found: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    return found


def module_name(module: str) -> str:
    """Return a module's name; for the main program, the name by which others would import it."""
    if module in ("__main__", "__mp_main__"):
        main = sys.modules[module]
        spec = getattr(main, "__spec__", None)
        if spec is not None:
            return str(spec.name)
        if file := getattr(main, "__file__", None):
            return Path(file).stem
    return module


class Registry:
    """Tasks and schedules, and the client through which they are registered."""

    #: What to do so that a worker knows a task.
    import_hint: str = "Import the module that defines it: App(imports=[...])."

    def __init__(self, client: Client, name: str, imports: Iterable[str]) -> None:
        self._client = client
        self.name = name
        self.imports = tuple(as_list("imports", imports))
        check_texts("imports", self.imports, "shop.tasks")
        self.tasks: dict[str, Task[..., Any]] = {}
        #: Whether one of the tasks takes batches.
        self.has_batches = False
        self.schedules: dict[str, Schedule] = {}
        #: Returns the content type and the body of a worker's answer at /metrics.
        self.metrics: Callable[[], tuple[str, bytes]] | None = None
        #: While a worker of many databases runs: returns the app for each database that it serves
        #: now, by the name that logs use.
        self.databases: Callable[[], Mapping[str, Self]] | None = None
        #: Functions that a worker calls in its loop once the database has recorded the end of a
        #: run: with the job, the outcome as queue.attempts calls it, or `succeeded`, and how many
        #: seconds the handler took. They must return at once.
        self.meters: list[Callable[[JobContext, str, float], object]] = []
        #: The hooks of each event.
        self.hooks: dict[str, list[Callable[[Any], Any]]] = {}

    @property
    def client(self) -> Client:
        """The client: in a handler, that of its job's database."""
        return client_here(self._client)

    def add(self, task: T) -> T:
        """Add a task. Raises ValueError if another task has its name, or one of its aliases."""
        names = (task.name, *task.aliases)
        check_names(self.tasks, task, names)
        for name in names:
            other = self.tasks.get(name)
            if other is not None and _values(other.function) != _values(task.function):
                log.warning(
                    "the task %r is defined again with other values, and replaces the one before: "
                    "pass name=... if both are meant",
                    name,
                )
        self.has_batches = self.has_batches or task.execution.batch is not None
        for name in names:
            self.tasks[name] = task
            self.client.defaults[name] = task.defaults
            self.client.versions[name] = task.versions.latest
        return task

    def get(self, name: str) -> Task[..., Any]:
        """Return a task. Raises UnknownTask."""
        try:
            return self.tasks[name]
        except KeyError:
            raise UnknownTask(
                f"the task {name!r} isn't known here",
                hint=self.import_hint,
            ) from None

    def import_tasks(self) -> None:
        """Import the modules of `imports`."""
        for module in self.imports:
            importlib.import_module(module)

    async def _register_schedules(
        self, connection: AsyncPsycopgConnection, *, prune: bool = False
    ) -> list[str]:
        """Register the schedules; return the names of those that the code no longer has.

        With `prune`, these are removed.
        """
        try:
            if self.schedules:
                await self._schedule_all(connection)
            rows = await execute_async(connection, sql.SCHEDULES_OF, {"source": self.name})
            lost = removed_schedules((row[0] for row in rows), self.schedules)
            for name in lost if prune else ():
                await execute_async(connection, sql.UNSCHEDULE, {"name": name})
        except psycopg.errors.InsufficientPrivilege:
            if self.schedules or prune:
                log.warning("this role may not register recurring runs")
            return []
        for name in lost:
            if prune:
                log.info("the schedule %r was removed, as the code no longer has it", name)
            else:
                log.warning(
                    "the schedule %r goes on though this code does not have it. If another program "
                    "registers it, give each its own App(name=...): this one is named %r. "
                    "Otherwise remove it by --prune-schedules or queue.unschedule",
                    *(name, self.name),
                )
        return lost

    async def _schedule_all(self, connection: AsyncPsycopgConnection) -> None:
        schedules = list(self.schedules.values())
        try:
            parameters = {"schedules": schedules_json(schedules, self.name)}
            await execute_async(connection, sql.SCHEDULE, parameters)
        except InvalidParameter:
            async with connection.transaction(force_rollback=True):
                for schedule in schedules:
                    with Naming(f"the schedule {schedule.name!r}"):
                        parameters = {"schedules": schedules_json([schedule], self.name)}
                        await execute_async(connection, sql.SCHEDULE, parameters)
            raise


def task_of(registry: Registry, given: object) -> Task[..., Any] | None:
    """Return the task that `given` is, or that stands for a task of Django; else None.

    Raises TypeError for a task of Django that belongs to another backend.
    """
    if isinstance(given, Task):
        return given
    path = getattr(given, "module_path", None)
    if not isinstance(path, str):
        return None
    if path not in registry.tasks:
        raise TypeError(
            f"Django's task {path!r} does not belong to this queue: it needs PgDeferBackend as its "
            "backend in TASKS"
        )
    return registry.tasks[path]

"""Tasks: functions that can be deferred."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

from pgdefer.checks import check_texts
from pgdefer.client.client import Client
from pgdefer.database.callers import (
    OWN,
    AnyAsyncConnection,
    AnyConnection,
    CallersConnection,
)
from pgdefer.errors import UnknownTask
from pgdefer.options import DeferOptions, JobOptions, TaskOptions, as_list
from pgdefer.tasks.batch import batch_parameters, check_batch
from pgdefer.tasks.deferrable import Deferrable
from pgdefer.tasks.deferrable_async import AsyncDeferrable
from pgdefer.tasks.handling import Execution, FailurePolicy, HandlingOptions
from pgdefer.tasks.job import Job
from pgdefer.tasks.middleware import check_middleware, check_task_middleware
from pgdefer.tasks.option_checks import check_options, check_sensitive, check_templates
from pgdefer.tasks.parameters import Parameters
from pgdefer.tasks.versions import UpgradeT, Versions

__all__ = [
    "AllTaskOptions",
    "AsyncTask",
    "ConfiguredTask",
    "SyncTask",
    "Task",
    "find_task",
    "task_name",
]

P = ParamSpec("P")
R = TypeVar("R")


class ConfiguredTask(Deferrable[P, R], AsyncDeferrable[P, R]):
    """A task with options for the jobs that are deferred through it."""


class _OfOneTask(TypedDict, total=False):
    """Options that can't be defaults for all tasks: they change the handler's parameters."""

    transactional: Any
    batch: Any
    batch_of: Any


class AllTaskOptions(TaskOptions, HandlingOptions, total=False):
    """The options of App.task: defaults to register, and options that only the worker uses."""

    aliases: Sequence[str]
    version: int
    min_version: int


# Options that are neither registered nor the worker's.
_OWN_OPTIONS = frozenset({"aliases", "version", "min_version"})


class Task(Deferrable[P, R], AsyncDeferrable[P, R]):
    """A function that can be deferred; `App.task` makes it. Calling it calls the function."""

    is_async: bool

    def __init__(
        self, client: Client, function: Callable[..., Any], name: str, options: Mapping[str, Any]
    ) -> None:
        what = f"the task {name!r}"
        check_options(what, options, AllTaskOptions, _OfOneTask, besides=("name",))
        self.function = function
        #: Former names of the task: jobs that were deferred under these run, too.
        self.aliases = tuple(as_list("aliases", options.get("aliases", ())))
        check_texts("aliases", self.aliases, "mail.send_old")
        rest = {option: value for option, value in options.items() if option not in _OWN_OPTIONS}
        self.versions = Versions.of(what, options)
        self.execution, rest = Execution.split(rest)
        self.failure_policy, rest = FailurePolicy.split(rest)
        self.execution.check(is_async=self.is_async, qualname=function.__qualname__)
        self.failure_policy.check()
        execution = self.execution
        check_batch(
            execution.batch,
            execution.batch_of,
            function,
            transactional=bool(execution.transactional),
            run_in=execution.run_in,
        )
        own = check_middleware("middleware", self.execution.middleware)
        #: The middleware around the handler, the App's first.
        self.middleware = (*client.middleware, *own)
        check_task_middleware(name, self.middleware, is_async=self.is_async)
        #: The defaults of its jobs, which are registered in the database.
        self.defaults = JobOptions.of(rest)
        self.defaults.options_text()  # refuses what JSON can't have, such as NaN
        version = self.versions.latest
        parameters = (
            Parameters.of(function, has_connection=bool(execution.transactional), version=version)
            if execution.batch is None
            else batch_parameters(execution.batch_of, version)
        )
        if parameters.keywords is None:
            check_templates(what, rest, parameters.allowed)
            if version == 1:  # else jobs of older versions may have it
                check_sensitive(what, rest, parameters.allowed)
        super().__init__(client, name, parameters, {}, OWN)
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)
        self.__module__ = function.__module__
        self.__wrapped__ = function
        #: Its place among the tasks that its module defines under its name, in several Apps.
        self.place = _add(self, (self.module, name))

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def __reduce__(self) -> str:
        """Pickle the task by its name, as a function is pickled."""
        return self.function.__qualname__

    def include_in(self, client: Client, namespace: str) -> None:
        """Join an App: put its middleware around the handler, and the namespace before the name."""
        self.client, self.name = client, f"{namespace}{self.name}"
        self.middleware = (*client.middleware, *self.middleware)

    def upgrade(self, function: UpgradeT) -> UpgradeT:
        """Decorate the function that brings the arguments of older jobs up to date.

        It is called with the arguments by name and their version, and returns the arguments in the
        task's latest version. Each run of such a job calls it, so it must be quick and without side
        effects.
        """
        self.versions.upgrade = function
        return function

    def unbind(self, args: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments of the call, for args of any known version.

        Raises DecodeError if they do not fit.
        """
        return self.parameters.unbind(self.versions.upgraded(args))

    @property
    def module(self) -> str:
        """The module that a child process must import to have the task."""
        module = self.client.child_module or self.function.__module__
        return "__mp_main__" if module == "__main__" else module

    def configure(
        self, *, connection: CallersConnection = OWN, **options: Unpack[DeferOptions]
    ) -> ConfiguredTask[P, R]:
        """Return the task with options; with `connection`, jobs are deferred in its transaction.

        Raises TypeError if the connection is None, so that no job silently gets its own
        transaction.
        """
        return ConfiguredTask(self.client, self.name, self.parameters, options, connection)

    def defer_with(self, connection: AnyConnection, /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Defer in the transaction of the caller's connection or session."""
        return self.configure(connection=connection).defer(*args, **kwargs)

    async def defer_with_async(
        self, connection: AnyAsyncConnection, /, *args: P.args, **kwargs: P.kwargs
    ) -> Job[R]:
        """Defer in the transaction of the caller's connection or session."""
        return await self.configure(connection=connection).defer_async(*args, **kwargs)


# The tasks of each module by name, in the order of their definition: Apps may use one name.
_tasks: dict[tuple[str, str], list[weakref.ref[Task[..., Any]]]] = {}


def _add(task: Task[..., Any], key: tuple[str, str]) -> int:
    """Add a task to those of its module and name that still exist; return its place there."""
    others = [one for one in _tasks.get(key, ()) if one() is not None]
    _tasks[key] = [*others, weakref.ref(task)]
    return len(others)


def find_task(module: str, name: str, place: int = 0) -> Task[..., Any]:
    """Return the task of this name and place that an imported module defines.

    If the module defines fewer of this name, return the last one. Raises UnknownTask.
    """
    found = [task for one in _tasks.get((module, name), ()) if (task := one()) is not None]
    if not found:
        raise UnknownTask(f"importing {module} defines no task {name!r}")
    return found[min(place, len(found) - 1)]


class SyncTask(Task[P, R]):
    """A task with an ordinary function: workers run it in a thread."""

    is_async = False

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, here and now."""
        result: R = self.function(*args, **kwargs)
        return result


class AsyncTask(Task[P, R]):
    """A task with a coroutine function: workers run it in their event loop."""

    is_async = True

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the function, here and now."""
        coroutine: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return coroutine


@overload
def task_name(task: str | Task[..., Any]) -> str: ...


@overload
def task_name(task: str | Task[..., Any] | None) -> str | None: ...


def task_name(task: str | Task[..., Any] | None) -> str | None:
    """Return a task's name, given it or the task. Raises TypeError for anything else."""
    if isinstance(task, Task):
        return task.name
    if task is not None and not isinstance(task, str):
        raise TypeError(f"task must be a task or its name, not {task!r}")
    return task

"""Tasks: functions that can be deferred."""

from __future__ import annotations

import dataclasses
import datetime as dt
import inspect
import sys
import typing
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

import psycopg

from ._codec import TAG
from ._context import running_job
from ._errors import DecodeError, UnknownTask
from ._execute import AnyAsyncConnection, AnyConnection
from ._handling import Handling, HandlingOptions
from ._job import Job
from ._options import (
    DeferOptions,
    Settings,
    TaskOptions,
    defer_object,
    defer_parameters,
    listed,
)

if TYPE_CHECKING:
    import sqlalchemy.ext.asyncio as sa_async
    import sqlalchemy.orm as sa_orm

    from ._app import App

# What the args of a recurring run have beside its schedule's: the time that it is for, as text.
SCHEDULED_FOR = "scheduled_for"
# What `configure` takes, and `defer` does not.
OPTIONS = frozenset({*DeferOptions.__annotations__, "connection"})

__all__ = ["AsyncTask", "Configured", "Prepared", "SyncTask", "Task"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclasses.dataclass(frozen=True)
class Prepared(Generic[R_co]):
    """A call of a task that is to be deferred, with others, by `defer_many`."""

    task: str
    args: str = dataclasses.field(repr=False)
    settings: Settings

    def to_json(self) -> str:
        """Return the object that queue.defer_many takes."""
        return defer_object(self.task, self.args, self.settings)


def checked(calls: Iterable[Prepared[Any]]) -> list[Prepared[Any]]:
    """Return calls. Raises TypeError for what is none, as a job that was deferred already."""
    found = listed("calls", calls)
    for call in found:
        if not isinstance(call, Prepared):
            raise TypeError(f"a call is what task.prepare(...) returns, not {call!r}")
    return found


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """How a handler takes a job's args: an object whose keys are the parameters' names."""

    signature: inspect.Signature
    allowed: frozenset[str]
    required: frozenset[str]
    positional: tuple[str, ...]
    rest: str | None
    keywords: str | None
    wants_moment: bool

    @classmethod
    def of(cls, function: Callable[..., Any], *, has_connection: bool = False) -> _Parameters:
        """Read them; `has_connection`: the first one is no argument of the job's."""
        signature = inspect.signature(function)
        if has_connection:
            _, *others = signature.parameters.values()
            signature = signature.replace(parameters=others)
        parameters = signature.parameters.values()
        by_kind = {
            kind: [p for p in parameters if p.kind is kind]
            for kind in (
                inspect.Parameter.POSITIONAL_ONLY,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.KEYWORD_ONLY,
                inspect.Parameter.VAR_KEYWORD,
            )
        }
        rest = [p.name for p in by_kind[inspect.Parameter.VAR_POSITIONAL]]
        keywords = [p.name for p in by_kind[inspect.Parameter.VAR_KEYWORD]]
        named = [p for p in parameters if p.name not in (*rest, *keywords)]
        if any(p.name == TAG for p in parameters):
            raise TypeError(f"a parameter can't be named {TAG}")
        positional = [p.name for p in by_kind[inspect.Parameter.POSITIONAL_ONLY]]
        if rest:
            positional += [p.name for p in by_kind[inspect.Parameter.POSITIONAL_OR_KEYWORD]]
        return cls(
            signature=signature,
            allowed=frozenset([*(p.name for p in named), *rest]),
            required=frozenset(p.name for p in named if p.default is p.empty),
            positional=tuple(positional),
            rest=rest[0] if rest else None,
            keywords=keywords[0] if keywords else None,
            wants_moment=_is_moment(function, signature),
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a call by name. Raises TypeError as the call itself would."""
        is_simple = not (args or self.positional or self.rest or self.keywords)
        if is_simple and self.required <= kwargs.keys() <= self.allowed:
            return kwargs
        try:
            bound = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            if options := sorted((kwargs.keys() & OPTIONS) - self.allowed):
                raise TypeError(
                    f"{error}; what is said of the job goes before: "
                    f"task.configure({options[0]}=...).defer(...)"
                ) from None
            raise
        if self.rest is not None and self.rest in bound:
            bound[self.rest] = list(bound[self.rest])
        if self.keywords is not None:
            more = bound.pop(self.keywords, {})
            if clash := sorted(more.keys() & self.allowed):
                raise TypeError(f"{', '.join(clash)} would be given twice")
            bound.update(more)
        return bound

    def unbind(self, args: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return how to call with arguments that `bind` made, or SQL.

        Raises DecodeError where they do not fit the signature.
        """
        if SCHEDULED_FOR in args:
            args = self._take_moment(args)
        if not (args.keys() <= self.allowed) and self.keywords is None:
            unknown = ", ".join(sorted(args.keys() - self.allowed))
            raise DecodeError(f"the task takes no argument {unknown}")
        if not args.keys() >= self.required:
            missing = ", ".join(sorted(self.required - args.keys()))
            raise DecodeError(f"the task needs the argument {missing}")
        if not self.positional and self.rest is None:
            return [], args
        kwargs = dict(args)
        more = kwargs.pop(self.rest, []) if self.rest is not None else []
        if not isinstance(more, list):
            raise DecodeError(f"the argument {self.rest} must be a list")
        given: list[Any] = []
        for name in self.positional:
            if name in kwargs:
                given.append(kwargs.pop(name))
            elif more or any(later in kwargs for later in self.positional):
                # A gap: what comes after it has no place without it.
                given.append(self.signature.parameters[name].default)
        return [*given, *more], kwargs

    def _take_moment(self, args: dict[str, Any]) -> dict[str, Any]:
        """Leave a run's time out where the task doesn't ask for it; make it what it asks for."""
        moment = args[SCHEDULED_FOR]
        if SCHEDULED_FOR not in self.allowed:
            return {name: value for name, value in args.items() if name != SCHEDULED_FOR}
        if self.wants_moment and isinstance(moment, str):
            try:
                return args | {SCHEDULED_FOR: dt.datetime.fromisoformat(moment)}
            except ValueError:
                raise DecodeError(f"{SCHEDULED_FOR} is no time: {moment!r}") from None
        return args


def _is_moment(function: Callable[..., Any], signature: inspect.Signature) -> bool:
    """Whether the function declares `scheduled_for` as a datetime."""
    if SCHEDULED_FOR not in signature.parameters:
        return False
    try:
        hint = typing.get_type_hints(function).get(SCHEDULED_FOR)
    except (NameError, TypeError):
        # Names that only a type checker knows.
        hint = signature.parameters[SCHEDULED_FOR].annotation
        return isinstance(hint, str) and "datetime" in hint
    return dt.datetime in (hint, *typing.get_args(hint))


def name_of(function: Callable[..., Any]) -> str:
    """Return a task's default name: its module and name, the same from every process."""
    return f"{module_name(function.__module__)}.{function.__qualname__}"


def module_name(module: str) -> str:
    """Return a module's name; for the program itself the one that others would import it by."""
    if module in ("__main__", "__mp_main__"):
        main = sys.modules[module]
        spec = getattr(main, "__spec__", None)
        if spec is not None:
            return str(spec.name)
        if file := getattr(main, "__file__", None):
            return Path(file).stem
    return module


def in_context(task: str, settings: Settings, app: App, *, is_child: bool) -> Settings:
    """Return a job's options with what they have from where it is deferred.

    That is the app's headers, and, if `is_child`, for parent the job of this app that runs here.
    """
    options = dict(settings.options)
    if is_child and (job := running_job()) is not None and job.app is app:
        options["parent"] = job.id
    if app.headers is not None and (headers := app.headers(task)):
        if not isinstance(headers, Mapping):
            raise TypeError(f"App(headers=...) must return a mapping, not {headers!r}")
        known = app.tasks.get(task)
        registered = known.settings.options.get("headers", {}) if known is not None else {}
        options["headers"] = {**registered, **headers, **options.get("headers", {})}
    return Settings(settings.arguments, options)


class Configured(Generic[P, R]):
    """A task with options for the jobs that are deferred through it."""

    def __init__(
        self,
        task: Task[P, R],
        options: Mapping[str, Any],
        connection: AnyConnection | AnyAsyncConnection | None,
    ) -> None:
        self.task = task
        self._settings = Settings.of(options)
        self._is_child = "parent" not in options
        self._connection = connection

    def _effective(self) -> Settings:
        task = self.task
        return in_context(task.name, self._settings, task.app, is_child=self._is_child)

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Prepared[R]:
        """Return the call for `defer_many`."""
        return Prepared(self.task.name, self.task.encode(args, kwargs), self._effective())

    def defer(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Defer a job that calls the task with these arguments.

        On the caller's connection where one was configured: then in its transaction.
        """
        task = self.task
        text = task.encode(args, kwargs)
        parameters = defer_parameters(task.name, text, self._effective())
        return task.app.submit(task.name, text, parameters, self._connection)

    async def defer_async(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """As `defer`, for asyncio."""
        task = self.task
        text = task.encode(args, kwargs)
        parameters = defer_parameters(task.name, text, self._effective())
        return await task.app.submit_async(task.name, text, parameters, self._connection)

    def defer_many(self, calls: Iterable[Prepared[Any] | Mapping[str, Any]]) -> list[Job[R]]:
        """Defer many jobs at once, all or none; a call is `prepare`d, or keyword arguments."""
        return self.task.app.defer_many(self._prepared(calls), connection=self._connection)

    async def defer_many_async(
        self, calls: Iterable[Prepared[Any] | Mapping[str, Any]]
    ) -> list[Job[R]]:
        """As `defer_many`, for asyncio."""
        return await self.task.app.defer_many_async(
            self._prepared(calls), connection=self._connection
        )

    def _prepared(
        self, calls: Iterable[Prepared[Any] | Mapping[str, Any]]
    ) -> Iterable[Prepared[Any]]:
        settings = self._effective()
        task = self.task
        for call in listed("calls", calls):
            if isinstance(call, Prepared):
                yield call
            elif not isinstance(call, Mapping):
                raise TypeError(
                    "a call is what task.prepare(...) returns, or a dict of keyword arguments, "
                    f"not {call!r}"
                )
            else:
                yield Prepared(task.name, task.encode((), call), settings)


class Task(Generic[P, R]):
    """A function that can be deferred; `App.task` makes it. Calling it calls the function."""

    is_async: bool

    def __init__(
        self, app: App, function: Callable[..., Any], name: str, options: Mapping[str, Any]
    ) -> None:
        self.app = app
        self.function = function
        self.name = name
        self.handling, rest = Handling.split(options)
        self.handling.check(is_async=self.is_async, qualname=function.__qualname__)
        self.settings = Settings.of(rest)
        self.parameters = _Parameters.of(function, has_connection=bool(self.handling.transactional))
        self._plain: Configured[P, R] = Configured(self, {}, None)
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)
        self.__module__ = function.__module__
        self.__wrapped__ = function
        _tasks[self.module, name] = self

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    @property
    def module(self) -> str:
        """The module that a child process must import to have the task."""
        module = self.function.__module__
        return "__mp_main__" if module == "__main__" else module

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the JSON of a call's arguments. Raises TypeError, EncodeError."""
        return self.app.codec.dumps_args(self.parameters.bind(args, kwargs))

    def configure(
        self,
        *,
        connection: AnyConnection | AnyAsyncConnection | None = None,
        **options: Unpack[DeferOptions],
    ) -> Configured[P, R]:
        """Return the task with options; with `connection`, jobs are deferred in its transaction."""
        return Configured(self, options, connection)

    def defer_with(self, connection: AnyConnection, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Defer in the transaction of the caller's connection or session."""
        return Configured(self, {}, connection).defer(*args, **kwargs)

    async def defer_with_async(
        self, connection: AnyAsyncConnection, *args: P.args, **kwargs: P.kwargs
    ) -> Job[R]:
        """As `defer_with`, for asyncio."""
        return await Configured(self, {}, connection).defer_async(*args, **kwargs)

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Prepared[R]:
        """Return a call for `defer_many`."""
        return self._plain.prepare(*args, **kwargs)

    def defer(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Defer a job that calls the task with these arguments, in a transaction of its own.

        Raises TypeError for arguments that the task does not take, EncodeError for ones that
        can't be stored, AlreadyQueued where its queueing_lock is taken.
        """
        return self._plain.defer(*args, **kwargs)

    async def defer_async(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """As `defer`, for asyncio."""
        return await self._plain.defer_async(*args, **kwargs)

    def defer_many(self, calls: Iterable[Prepared[Any] | Mapping[str, Any]]) -> list[Job[R]]:
        """Defer many jobs at once, all or none; a call is `prepare`d, or keyword arguments."""
        return self._plain.defer_many(calls)

    async def defer_many_async(
        self, calls: Iterable[Prepared[Any] | Mapping[str, Any]]
    ) -> list[Job[R]]:
        """As `defer_many`, for asyncio."""
        return await self._plain.defer_many_async(calls)


_tasks: weakref.WeakValueDictionary[tuple[str, str], Task[..., Any]] = weakref.WeakValueDictionary()


def find_task(module: str, name: str) -> Task[..., Any]:
    """Return a task that a module which has been imported defines. Raises UnknownTask."""
    try:
        return _tasks[module, name]
    except KeyError:
        raise UnknownTask(f"importing {module} defines no task {name!r}") from None


class SyncTask(Task[P, R]):
    """A task whose function is no coroutine: workers run it in a thread."""

    is_async = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, here and now."""
        result: R = self.function(*args, **kwargs)
        return result


class AsyncTask(Task[P, R]):
    """A task whose function is a coroutine: workers run it in their event loop."""

    is_async = True

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the function, here and now."""
        coroutine: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return coroutine


class AllTaskOptions(TaskOptions, HandlingOptions, total=False):
    """What App.task takes: what is registered, and what only the worker knows."""


class ConnectionDecorator(Protocol):
    """What `App.task(transactional=True)` returns."""

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
    """What `App.task(transactional=sessionmaker)` returns."""

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
    """What `App.task(...)` returns."""

    def __init__(self, app: App, name: str | None, options: Mapping[str, Any]) -> None:
        self._app = app
        self._name = name
        self._options = options

    # A coroutine function is also a function: mypy would rather have us not tell.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any]:
        """Make the task."""
        name = self._name or name_of(function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"the task {name!r} is a generator, whose code nobody would run: "
                "replace `yield`, by `return` or by deferring further jobs"
            )
        kind: type[Task[..., Any]] = (
            AsyncTask if inspect.iscoroutinefunction(function) else SyncTask
        )
        return self._app.add(kind(self._app, function, name, self._options))

"""The project's App: defers jobs, and runs their handlers, on Django's connections.

Tests: contrib/test_django.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from importlib import import_module
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, Unpack, overload

import django
from django.apps import apps
from django.utils.module_loading import autodiscover_modules, import_string

from pgdefer.app import App
from pgdefer.contrib.django import conf
from pgdefer.contrib.django.client import DjangoClient
from pgdefer.contrib.django.connections import DjangoSource
from pgdefer.contrib.django.handlers import around_job, atomic_job, without_connection
from pgdefer.contrib.django.values import register_types
from pgdefer.errors import InvalidParameter, UnknownTask
from pgdefer.logs import own_loggers
from pgdefer.tasks.decorators import TaskDecorator
from pgdefer.tasks.registry import Registry
from pgdefer.tasks.task import AllTaskOptions, AsyncTask, SyncTask, Task

__all__ = ["DjangoApp", "project_app"]


P = ParamSpec("P")
R = TypeVar("R")


class DjangoApp(App):
    """The tasks of a Django project, in the database of its settings.

    Jobs are deferred on Django's own connection, as part of `atomic()`; outside of a transaction
    they are committed at once. Each handler has fresh connections. With `transactional=True` it
    runs in an `atomic()` that also ends its job: both commit or neither. The handler gets no
    further parameter.
    """

    client: DjangoClient
    import_hint = 'Name the module that defines it in PGDEFER["IMPORTS"].'

    def __init__(self, settings: conf.Settings) -> None:
        source = DjangoSource(
            settings.DATABASE,
            pgbouncer=settings.PGBOUNCER,
            listen_alias=settings.LISTEN_DATABASE,
        )
        surrounding = [import_string(name) for name in settings.MIDDLEWARE]
        client = DjangoClient(
            source,
            headers=None if settings.HEADERS is None else import_string(settings.HEADERS),
            middleware=[around_job, *surrounding],
            defer_middleware=[import_string(name) for name in settings.DEFER_MIDDLEWARE],
        )
        Registry.__init__(self, client, "django", settings.IMPORTS)
        self.defaults = dict(settings.DEFAULTS)
        register_types(client.codec)

    @overload  # type: ignore[override]
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        *,
        transactional: Literal[True] | None = None,
        name: str | None = None,
        **options: Unpack[AllTaskOptions],
    ) -> TaskDecorator: ...
    def task(  # type: ignore[misc]
        self, function: Callable[..., Any] | None = None, /, **options: Any
    ) -> object:
        """Make a function a task, as `App.task`; `transactional=True` uses Django's connection."""
        if options.get("transactional") is not True:
            return super().task(function, **options) if function else super().task(**options)
        options["transactional"] = functools.partial(atomic_job, self.client.alias)

        def decorate(function: Callable[..., Any]) -> Task[..., Any]:
            if inspect.iscoroutinefunction(function):
                raise TypeError("transactional=True is for functions: atomic() is not async")
            made: Task[..., Any] = super(DjangoApp, self).task(**options)(
                without_connection(function)
            )
            return made

        return decorate if function is None else decorate(function)

    def import_tasks(self) -> None:
        """Import the module `tasks` of each installed app, and the modules of `IMPORTS`."""
        if not apps.ready:
            with _logging():
                django.setup()
        autodiscover_modules("tasks")
        super().import_tasks()

    def get(self, name: str) -> Task[..., Any]:
        """Return a task; import its module if that has not been imported yet."""
        if name not in self.tasks and apps.ready:
            module, _, _ = name.rpartition(".")
            owner = apps.get_containing_app_config(module) if module else None
            if owner is not None:
                try:
                    import_module(module)
                except ImportError as error:
                    raise UnknownTask(f"the task {name!r} can't be imported: {error}") from error
        return super().get(name)

    def move(
        self, dsn: str, listen_dsn: str | None = None, *, pgbouncer: bool | None = None
    ) -> NoReturn:
        """Refuse: handlers write to the database of the settings."""
        del dsn, listen_dsn, pgbouncer
        raise InvalidParameter("settings.DATABASES says where the database is")


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Let the queue's loggers log: LOGGING disables those that exist before the project."""
    loggers = [logger for logger in own_loggers() if not logger.disabled]
    yield
    for logger in loggers:
        logger.disabled = False


@functools.cache
def project_app() -> DjangoApp:
    """Return the one App of the project."""
    return DjangoApp(conf.read())

"""The system checks: invalid settings, and a database without the queue.

Tests: contrib/test_django.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import psycopg
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder
from django.utils.module_loading import import_string

from pgdefer.contrib.django import conf
from pgdefer.database import sql
from pgdefer.database.callers import rows_on_django
from pgdefer.database.install import is_at_least, offered_version
from pgdefer.errors import IncompatibleClient, NotInstalled, describe, translate
from pgdefer.options import JobOptions
from pgdefer.tasks.handling import Execution, FailurePolicy
from pgdefer.tasks.option_checks import check_options
from pgdefer.tasks.task import AllTaskOptions

__all__ = ["check_aliases", "check_database", "check_settings"]


def check_settings(**_options: Any) -> list[checks.CheckMessage]:
    """Check `PGDEFER`."""
    try:
        settings = conf.read()
    except (ImproperlyConfigured, TypeError) as error:
        return [checks.Error(str(error), id="pgdefer.E001")]
    return [*check_aliases(settings), *_names(settings), *_defaults(settings)]


def check_aliases(settings: conf.Settings) -> Iterator[checks.CheckMessage]:
    """Check the databases that they name."""
    for key in ("DATABASE", "LISTEN_DATABASE"):
        alias = getattr(settings, key)
        if alias is None:
            continue
        if alias not in connections:
            yield checks.Error(
                f"PGDEFER[{key!r}] is {alias!r}, not in DATABASES", id="pgdefer.E002"
            )
        elif not _is_fit(connections[alias]):
            yield checks.Error(
                f"PGDEFER[{key!r}] is {alias!r}, which is not PostgreSQL with psycopg 3",
                hint="ENGINE is django.db.backends.postgresql; psycopg2 has to go.",
                id="pgdefer.E003",
            )


def _names(settings: conf.Settings) -> Iterator[checks.CheckMessage]:
    """Check what can be imported."""
    surrounding = (*settings.MIDDLEWARE, *settings.DEFER_MIDDLEWARE)
    for name in filter(None, (*surrounding, settings.HEADERS)):
        try:
            import_string(name)
        except ImportError as error:
            yield checks.Error(f"PGDEFER names {name}: {error}", id="pgdefer.E004")
    for name in settings.IMPORTS:
        try:
            import_module(name)
        except Exception as error:
            text = f"PGDEFER['IMPORTS'] names {name}: {type(error).__qualname__}: {error}"
            yield checks.Error(text, id="pgdefer.E004")


def _defaults(settings: conf.Settings) -> Iterator[checks.CheckMessage]:
    """Check the options of all tasks."""
    try:
        check_options("PGDEFER['DEFAULTS']", settings.DEFAULTS, AllTaskOptions)
        _, of_jobs = Execution.split(settings.DEFAULTS)
        JobOptions.of(FailurePolicy.split(of_jobs)[1])
    except (TypeError, ValueError) as error:
        yield checks.Error(str(error), id="pgdefer.E005")


def _is_fit(connection: BaseDatabaseWrapper) -> bool:
    """Whether the database is PostgreSQL with psycopg 3."""
    return connection.vendor == "postgresql" and vars(type(connection))["Database"] is psycopg


def check_database(
    *, databases: Sequence[str] | None = None, **_options: Any
) -> list[checks.CheckMessage]:
    """Check that the queue is installed in this package's version, if databases are checked."""
    try:
        settings = conf.read()
    except (ImproperlyConfigured, TypeError):
        return []  # check_settings says so
    alias = settings.DATABASE
    if alias not in (databases or ()) or alias not in connections:
        return []
    if not _is_fit(connections[alias]):
        return []
    try:
        ((_, tables),) = rows_on_django(connections[alias], sql.VERSION, {})
    except DatabaseError as error:
        if not isinstance(translate(error), NotInstalled | IncompatibleClient):
            text = f"the queue of the database {alias!r} can't be read: {describe(error)}"
            return [checks.Warning(text, id="pgdefer.W003")]
        tables = None
    if tables is None:
        if sys.argv[1:2] == ["migrate"] and _migrates(connections[alias]):
            return []
        text = f"the queue is not installed in the database {alias!r}"
        # It may have run when the queue was meant for another database.
        otherwise = "; where that has nothing to do, manage.py pgdefer install"
        hint = settings.migrate_command + otherwise
        return [checks.Warning(text, hint=hint, id="pgdefer.W001")]
    if not is_at_least(tables, offered_version()):
        text = f"the queue of the database {alias!r} is {tables}, and this package has "
        return [
            checks.Warning(
                text + offered_version(), hint="manage.py pgdefer upgrade", id="pgdefer.W002"
            )
        ]
    return []


def _migrates(connection: BaseDatabaseWrapper) -> bool:
    """Whether the migration that installs the queue has not run."""
    applied = MigrationRecorder(connection).applied_migrations()
    return not any(app == "pgdefer" for app, _ in applied)

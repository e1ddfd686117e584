"""The client of a Django project: it calls functions on Django's own connection.

Tests: contrib/test_django_transactions.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import psycopg
from asgiref.sync import sync_to_async
from django.db import Error, connections, transaction

from pgdefer.client.base import tasks_json
from pgdefer.client.client import Client
from pgdefer.contrib.django.connections import DjangoSource, is_of_test
from pgdefer.contrib.django.handlers import atomic_handler
from pgdefer.database import sql
from pgdefer.database.callers import OWN, CallersConnection, Rows, is_django
from pgdefer.database.execute import execute
from pgdefer.database.source import PsycopgConnection
from pgdefer.errors import sqlstate_of
from pgdefer.options import JobOptions

__all__ = ["DjangoClient"]

# Calls on a connection of the client's own: those that need psycopg's loaders, and those that a
# block of atomic() would roll back with it, by an error or by the JobSuspended of a sleep.
_APART = (*sql.AT_ONCE, sql.NEEDS, sql.BEGIN_STEP, sql.READ_STEPS)


def _is_apart(statement: sql.Statement, connection: CallersConnection) -> bool:
    return connection is OWN and statement in _APART


class DjangoClient(Client):
    """Makes calls on Django's connection, as part of the request's or the handler's transaction."""

    def __init__(
        self,
        source: DjangoSource,
        *,
        headers: Callable[[str], Mapping[str, Any]] | None,
        middleware: Iterable[Any],
        defer_middleware: Iterable[Any],
    ) -> None:
        super().__init__(
            source,
            headers=headers,
            middleware=tuple(middleware),
            defer_middleware=tuple(defer_middleware),
        )
        self.alias = source.alias
        self.child_module = "pgdefer.contrib.django.child"

    def call(
        self,
        statement: sql.Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection = OWN,
        *,
        tasks: Iterable[str] = (),
    ) -> Rows:
        """Run a statement on the caller's connection, or on this thread's Django connection."""
        if self.stand_in is not None or _is_apart(statement, connection):
            return super().call(statement, parameters, connection, tasks=tasks)
        used: Any = connections[self.alias] if connection is OWN else connection
        if not is_django(used):
            return super().call(statement, parameters, used, tasks=tasks)
        if defaults := self.unregistered(tasks):
            self._register_on(used, defaults)
        return execute(used, statement, parameters)

    async def call_async(
        self,
        statement: sql.Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection = OWN,
        *,
        tasks: Iterable[str] = (),
    ) -> Rows:
        """Do as `call`, in the thread that has Django's connection."""
        is_foreign = connection is not OWN and not is_django(connection)
        if is_foreign or (self.stand_in is None and _is_apart(statement, connection)):
            return await super().call_async(statement, parameters, connection, tasks=tasks)
        call = functools.partial(self.call, tasks=tuple(tasks))
        return await sync_to_async(call, thread_sensitive=True)(statement, parameters, connection)

    @contextlib.contextmanager
    def transaction(self, *, callers: bool = True) -> Iterator[PsycopgConnection]:
        """Begin a transaction. For the application's code it is an atomic(), for the ORM's writes.

        In a test, Django's savepoint is within that of the queue, if they share a connection.
        """
        connection = connections[self.alias]
        if not callers:
            with super().transaction(callers=False) as own:
                yield own
        elif self.stand_in is not None:
            with super().transaction() as own:
                is_djangos = connection.connection is own
                with transaction.atomic(self.alias) if is_djangos else contextlib.nullcontext():
                    yield own
        else:
            if connection.in_atomic_block:
                raise RuntimeError(
                    "a step's transaction would end with the block of atomic() around it: "
                    "begin it outside of atomic()"
                )
            with atomic_handler(self.alias):
                yield connection.connection

    def move(
        self, dsn: str, listen_dsn: str | None = None, *, pgbouncer: bool | None = None
    ) -> None:
        """Do nothing: the settings name the database, here and in a worker's processes."""

    def _register_on(self, connection: Any, defaults: dict[str, JobOptions]) -> None:
        """Register tasks in the caller's transaction; remember that if it commits.

        Django does not say whether a manual transaction commits: there each call registers them.
        """
        try:
            with transaction.atomic(using=connection.alias):
                execute(connection, sql.REGISTER_TASKS, {"tasks": tasks_json(defaults)})
        except Error as error:
            if sqlstate_of(error) != psycopg.errors.InsufficientPrivilege.sqlstate:
                raise
            self.forbidden_to_register()
            return

        def remember() -> None:
            if not connection.in_atomic_block:  # as it is in a test that has begun its own
                self._registered.update(defaults)

        if is_of_test(connection):
            return  # which rolls back; it may count what waits for the commit
        if connection.in_atomic_block or connection.get_autocommit():
            transaction.on_commit(remember, using=connection.alias)

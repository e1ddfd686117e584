# Generated from calls_async.py: change that, and run `make generate`.
"""A client's calls, on its own connections or the caller's.

Tests: integration/test_defer.py, integration/test_pools.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import psycopg

from pgdefer.client.base import HELD, NO_PATIENCE, PATIENCE, ClientBase, registration
from pgdefer.database import sql
from pgdefer.database.callers import OWN, AnyConnection, CallersConnection, Rows, check_given
from pgdefer.database.callers_pool import lent
from pgdefer.database.execute import execute
from pgdefer.database.source import PsycopgConnection
from pgdefer.errors import InvalidParameter, Naming
from pgdefer.options import JobOptions

__all__ = ["ClientCalls"]


class ClientCalls(ClientBase):
    """The calls to the database."""

    def call(
        self,
        statement: sql.Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection = OWN,
        *,
        tasks: Iterable[str] = (),
    ) -> Rows:
        """Run a statement on the caller's connection, or on one of the client's; return its rows.

        Before that, register those of `tasks` that are defined here and not registered yet.
        """
        check_given(connection)
        if self.stand_in is not None:
            defaults = self.unregistered(tasks)
            return self.stand_in.call(statement, parameters, connection, defaults)
        with self._connection(self.unregistered(tasks), connection) as used:
            return execute(used, statement, parameters)

    @contextlib.contextmanager
    def transaction(self, *, callers: bool = True) -> Iterator[PsycopgConnection]:
        """Begin a transaction on a connection of its own; in a test, a savepoint on the test's.

        `callers` says whether the block runs the application's code: see SyncPool.connection.
        """
        with contextlib.ExitStack() as stack:
            if self.stand_in is not None:
                own = stack.enter_context(self.stand_in.transaction())
            else:
                own = stack.enter_context(self.pool.connection(waits=not callers, undo=callers))
                stack.enter_context(own.transaction())
            yield own

    def open(self) -> None:
        """Check the connection, and register all tasks."""
        if self.stand_in is not None:
            return
        with self._connection(self.unregistered(self.defaults)):
            pass

    @contextlib.contextmanager
    def _connection(
        self,
        defaults: Mapping[str, JobOptions],
        callers: CallersConnection = OWN,
    ) -> Iterator[AnyConnection]:
        if callers is OWN:
            with self.pool.connection() as own:
                if defaults:
                    self._register_for(own, defaults)
                yield own
            return
        if defaults and self.source.is_chosen:
            # The caller may hold the last connection, of the application's pool or of this one.
            with self.own_pool.connection(waits=False) as own:
                self._register_for(own, defaults)
        with lent(callers) as used:
            if defaults and not self.source.is_chosen:
                # Only the caller's connection is known. A registration in its transaction may be
                # rolled back with it, so nothing is remembered.
                execute(used, *registration(defaults))
            yield used

    def _register_for(
        self, connection: PsycopgConnection, defaults: Mapping[str, JobOptions]
    ) -> None:
        """Register all tasks; wait only for transactions that register these tasks, too."""
        if self._registers_all:
            try:
                self.register(connection, patience=PATIENCE)
            except HELD:
                self._registers_all = False
        for name, options in () if self._registers_all else defaults.items():
            self.register(connection, {name: options})

    def register(
        self,
        connection: PsycopgConnection,
        defaults: Mapping[str, JobOptions] | None = None,
        *,
        patience: str | None = None,
    ) -> None:
        """Register the defaults of these tasks, or all; the same defaults again change nothing.

        With `patience` (an interval) it raises one of HELD, and registers nothing, if another
        transaction holds one of the tasks for longer. With several tasks, nobody else may use the
        connection meanwhile.
        """
        defaults = dict(self.defaults if defaults is None else defaults)
        try:
            with contextlib.ExitStack() as stack:
                if not connection.autocommit:
                    stack.enter_context(connection.transaction())
                execute(connection, *registration(defaults, patience))
        except psycopg.errors.InsufficientPrivilege:
            self.forbidden_to_register()
        except InvalidParameter:
            if len(defaults) > 1:
                self._name_wrong_task(connection, defaults)
                raise
            with Naming(f"the task {next(iter(defaults))!r}"):
                raise
        self._registered.update(defaults)

    def _name_wrong_task(
        self, connection: PsycopgConnection, defaults: Mapping[str, JobOptions]
    ) -> None:
        """Raise the error again with the name of the task whose defaults are refused.

        Each is tried in a transaction that is rolled back: tasks beside a wrong one stay as they
        are.
        """
        for name, options in defaults.items():
            with contextlib.suppress(*HELD), Naming(f"the task {name!r}"):
                self._check_task(connection, {name: options})

    def _check_task(
        self, connection: PsycopgConnection, defaults: Mapping[str, JobOptions]
    ) -> None:
        with connection.transaction(force_rollback=True):
            execute(connection, *registration(defaults, NO_PATIENCE))

"""A client's calls, on its own connections or the caller's.

Tests: integration/test_defer.py, integration/test_pools.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import psycopg

from pgdefer.client.base import HELD, NO_PATIENCE, PATIENCE, ClientBase, registration
from pgdefer.database import sql
from pgdefer.database.callers import OWN, AnyAsyncConnection, CallersConnection, Rows, check_given
from pgdefer.database.callers_pool_async import lent_async
from pgdefer.database.execute_async import execute_async
from pgdefer.database.source import AsyncPsycopgConnection
from pgdefer.errors import InvalidParameter, Naming
from pgdefer.options import JobOptions

__all__ = ["AsyncClientCalls"]


class AsyncClientCalls(ClientBase):
    """The calls to the database."""

    async def call_async(
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
            return await self.stand_in.call_async(statement, parameters, connection, defaults)
        async with self._connection_async(self.unregistered(tasks), connection) as used:
            return await execute_async(used, statement, parameters)

    @contextlib.asynccontextmanager
    async def transaction_async(
        self, *, callers: bool = True
    ) -> AsyncIterator[AsyncPsycopgConnection]:
        """Begin a transaction on a connection of its own; in a test, a savepoint on the test's.

        `callers` says whether the block runs the application's code: see SyncPool.connection.
        """
        async with contextlib.AsyncExitStack() as stack:
            if self.stand_in is not None:
                own = await stack.enter_async_context(self.stand_in.transaction_async())
            else:
                own = await stack.enter_async_context(
                    self.pool_async.connection(waits=not callers, undo=callers)
                )
                await stack.enter_async_context(own.transaction())
            yield own

    async def open_async(self) -> None:
        """Check the connection, and register all tasks."""
        if self.stand_in is not None:
            return
        async with self._connection_async(self.unregistered(self.defaults)):
            pass

    @contextlib.asynccontextmanager
    async def _connection_async(
        self,
        defaults: Mapping[str, JobOptions],
        callers: CallersConnection = OWN,
    ) -> AsyncIterator[AnyAsyncConnection]:
        if callers is OWN:
            async with self.pool_async.connection() as own:
                if defaults:
                    await self._register_for_async(own, defaults)
                yield own
            return
        if defaults and self.source.is_chosen:
            # The caller may hold the last connection, of the application's pool or of this one.
            async with self.own_pool_async.connection(waits=False) as own:
                await self._register_for_async(own, defaults)
        async with lent_async(callers) as used:
            if defaults and not self.source.is_chosen:
                # Only the caller's connection is known. A registration in its transaction may be
                # rolled back with it, so nothing is remembered.
                await execute_async(used, *registration(defaults))
            yield used

    async def _register_for_async(
        self, connection: AsyncPsycopgConnection, defaults: Mapping[str, JobOptions]
    ) -> None:
        """Register all tasks; wait only for transactions that register these tasks, too."""
        if self._registers_all:
            try:
                await self.register_async(connection, patience=PATIENCE)
            except HELD:
                self._registers_all = False
        for name, options in () if self._registers_all else defaults.items():
            await self.register_async(connection, {name: options})

    async def register_async(
        self,
        connection: AsyncPsycopgConnection,
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
            async with contextlib.AsyncExitStack() as stack:
                if not connection.autocommit:
                    await stack.enter_async_context(connection.transaction())
                await execute_async(connection, *registration(defaults, patience))
        except psycopg.errors.InsufficientPrivilege:
            self.forbidden_to_register()
        except InvalidParameter:
            if len(defaults) > 1:
                await self._name_wrong_task_async(connection, defaults)
                raise
            with Naming(f"the task {next(iter(defaults))!r}"):
                raise
        self._registered.update(defaults)

    async def _name_wrong_task_async(
        self, connection: AsyncPsycopgConnection, defaults: Mapping[str, JobOptions]
    ) -> None:
        """Raise the error again with the name of the task whose defaults are refused.

        Each is tried in a transaction that is rolled back: tasks beside a wrong one stay as they
        are.
        """
        for name, options in defaults.items():
            with contextlib.suppress(*HELD), Naming(f"the task {name!r}"):
                await self._check_task_async(connection, {name: options})

    async def _check_task_async(
        self, connection: AsyncPsycopgConnection, defaults: Mapping[str, JobOptions]
    ) -> None:
        async with connection.transaction(force_rollback=True):
            await execute_async(connection, *registration(defaults, NO_PATIENCE))

"""The state of a client.

Tests: integration/test_defer.py, integration/test_pools.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, NoReturn, Protocol

import psycopg

from pgdefer._text import logger
from pgdefer.codec import VERSION, Codec
from pgdefer.database.callers import AnyPool, CallersConnection, Rows, is_pool
from pgdefer.database.callers_pool import CallersPool
from pgdefer.database.callers_pool_async import AsyncCallersPool
from pgdefer.database.pool import AsyncPool, SyncPool
from pgdefer.database.source import AsyncPsycopgConnection, PsycopgConnection, Source
from pgdefer.database.sql import REGISTER_TASKS, TRY_REGISTER_TASKS, Statement
from pgdefer.options import JobOptions, checked_mapping

__all__ = [
    "HELD",
    "NO_PATIENCE",
    "PATIENCE",
    "ClientBase",
    "Refusal",
    "StandIn",
    "registration",
    "tasks_json",
]

log = logger("pgdefer")

#: How long the registration of all tasks waits for other transactions that register one of them:
#: less than deadlock_timeout.
PATIENCE = "500 ms"
#: How long that of one task waits when some are held.
NO_PATIENCE = "10 ms"
#: The errors of a registration that would have to wait: also for a role with a statement_timeout.
HELD = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.QueryCanceled,
)


class StandIn(Protocol):
    """Takes the calls of an application in a test, in place of its own connections."""

    #: Why no worker may run meanwhile: it would run the jobs of the App's own database.
    no_worker: str

    def call(
        self,
        statement: Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection,
        defaults: Mapping[str, JobOptions],
    ) -> Rows:
        """Register these defaults of tasks, then run a statement."""

    async def call_async(
        self,
        statement: Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection,
        defaults: Mapping[str, JobOptions],
    ) -> Rows:
        """Register these defaults of tasks, then run a statement."""

    def transaction(self) -> AbstractContextManager[PsycopgConnection]:
        """Begin a savepoint, for the transaction of a step."""

    def transaction_async(self) -> AbstractAsyncContextManager[AsyncPsycopgConnection]:
        """Begin a savepoint, for the transaction of a step."""

    def result(self, id: int) -> Any:
        """Return the result of a job that has succeeded."""

    async def result_async(self, id: int) -> Any:
        """Return the result of a job that has succeeded."""


class Refusal:
    """Takes the place of a client's calls, and refuses all of them."""

    def __init__(self, why: str) -> None:
        self.no_worker = why

    def _refuse(self) -> NoReturn:
        raise RuntimeError(self.no_worker)

    def call(self, *_: Any) -> NoReturn:
        """Refuse."""
        self._refuse()

    async def call_async(self, *_: Any) -> NoReturn:
        """Refuse."""
        self._refuse()

    def transaction(self) -> NoReturn:
        """Refuse."""
        self._refuse()

    def transaction_async(self) -> NoReturn:
        """Refuse."""
        self._refuse()

    def result(self, _: int) -> NoReturn:
        """Refuse."""
        self._refuse()

    async def result_async(self, _: int) -> NoReturn:
        """Refuse."""
        self._refuse()


class ClientBase:
    """The database and the codec of an application, and the defaults of its tasks by name."""

    def __init__(
        self,
        source: Source,
        *,
        headers: Callable[[str], Mapping[str, Any]] | None = None,
        middleware: Sequence[Any] = (),
        defer_middleware: Sequence[Any] = (),
        max_connections: int = 20,
        pools: Sequence[AnyPool] = (),
    ) -> None:
        self.source = source
        #: The application's own pools, from which calls borrow connections; empty: own connections.
        self.callers_pools = pools
        self.codec = Codec()
        #: Returns a job's headers, by its task's name.
        self.headers = headers
        #: Middleware around handlers; the first one is the outermost.
        self.middleware = tuple(middleware)
        #: Middleware around calls that defer, likewise.
        self.defer_middleware = tuple(defer_middleware)
        self.defaults: dict[str, JobOptions] = {}
        #: The version of each known task's arguments.
        self.versions: dict[str, int] = {}
        #: The modules that a worker's process imports to have all tasks; None: the task's module.
        self.child_module: str | None = None
        #: Only in tests; else None.
        self.stand_in: StandIn | None = None
        self._max_connections = max_connections
        self._registered: dict[str, JobOptions] = {}
        self._may_register = True
        #: Whether it registers all tasks at once: until a transaction holds one of them.
        self._registers_all = True
        self.open_pools()

    def open_pools(self) -> None:
        """Create pools for the source; they open connections when first needed."""
        self.own_pool = SyncPool(self.source, most=self._max_connections)
        self.own_pool_async = AsyncPool(self.source, most=self._max_connections)
        self.pool: SyncPool | CallersPool = self.own_pool
        self.pool_async: AsyncPool | AsyncCallersPool = self.own_pool_async
        # If there is only a pool of the other kind, calls are refused: they must not bypass it.
        for pool in self.callers_pools:
            if is_pool(pool, "ConnectionPool") or len(self.callers_pools) == 1:
                self.pool = CallersPool(pool)
            if is_pool(pool, "AsyncConnectionPool") or len(self.callers_pools) == 1:
                self.pool_async = AsyncCallersPool(pool)
        # Separate, because a call may wait for the result of a job that another has yet to defer.
        self.waiting_pool = SyncPool(self.source.notify_source or self.source)

    def check_worker(self) -> None:
        """Raise RuntimeError if no worker may run here: in a test's block."""
        if self.stand_in is not None:
            raise RuntimeError(self.stand_in.no_worker)

    def dumps_args(self, task: str, args: Mapping[str, Any] | None) -> str:
        """Return the JSON of arguments by name, with the task's version if it is not 1."""
        named = checked_mapping("args", {} if args is None else args)
        if (version := self.versions.get(task, 1)) > 1:
            named.setdefault(VERSION, version)
        return self.codec.dumps_args(named)

    def unregistered(self, names: Iterable[str]) -> dict[str, JobOptions]:
        """Return the defaults of those of these tasks that are defined here but not registered."""
        if not self._may_register:
            return {}
        return {
            name: defaults
            for name in dict.fromkeys(names)
            if (defaults := self.defaults.get(name)) is not None
            and self._registered.get(name) is not defaults
        }

    def forbidden_to_register(self) -> None:
        """Remember and log that this role may not register tasks."""
        self._may_register = False
        log.info("this role may not register tasks: jobs get the defaults that workers register")


def registration(
    defaults: Mapping[str, JobOptions], patience: str | None = None
) -> tuple[Statement, dict[str, str]]:
    """Return the statement that registers tasks, and its parameters."""
    parameters = {"tasks": tasks_json(defaults)}
    if patience is None:
        return REGISTER_TASKS, parameters
    return TRY_REGISTER_TASKS, {**parameters, "patience": patience}


def tasks_json(defaults: Mapping[str, JobOptions]) -> str:
    """Return the parameter of sql.REGISTER_TASKS."""
    # Sorted, so that two processes that register the same tasks lock them in the same order.
    tasks = {name: options.defaults() for name, options in defaults.items()}
    return json.dumps([{"name": name, "defaults": tasks[name]} for name in sorted(tasks)])

"""The client: what tasks, jobs and workers use in place of an App.

Tests: integration/test_many_databases.py, integration/test_forked.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import datetime as dt
from collections.abc import Iterator
from typing import Any, Self

from pgdefer.client.calls import ClientCalls
from pgdefer.client.calls_async import AsyncClientCalls
from pgdefer.database.results import Waiter, wait
from pgdefer.database.source import Source

__all__ = ["Client", "client_here"]


class Client(ClientCalls, AsyncClientCalls):
    """Calls to the database, from all threads and event loops. It knows nothing of tasks."""

    _waiters: dict[asyncio.AbstractEventLoop, Waiter]
    #: The client of which this is a copy for another database; see `bound`.
    origin: Client | None = None

    def open_pools(self) -> None:
        """Create pools, and forget the waiters for results of another source."""
        super().open_pools()
        self._waiters = {}

    def move(
        self, dsn: str, listen_dsn: str | None = None, *, pgbouncer: bool | None = None
    ) -> None:
        """Switch to another database. `pgbouncer=None` keeps the present setting."""
        self.close()
        pgbouncer = self.source.pgbouncer if pgbouncer is None else pgbouncer
        self.source = Source(dsn, pgbouncer=pgbouncer, listen_dsn=listen_dsn)
        self.callers_pools = ()  # they lead to the former database
        self.open_pools()
        self._registered, self._may_register = {}, True

    def bound(self, source: Source) -> Self:
        """Return a copy for another database, which may replace this client: see `entered`."""
        twin = copy.copy(self)
        twin.origin = self if self.origin is None else self.origin
        twin.source, twin.stand_in, twin.callers_pools = source, None, ()
        twin._registered, twin._may_register = {}, True
        twin.open_pools()
        return twin

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let this copy stand in for its origin in the block, in this thread or coroutine."""
        token = _entered.set(self)
        try:
            yield
        finally:
            _entered.reset(token)

    def close(self) -> None:
        """Close the connections of synchronous calls."""
        self.own_pool.close()
        self.waiting_pool.close()

    async def close_async(self) -> None:
        """Close the connections of the running event loop, and those of synchronous calls."""
        self.own_pool_async.close()
        waiter = self._waiters.pop(asyncio.get_running_loop(), None)
        if waiter is not None:
            waiter.close()
        self.close()

    def close_idle(self) -> None:
        """Close idle connections. Nobody must wait for a result meanwhile."""
        self.close()
        self.own_pool_async.close_idle()
        for waiter in list(self._waiters.values()):
            waiter.close()

    def result(self, id: int, timeout: float | dt.timedelta | None) -> Any:
        """Wait until a job has succeeded, and return its result: see `App.result`."""
        if self.stand_in is not None:
            return self.stand_in.result(id)
        return wait(id, _seconds(timeout), self.waiting_pool, self.source, self.codec)

    async def result_async(
        self,
        id: int,
        timeout: float | dt.timedelta | None,  # noqa: ASYNC109
    ) -> Any:
        """Wait until a job has succeeded, and return its result: see `App.result`."""
        if self.stand_in is not None:
            return await self.stand_in.result_async(id)
        loop = asyncio.get_running_loop()
        waiter = self._waiters.get(loop)
        if waiter is None:
            for other in [other for other in list(self._waiters) if other.is_closed()]:
                self._waiters.pop(other, None)  # another thread may have done it
            source = self.source.notify_source or self.source
            waiter = self._waiters[loop] = Waiter(source)
        return await waiter.wait(id, _seconds(timeout), self.codec)


def _seconds(timeout: object) -> float | None:
    if isinstance(timeout, dt.timedelta):
        return timeout.total_seconds()
    if timeout is None or (isinstance(timeout, int | float) and not isinstance(timeout, bool)):
        return timeout
    raise TypeError(f"timeout must be a number of seconds or a timedelta, not {timeout!r}")


_entered: contextvars.ContextVar[Client | None] = contextvars.ContextVar("client", default=None)


def client_here(client: Client) -> Client:
    """Return the client that stands in for this one: in a handler, that of its job's database."""
    entered = _entered.get()
    return entered if entered is not None and entered.origin is client else client

"""The application's own pool of psycopg_pool, from which each call takes a connection.

Tests: integration/test_pools.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from pgdefer.database.callers import AnyAsyncConnection, CallersConnection, is_pool, unfit, untaken
from pgdefer.database.source import AsyncPsycopgConnection

__all__ = ["AsyncCallersPool", "lent_async"]


class AsyncCallersPool:
    """Lends connections of the application's pool, and gives them back."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @contextlib.asynccontextmanager
    async def connection(
        self, *, waits: bool = True, undo: bool = False
    ) -> AsyncIterator[AsyncPsycopgConnection]:
        """Lend a connection; its transaction, if it has begun one, commits at the end.

        `waits` and `undo` have no effect: the application decides how long its pool waits, and what
        its sessions keep. Raises TypeError for a pool of the other kind, and the pool's own errors
        if it lends none.
        """
        del waits, undo
        if not is_pool(self._pool, "AsyncConnectionPool"):
            raise TypeError(unfit(self._pool))
        async with contextlib.AsyncExitStack() as stack:
            with untaken(self._pool):
                connection = await stack.enter_async_context(self._pool.connection())
            yield connection


@contextlib.asynccontextmanager
async def lent_async(connection: CallersConnection) -> AsyncIterator[AnyAsyncConnection]:
    """Lend the caller's connection, or one of the caller's pool."""
    if is_pool(connection):
        async with AsyncCallersPool(connection).connection() as taken:
            yield taken
    else:
        used: Any = connection
        yield used

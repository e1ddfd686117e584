# Generated from callers_pool_async.py: change that, and run `make generate`.
"""The application's own pool of psycopg_pool, from which each call takes a connection.

Tests: integration/test_pools.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pgdefer.database.callers import AnyConnection, CallersConnection, is_pool, unfit, untaken
from pgdefer.database.source import PsycopgConnection

__all__ = ["CallersPool", "lent"]


class CallersPool:
    """Lends connections of the application's pool, and gives them back."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @contextlib.contextmanager
    def connection(self, *, waits: bool = True, undo: bool = False) -> Iterator[PsycopgConnection]:
        """Lend a connection; its transaction, if it has begun one, commits at the end.

        `waits` and `undo` have no effect: the application decides how long its pool waits, and what
        its sessions keep. Raises TypeError for a pool of the other kind, and the pool's own errors
        if it lends none.
        """
        del waits, undo
        if not is_pool(self._pool, "ConnectionPool"):
            raise TypeError(unfit(self._pool))
        with contextlib.ExitStack() as stack:
            with untaken(self._pool):
                connection = stack.enter_context(self._pool.connection())
            yield connection


@contextlib.contextmanager
def lent(connection: CallersConnection) -> Iterator[AnyConnection]:
    """Lend the caller's connection, or one of the caller's pool."""
    if is_pool(connection):
        with CallersPool(connection).connection() as taken:
            yield taken
    else:
        used: Any = connection
        yield used

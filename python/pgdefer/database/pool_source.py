"""The database to which an application's own pools connect.

Tests: integration/test_pools.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from pgdefer.database.callers import AnyPool, is_pool
from pgdefer.database.source import Source, completed, of_libpq

__all__ = ["PoolSource", "pools_of"]


def pools_of(given: object) -> Sequence[AnyPool]:
    """Return the pools of an App: one, or one of each kind. Raises TypeError."""
    pools = given if isinstance(given, tuple) else (given,)
    kinds = {is_pool(pool, "AsyncConnectionPool") for pool in pools}
    if not pools or not all(map(is_pool, pools)) or len(kinds) != len(pools):
        raise TypeError(
            "connection of an App must be a ConnectionPool or an AsyncConnectionPool of "
            f"psycopg_pool, or a tuple with one of each, not {given!r}: a connection is given to "
            "the call that is to use it"
        )
    return pools


class PoolSource(Source):
    """The database of a pool, for the connections that an App needs beside the pool's."""

    def __init__(
        self, pool: Any, *, pgbouncer: bool = False, listen_dsn: str | None = None
    ) -> None:
        given = (pool.conninfo, pool.kwargs)
        if any(map(inspect.iscoroutinefunction, given)):
            raise ValueError(
                "the pool awaits its DSN: give the App a dsn, too, for its worker and for results"
            )
        super().__init__("", pgbouncer=pgbouncer, listen_dsn=listen_dsn)
        self._pool = pool

    def conninfo(self, *, restart: bool = False) -> str:
        """Return the DSN, as the pool has it now."""
        del restart
        dsn, named = (
            given() if callable(given) else given
            for given in (self._pool.conninfo, self._pool.kwargs)
        )
        return completed(dsn or "", **of_libpq(named or {}))

"""Django's connections: their parameters, whether they still work, and what a handler has left.

Tests: contrib/test_django_handlers.py, contrib/test_django_left_open.py.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import psycopg
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus

from pgdefer.database import sql
from pgdefer.database.execute import execute
from pgdefer.database.pool import is_usable
from pgdefer.database.source import DEFAULTS, Source, of_libpq

__all__ = [
    "DjangoSource",
    "close_connections",
    "discard",
    "end_implicit",
    "is_of_test",
    "leftover_connections",
    "leftover_state",
    "loses_writes",
    "renew_connections",
]


class DjangoSource(Source):
    """The database of an alias in DATABASES; in tests, the test database."""

    def __init__(
        self, alias: str, *, pgbouncer: bool = False, listen_alias: str | None = None
    ) -> None:
        super().__init__("", pgbouncer=pgbouncer)
        self.alias = alias
        if listen_alias is not None:
            self.notify_source = DjangoSource(listen_alias)

    def conninfo(self, *, restart: bool = False) -> str:
        """Return the DSN as it is now."""
        del restart
        connection = connections[self.alias]
        named = of_libpq(connection.get_connection_params())
        if role := connection.settings_dict["OPTIONS"].get("assume_role"):
            escaped = re.sub(r"([\\\s])", r"\\\1", role)
            named["options"] = f"{named.get('options', '')} -c role={escaped}".strip()
        return make_conninfo("", **{**DEFAULTS, **named})


def renew_connections() -> None:
    """Close this thread's connections that the server has closed, or that Django would close.

    Django itself notices a closed connection only when a statement fails.
    """
    for connection in _clean_connections():
        if isinstance(connection.connection, psycopg.Connection) and not is_usable(
            connection.connection
        ):
            connection.close()
        else:
            _close_if_obsolete(connection)


def close_connections() -> None:
    """Close this thread's connections that should not be kept, as Django does after a request."""
    for connection in _clean_connections():
        _close_if_obsolete(connection)


def _close_if_obsolete(connection: BaseDatabaseWrapper) -> None:
    if connection.errors_occurred and not connection.get_autocommit():
        connection.close()  # by Django's own test a transaction would begin
    else:
        connection.close_if_unusable_or_obsolete()


def _clean_connections() -> list[BaseDatabaseWrapper]:
    """Return this thread's open connections that are as a handler must find them."""
    every = connections.all(initialized_only=True)
    return [one for one in every if one.connection is not None and not leftover_state(one)]


def is_of_test(connection: BaseDatabaseWrapper) -> bool:
    """Whether it is in the transaction that a TestCase of Django begins."""
    blocks: list[Any] = connection.atomic_blocks
    return bool(blocks) and bool(blocks[0]._from_testcase)


def leftover_connections() -> list[BaseDatabaseWrapper]:
    """Return this thread's connections that were not left as a handler must find them.

    On such a connection, all further writes would be in a transaction that nobody commits. A
    connection that went back to Django's pool within a block is still in that block.
    """
    return [
        one
        for one in connections.all(initialized_only=True)
        if (one.connection is not None or one.in_atomic_block)
        and not is_of_test(one)
        and leftover_state(one)
    ]


def leftover_state(connection: BaseDatabaseWrapper) -> str | None:
    """Return how a connection differs from a new one, None if it does not."""
    wanted = connection.settings_dict["AUTOCOMMIT"]
    if connection.in_atomic_block:
        return "in a block of atomic()"
    status = _status(connection)
    if status not in (None, TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
        return f"in a transaction ({status.name})"
    driver = connection.connection
    of_driver = driver.autocommit if isinstance(driver, psycopg.Connection) else wanted
    if connection.get_autocommit() != wanted or of_driver != wanted:
        return "without autocommit" if wanted else "in autocommit"
    return None


def loses_writes(connection: BaseDatabaseWrapper) -> bool:
    """Whether something may have been written in the transaction that is open."""
    driver, status = connection.connection, _status(connection)
    if not isinstance(driver, psycopg.Connection):
        return bool(connection.in_atomic_block)
    if status == TransactionStatus.INTRANS:
        try:
            return bool(execute(driver, sql.MAY_HAVE_WRITTEN, {})[0][0])
        except psycopg.Error:
            return True
    if status == TransactionStatus.INERROR:
        return True
    return status != TransactionStatus.IDLE and (
        connection.in_atomic_block or not driver.autocommit
    )


def end_implicit(connection: BaseDatabaseWrapper) -> None:
    """Roll back the transaction that any statement begins if the settings turn autocommit off."""
    if not connection.settings_dict["AUTOCOMMIT"] and not connection.in_atomic_block:
        with contextlib.suppress(Error):
            connection.rollback()


def discard(connection: BaseDatabaseWrapper) -> None:
    """Close a connection, even within a transaction; Django opens it again when it is used."""
    one: Any = connection
    one.in_atomic_block = one.closed_in_transaction = one.needs_rollback = False
    one.savepoint_ids, one.atomic_blocks = [], []
    try:
        one.close()
    finally:
        one.connection = None


def _status(connection: BaseDatabaseWrapper) -> TransactionStatus | None:
    """Return the transaction's status, as psycopg reports it; None for other drivers."""
    driver = connection.connection
    return driver.info.transaction_status if isinstance(driver, psycopg.Connection) else None

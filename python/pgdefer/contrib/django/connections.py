"""Django's connections: their parameters, and whether they still work.

Tests: contrib/test_django.py, contrib/test_django_handlers.py.
"""

from __future__ import annotations

import re

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.conninfo import make_conninfo

from pgdefer.database.pool import is_usable
from pgdefer.database.source import DEFAULTS, Source, of_libpq

__all__ = ["DjangoSource", "close_connections", "renew_connections"]


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
    for connection in _idle_ones():
        if isinstance(connection.connection, psycopg.Connection) and not is_usable(
            connection.connection
        ):
            connection.close()
        else:
            connection.close_if_unusable_or_obsolete()


def close_connections() -> None:
    """Close this thread's connections that should not be kept, as Django does after a request."""
    for connection in _idle_ones():
        connection.close_if_unusable_or_obsolete()


def _idle_ones() -> list[BaseDatabaseWrapper]:
    """Return this thread's open connections that are not in a transaction."""
    every = connections.all(initialized_only=True)
    return [
        one
        for one in every
        if one.connection is not None and not one.in_atomic_block and one.get_autocommit()
    ]

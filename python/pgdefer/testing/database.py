"""A database with the queue, for the tests of one session.

Tests: integration/test_docs_testing.py.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

import psycopg
from psycopg.conninfo import make_conninfo

from pgdefer.database import sql
from pgdefer.database.install import install

__all__ = ["queue_database"]


@contextlib.contextmanager
def queue_database(server: str | None = None) -> Iterator[str]:
    """Create a database with the queue for the block, and yield its DSN.

    `server` is the DSN of any database of a server, with a role that may create others. By default
    this is $PGDEFER_TEST_SERVER; without that, a temporary server of the `embedded` extra is
    started.
    """
    server = server or os.environ.get("PGDEFER_TEST_SERVER")
    if server is None:
        from pgdefer.database.embedded import temporary_server  # noqa: PLC0415 (an extra)

        with temporary_server() as temporary:
            dsn = temporary.dsn()
            install(dsn)
            yield dsn
        return
    name = f"pgdefer_test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.create_database(name).psycopg)
        try:
            dsn = make_conninfo(server, dbname=name)
            install(dsn)
            yield dsn
        finally:
            connection.execute(sql.drop_database(name).psycopg)

"""Adding the functions of shards to a database.

Tests: cluster/test_map.py, cluster/test_plproxy.py.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path

import psycopg

from pgdefer.contrib.cluster import sql
from pgdefer.contrib.cluster.shards import ShardMap
from pgdefer.database.embedded import sql_folder
from pgdefer.database.execute import execute
from pgdefer.database.source import PsycopgConnection, Source
from pgdefer.errors import InvalidParameter, NotInstalled

__all__ = ["FILES", "check_are_apart", "folder", "has_map", "install", "self_of"]

FILES = ("cluster.sql", "defer.sql", "move_slot.sql", "leave.sql", "arrive.sql")


def folder(name: str) -> Path:
    """Return the folder of SQL that is installed on demand: cluster, plproxy, citus."""
    built = sql_folder()
    packed = built / name
    return packed if packed.exists() else built.parent / "extension" / name


def _connect(dsn: str) -> PsycopgConnection:
    """Connect as an app does: a DSN may be SQLAlchemy's, and a silent server is given up."""
    return psycopg.connect(Source(dsn).conninfo(), autocommit=True)


def self_of(dsn: str) -> str | None:
    """Return the name of the shard that a database is; None if it is none."""
    with _connect(dsn) as connection, contextlib.suppress(NotInstalled):
        name: str | None = execute(connection, sql.MAP, {})[0][0]["self"]
        return name
    return None


def has_map(dsn: str) -> bool:
    """Whether a database, which has the functions, has a map."""
    with _connect(dsn) as connection:
        return bool(execute(connection, sql.MAP, {})[0][0]["slots"])


def check_are_apart(shards: Mapping[str, str]) -> None:
    """Raise InvalidParameter if two DSNs lead to the same database, which can give a lock once."""
    lock = {"key": secrets.randbits(60)}
    with contextlib.ExitStack() as stack:
        for name, dsn in shards.items():
            connection = stack.enter_context(_connect(dsn))
            stack.enter_context(connection.transaction())
            if not execute(connection, sql.TRY_LOCK, lock)[0][0]:
                raise InvalidParameter(
                    f"the database of shard {name!r} is that of a shard before it",
                    hint="Give each shard a database of its own.",
                )


def install(
    dsn: str,
    *,
    self: str | None = None,
    shards: Mapping[str, str] | None = None,
    known: ShardMap | None = None,
) -> None:
    """Add the functions, or replace them; and make the first map, or take over a known one."""
    with _connect(dsn) as connection:
        for name in FILES:
            connection.execute((folder("cluster") / name).read_bytes())
        if shards is not None:
            execute(connection, sql.START, {"self": self, "shards": json.dumps(dict(shards))})
        if known is not None:
            execute(connection, sql.LEARN, {"self": self, "map": known.to_json()})

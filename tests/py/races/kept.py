"""What a storm that has failed leaves for analysis."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psycopg
from psycopg import sql


def keep_tables(dsn: str, name: str) -> Path:
    """Write the queue's tables and views to a new folder, each as CSV."""
    folder = Path(tempfile.mkdtemp(prefix=f"pgdefer-storm-{name}-"))
    with psycopg.connect(dsn, autocommit=True) as connection:
        tables = connection.execute(
            "select relname from pg_class where relnamespace = 'queue'::regnamespace"
            " and relkind in ('r', 'v') order by relname"
        ).fetchall()
        for (table,) in tables:
            copy = sql.SQL("copy (select * from queue.{}) to stdout (format csv, header)")
            with (
                (folder / f"{table}.csv").open("wb") as file,
                connection.cursor().copy(copy.format(sql.Identifier(table))) as rows,
            ):
                file.writelines(bytes(row) for row in rows)
    return folder

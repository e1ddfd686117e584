"""Commands that ask many databases: `--dsns`.

Tests: integration/test_cli_many.py.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, TypeVar

import psycopg
import typer

from pgdefer.errors import PgDeferError
from pgdefer.worker.databases import Database, DsnFile

from ._base import Exit, Rows, Session, connect, explained, fail, say, session

T = TypeVar("T")

DSNS = Annotated[
    Path | None,
    typer.Option(
        "--dsns",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Many databases, in place of --dsn: one DSN per line, # begins a comment.",
        show_default=False,
    ),
]
# How many databases are asked at a time.
AT_ONCE = 16


class Databases:
    """The databases that a command asks: one, whose name is None, or those of a file."""

    def __init__(self, sessions: Mapping[str | None, Session]) -> None:
        self._sessions = dict(sessions)

    def ask(self, question: Callable[[Session], T]) -> dict[str | None, T]:
        """Return the answers, by the names of the databases."""
        return {name: question(on) for name, on in self._sessions.items()}

    @property
    def missing(self) -> int:
        """The number of databases that could not be asked."""
        return 0


class _Many(Databases):
    """Databases that are asked at the same time. One that fails is not asked again."""

    def __init__(
        self, databases: list[Database], stack: contextlib.ExitStack, as_json: bool
    ) -> None:
        super().__init__({})
        self._left = databases
        self._stack = stack
        self._as_json = as_json
        self.failures: dict[str, tuple[Exit, str]] = {}

    @property
    def missing(self) -> int:
        return len(self.failures)

    def ask(self, question: Callable[[Session], T]) -> dict[str | None, T]:
        """Return the answers. Exits if no database has one."""
        found: dict[str | None, T] = {}

        def ask_one(database: Database) -> None:
            try:
                found[database.name] = question(self._session(database))
            except (psycopg.Error, PgDeferError, OSError) as error:
                self.failures[database.name] = explained(error)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(ask_one, self._left))
        self._left = [database for database in self._left if database.name in found]
        if not found:
            raise typer.Exit(max(code for code, _ in self.failures.values()))
        return {database.name: found[database.name] for database in self._left}

    def _session(self, database: Database) -> Session:
        if database.name not in self._sessions:
            connection = self._stack.enter_context(connect(database.dsn))
            self._sessions[database.name] = Session(connection, as_json=self._as_json)
        return self._sessions[database.name]


@contextlib.contextmanager
def databases(dsn: str | None, file: Path | None, *, as_json: bool) -> Iterator[Databases]:
    """Provide the database, or those of a file.

    Of these, those that fail are named in the end, and the command exits with 13.
    """
    if file is None:
        with session(dsn, as_json=as_json) as on:
            yield Databases({None: on})
        return
    if dsn not in (None, os.environ.get("PGDEFER_DSN")):
        fail(Exit.USAGE, "give --dsn or --dsns, not both.")
    if not (listed := list(DsnFile(file).read().values())):
        fail(Exit.USAGE, f"{file} lists no database")
    with contextlib.ExitStack() as stack:
        many = _Many(listed, stack, as_json)
        try:
            yield many
        finally:
            for name, (_, said) in sorted(many.failures.items()):
                say(f"{name}: {said}")
    if many.failures:
        raise typer.Exit(Exit.PARTLY)


def named(found: Mapping[str | None, Rows]) -> Rows:
    """Return the rows of all databases, each with its database's name."""
    values = [{"database": name} | row for name, rows in found.items() for row in rows.values]
    if any(rows.texts is None for rows in found.values()):
        return Rows(values)
    return Rows(
        values, [_named(name, text) for name, each in found.items() for text in each.texts or ()]
    )


def _named(name: str | None, text: str) -> str:
    """Return a row's JSON with its database's name."""
    if name is None or not text:
        return text
    return f'{{"database":{json.dumps(name, ensure_ascii=False)},{text.lstrip()[1:]}'

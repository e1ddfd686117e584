"""Commands that ask many databases: `--dsns`.

Tests: integration/test_cli_many.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psycopg
import typer

from pgdefer.database.own_threads import in_own_thread
from pgdefer.errors import PgDeferError
from pgdefer.worker.databases import Database, DsnFile

from ._base import (
    Exit,
    Rows,
    Session,
    check_one_place,
    connect,
    dsn_file,
    explained,
    fail,
    say,
    session,
)

T = TypeVar("T")

DSNS = Annotated[
    Path | None,
    dsn_file("Many databases, in place of --dsn: one DSN per line, # begins a comment."),
]
# How many databases are asked at a time, and how long one answer may take, in seconds.
AT_ONCE = 64
PATIENCE = 20.0


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
    """Databases that are asked at the same time. One that fails is not asked again.

    Each is asked in a thread that nobody waits for: a stopped server never answers.
    """

    def __init__(self, databases: list[Database], patience: float | None, *, as_json: bool) -> None:
        super().__init__({})
        self._left = databases
        self._patience = patience
        self._as_json = as_json
        self._connections: dict[str, psycopg.Connection[Any]] = {}
        self.failures: dict[str, tuple[Exit, str]] = {}

    @property
    def missing(self) -> int:
        return len(self.failures)

    def ask(self, question: Callable[[Session], T]) -> dict[str | None, T]:
        """Return the answers. Exits if no database has one."""
        found = asyncio.run(self._ask_all(question))
        self._left = [database for database in self._left if database.name in found]
        if not found:
            raise typer.Exit(max(code for code, _ in self.failures.values()))
        return found

    async def _ask_all(self, question: Callable[[Session], T]) -> dict[str | None, T]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def ask(database: Database) -> T:
            async with turns:
                return await in_own_thread(self._ask, database, question)

        asked = {database.name: asyncio.create_task(ask(database)) for database in self._left}
        _, late = await asyncio.wait(asked.values(), timeout=self._patience)
        found: dict[str | None, T] = {}
        for name, task in asked.items():
            if task in late:
                self.failures[name] = Exit.UNREACHABLE, f"no answer within {self._patience:g} s"
                continue
            try:
                found[name] = task.result()
            except (psycopg.Error, PgDeferError, OSError) as error:
                self.failures[name] = explained(error)
        return found

    def _ask(self, database: Database, question: Callable[[Session], T]) -> T:
        if database.name not in self._sessions:
            connection = self._connections[database.name] = connect(database.dsn)
            self._sessions[database.name] = Session(connection, as_json=self._as_json)
        try:
            answer = question(self._sessions[database.name])
        except BaseException:
            self._connections[database.name].close()
            raise
        if database.name in self.failures:  # it was given up meanwhile
            self._connections[database.name].close()
        return answer

    def close(self) -> None:
        """Close the connections that are not in use."""
        for database in self._left:
            if database.name in self._connections:
                self._connections[database.name].close()


@contextlib.contextmanager
def databases(
    dsn: str | None, file: Path | None, *, as_json: bool, patience: float | None
) -> Iterator[Databases]:
    """Provide the database, or those of a file.

    Databases of a file that fail, or do not answer in time, are named at the end, and the command
    exits with 13. It also does so if a line of the file can't be read; the log names the line.
    """
    if file is None:
        with session(dsn, as_json=as_json) as on:
            yield Databases({None: on})
        return
    check_one_place(dsn, file)
    listed = DsnFile(file)
    if not (found := list(listed.read().values())):
        fail(Exit.USAGE, f"{file} lists no database")
    many = _Many(found, patience, as_json=as_json)
    try:
        yield many
    finally:
        many.close()
        for name, (_, said) in sorted(many.failures.items()):
            say(f"{name}: {said}")
    if many.failures or listed.unreadable:
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

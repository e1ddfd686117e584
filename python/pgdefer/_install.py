"""Installing the queue into a database: as an extension, or by plain SQL where none may be made."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any, Literal

import psycopg

from . import _sql
from ._errors import NotInstalled, PgDeferError, translate, translated

__all__ = [
    "Form",
    "Found",
    "Installed",
    "choose",
    "install",
    "installed_version",
    "is_at_least",
    "offered_version",
    "plain_script",
]

Form = Literal["auto", "extension", "plain"]


@dataclasses.dataclass(frozen=True)
class Found:
    """What there is: the extension's files on the server; in the database it, or its functions."""

    is_available: bool
    is_created: bool
    has_code: bool


def choose(found: Found, form: Form) -> Literal["extension", "plain"]:
    """Return the form that an installation takes; one that is there keeps its form.

    Raises PgDeferError where that is not the form asked for, or the server lacks the files.
    """
    if found.is_created and form == "plain":
        raise PgDeferError(
            "the queue is installed as an extension here", hint="Install with --form extension."
        )
    if found.has_code and not found.is_created:
        if form == "extension":
            raise PgDeferError(
                "the queue is installed by plain SQL here", hint="Install with --form plain."
            )
        return "plain"
    if form == "extension" or found.is_created:
        if not found.is_available:
            raise PgDeferError(
                "the server has no files of the extension",
                hint="Copy them into its folder share/extension, or install with --form plain.",
            )
        return "extension"
    return "extension" if form == "auto" and found.is_available else "plain"


def _script() -> str:
    from ._server import sql_folder  # noqa: PLC0415 (not on every system)

    return (sql_folder() / "pgdefer.sql").read_text("utf-8")


def plain_script() -> str:
    """Return the plain SQL, to be run in a transaction of the caller's."""
    head, _, rest = _script().partition("\nbegin;\n")
    body, _, _ = rest.rpartition("\ncommit;\n")
    return f"{head}\n{body}"


def offered_version() -> str:
    """Return the version that this package installs."""
    found = re.match(r"-- pgdefer (\d+(?:\.\d+)*)", _script())
    assert found is not None
    return found[1]


def is_at_least(version: str, wanted: str) -> bool:
    """Compare two versions by their numbers."""
    mine, other = ([int(part) for part in text.split(".")] for text in (version, wanted))
    return mine >= other


@dataclasses.dataclass(frozen=True)
class Installed:
    """What `install` did."""

    version: str
    before: str | None
    form: str


def installed_version(connection: psycopg.Connection[tuple[str, str | None]]) -> str | None:
    """Return the version of the queue's tables, None where there are none."""
    try:
        row = connection.execute(_sql.VERSION.psycopg).fetchone()
    except psycopg.Error as error:
        if isinstance(translate(error), NotInstalled):
            return None
        raise
    return None if row is None else row[1]


def install(dsn: str, form: Form = "auto") -> Installed:
    """Install or upgrade the queue; a second call changes nothing.

    `auto` makes the extension where the server has its files and the role may, and otherwise runs
    the plain SQL, as `plain` does. Raises PgDeferError where neither is possible.
    """
    connection: psycopg.Connection[Any]
    with psycopg.connect(dsn, autocommit=True) as connection:
        before = installed_version(connection)
        done = _run(connection, form)
        # Large indexes of an upgrade, built without stopping anybody.
        for (statement,) in connection.execute(_sql.MIGRATION.psycopg).fetchall():
            connection.execute(str(statement).encode())
        with translated():
            version = installed_version(connection)
        if version is None:
            raise NotInstalled("the queue is not there after its installation")
        return Installed(version, before, done)


def _run(connection: psycopg.Connection[Any], form: Form) -> str:
    row = connection.execute(_sql.HAS_EXTENSION.psycopg).fetchone()
    assert row is not None
    found = Found(*row)
    if choose(found, form) == "extension":
        try:
            _patiently(connection, lambda: _make_extension(connection, is_created=found.is_created))
        except psycopg.errors.InsufficientPrivilege:
            if form == "extension" or found.is_created:
                raise
        else:
            return "extension"
    _patiently(connection, lambda: connection.execute(_script().encode()))
    return "plain"


def _make_extension(connection: psycopg.Connection[Any], *, is_created: bool) -> None:
    statements = [_sql.UPDATE_EXTENSION if is_created else _sql.CREATE_EXTENSION, _sql.INSTALL]
    for statement in statements:
        connection.execute(statement.psycopg)


def _patiently(connection: psycopg.Connection[Any], action: Callable[[], object]) -> None:
    """Try again where two installers met: CREATE does not wait for another's."""
    for patience in (0.2, 0.5, 1.0, 2.0, None):
        try:
            action()
        except (
            psycopg.errors.UniqueViolation,
            psycopg.errors.DuplicateObject,
            psycopg.errors.DuplicateTable,
            psycopg.errors.DuplicateFunction,
            psycopg.errors.DuplicateSchema,
            psycopg.errors.InternalError_,
            psycopg.errors.DeadlockDetected,
        ):
            connection.rollback()  # the plain file begins its own transaction
            if patience is None:
                raise
            time.sleep(patience)
        else:
            return

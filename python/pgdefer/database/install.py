"""Installing the queue into a database: as an extension, or by plain SQL if that is not allowed."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any, Literal

import psycopg

from pgdefer.database import sql
from pgdefer.errors import NotInstalled, PgDeferError, translate, translated

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
    """The state before installing: the server's files, the database's extension and functions."""

    is_available: bool
    is_created: bool
    has_code: bool


def choose(found: Found, form: Form) -> Literal["extension", "plain"]:
    """Return the form to install; an existing installation keeps its form.

    Raises PgDeferError if that is not the requested form, or if the server lacks the files.
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
    from pgdefer.database.embedded import sql_folder  # noqa: PLC0415 (not on every system)

    folder = sql_folder()
    if (folder / "pgdefer.sql").exists():
        return (folder / "pgdefer.sql").read_text("utf-8")
    # A wheel has the code of both forms once, in the extension's script (extension/hatch_build.py).
    scripts = (folder / "extension").glob("pgdefer--*.sql")
    (script,) = (path for path in scripts if path.stem.count("--") == 1)
    *_, code = script.read_text("utf-8").split("end\n$pgdefer_guard$;\n", 2)
    before, _, after = (folder / "plain.sql").read_text("utf-8").partition("-- @CODE@")
    return f"{before}{code.strip()}{after}"


def plain_script() -> str:
    """Return the plain SQL, to run in the caller's transaction."""
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
    """The result of `install`."""

    version: str
    before: str | None
    form: str


def installed_version(connection: psycopg.Connection[tuple[str, str | None]]) -> str | None:
    """Return the version of the queue's tables, None if there are none."""
    try:
        row = connection.execute(sql.VERSION.psycopg).fetchone()
    except psycopg.Error as error:
        if isinstance(translate(error), NotInstalled):
            return None
        raise
    return None if row is None else row[1]


def install(dsn: str, form: Form = "auto") -> Installed:
    """Install or upgrade the queue; a second call changes nothing.

    `auto` creates the extension if the server has its files and the role may. Otherwise it runs the
    plain SQL, as `plain` does. Raises PgDeferError if neither is possible.
    """
    connection: psycopg.Connection[Any]
    with psycopg.connect(dsn, autocommit=True) as connection:
        before = installed_version(connection)
        done = _run(connection, form)
        # Large indexes of an upgrade, built without blocking others.
        for (statement,) in connection.execute(sql.MIGRATION.psycopg).fetchall():
            connection.execute(str(statement).encode())
        with translated():
            version = installed_version(connection)
        if version is None:
            raise NotInstalled("the queue is missing after its installation")
        return Installed(version, before, done)


def _run(connection: psycopg.Connection[Any], form: Form) -> str:
    row = connection.execute(sql.HAS_EXTENSION.psycopg).fetchone()
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
    with connection.transaction():
        for statement in (
            sql.UPDATE_EXTENSION if is_created else sql.CREATE_EXTENSION,
            sql.INSTALL,
        ):
            connection.execute(statement.psycopg)


def _patiently(connection: psycopg.Connection[Any], action: Callable[[], object]) -> None:
    """Try again if another installer runs at the same time: CREATE does not wait for it."""
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

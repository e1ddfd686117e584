"""Installing the queue into a database: as an extension, or by plain SQL where none may be made."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Literal

import psycopg

from . import _sql
from ._errors import NotInstalled, PgDeferError, translate, translated

__all__ = ["Installed", "install", "installed_version"]

Form = Literal["auto", "extension", "plain"]


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
    with psycopg.connect(dsn, autocommit=True) as connection:
        before = installed_version(connection)
        done = _run(connection, form)
        with translated():
            version = installed_version(connection)
        if version is None:
            raise NotInstalled("the queue is not there after its installation")
        return Installed(version, before, done)


def _run(connection: psycopg.Connection[tuple[str, str | None]], form: Form) -> str:
    row = connection.execute(_sql.HAS_EXTENSION.psycopg).fetchone()
    is_available, is_created = row or (False, False)
    if form == "extension" and not is_available:
        raise PgDeferError(
            "the server has no files of the extension",
            hint="Copy them into its folder share/extension, or install with --plain.",
        )
    if form != "plain" and is_available:
        try:
            _patiently(lambda: _make_extension(connection, is_created=bool(is_created)))
        except psycopg.errors.InsufficientPrivilege:
            if form == "extension":
                raise
        else:
            return "extension"
    if is_created:
        raise PgDeferError(
            "the queue is installed as an extension here", hint="Install with --extension."
        )
    from ._server import sql_folder  # noqa: PLC0415 (not on every system)

    script = (sql_folder() / "pgdefer.sql").read_bytes()
    _patiently(lambda: connection.execute(script))
    return "plain"


def _make_extension(
    connection: psycopg.Connection[tuple[str, str | None]], *, is_created: bool
) -> None:
    statements = [_sql.UPDATE_EXTENSION if is_created else _sql.CREATE_EXTENSION, _sql.INSTALL]
    for statement in statements:
        connection.execute(statement.psycopg)


def _patiently(action: Callable[[], object]) -> None:
    """Try again where two installers met: CREATE does not wait for another's."""
    for patience in (0.2, 0.5, 1.0, 2.0, None):
        try:
            action()
        except (
            psycopg.errors.UniqueViolation,
            psycopg.errors.DuplicateObject,
            psycopg.errors.InternalError_,
            psycopg.errors.DeadlockDetected,
        ):
            if patience is None:
                raise
            time.sleep(patience)
        else:
            return

"""The queue in Alembic's migrations: within the application's own, or as a separate branch.

    from alembic import op
    import pgdefer.alembic

    def upgrade() -> None:
        pgdefer.alembic.install(op)

`pgdefer.alembic:versions` in `version_locations` is the branch `pgdefer`, which does the same. In
env.py, `include_name` and `include_object` keep the queue's tables out of autogenerate.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import sqlalchemy as sa
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError

from pgdefer.database import sql
from pgdefer.database.install import Form, Found, choose, is_at_least, offered_version, plain_script
from pgdefer.database.sql import Statement
from pgdefer.errors import (
    InvalidParameter,
    NotInstalled,
    PgDeferError,
    sqlstate_of,
    translate,
    translated,
)

__all__ = ["downgrade", "include_name", "include_object", "install", "upgrade"]

SCHEMA = "queue"
INSUFFICIENT_PRIVILEGE = "42501"

# A child of Alembic's logger, because Alembic's configuration silences all others.
log = logging.getLogger("alembic.pgdefer")


class Operations(Protocol):
    """The part of `alembic.op` in use here."""

    def get_context(self) -> MigrationContext: ...
    def get_bind(self) -> sa.Connection: ...


# Alembic's command line prints the message of a CommandError, and the traceback of any other error.


class _RefusedError(PgDeferError, CommandError):
    pass


class _NotInstalledError(NotInstalled, CommandError):
    pass


class _InvalidParameterError(InvalidParameter, CommandError):
    pass


REFUSALS: dict[type[PgDeferError], type[PgDeferError]] = {
    PgDeferError: _RefusedError,
    NotInstalled: _NotInstalledError,
    InvalidParameter: _InvalidParameterError,
}


@contextlib.contextmanager
def _refused_in_one_line() -> Iterator[None]:
    """Raise refusals as errors of Alembic, too."""
    try:
        yield
    except PgDeferError as error:
        refusal = REFUSALS.get(type(error))
        if refusal is None:
            raise
        raise refusal(error.message, detail=error.detail, hint=error.hint) from error


@contextlib.contextmanager
def _rights_explained() -> Iterator[None]:
    """Say which rights a role lacks that may not migrate."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        if sqlstate_of(error) != INSUFFICIENT_PRIVILEGE:
            raise
        raise PgDeferError(
            str(error.orig).partition("\n")[0],
            hint="Migrate as the owner of the queue, or as a role with CREATE on the database. If"
            " somebody else installs the queue, mark the migration as done, for the branch pgdefer"
            " by: alembic stamp pgdefer@head",
        ) from error


@_refused_in_one_line()
@_rights_explained()
def install(op: Operations, *, form: Form = "auto") -> None:
    """Install the queue in this package's version, or upgrade an existing one to it.

    `auto` creates the extension if the server has its files and the role may. Otherwise it runs
    the plain SQL. Offline (`--sql`) there is no server to ask: there `auto` writes the plain SQL,
    and `extension` must be requested.

    Raises PgDeferError if neither is possible.
    """
    context = op.get_context()
    if context.as_sql:
        _write(context, form, [sql.CREATE_EXTENSION, sql.INSTALL])
        return
    done = _install(op.get_bind(), form)
    log.info("pgdefer %s is installed (%s)", _version(op.get_bind()), done)


@_refused_in_one_line()
@_rights_explained()
def upgrade(op: Operations, version: str, *, form: Form = "auto") -> None:
    """Upgrade the queue to this package's version, which must be `version` or later.

    A migration names the version that the application needs from then on. So it has nothing
    left to do if it runs years later with a newer package. Indexes that are built
    concurrently (`queue.migration()`) are built after the migration's transaction has committed.

    Raises NotInstalled, and PgDeferError if the package or the server's files are older.
    """
    context = op.get_context()
    if not is_at_least(offered_version(), version):
        raise PgDeferError(
            f"the migration wants pgdefer {version}, and this is {offered_version()}",
            hint=f"pip install 'pgdefer>={version}'",
        )
    if context.as_sql:
        _write(context, form, [sql.UPDATE_EXTENSION, sql.MIGRATE])
        return
    bind = op.get_bind()
    before = _version(bind)
    if before is None:
        raise NotInstalled(
            "there is no queue to upgrade", hint="Install it before: pgdefer.alembic.install(op)."
        )
    if not is_at_least(before, version):
        _install(bind, form)
        after = _version(bind)
        if after is None or not is_at_least(after, version):
            raise PgDeferError(
                f"the migration wants pgdefer {version}, and the server has the files of {after}",
                hint="Copy those of this package's version into its folder share/extension.",
            )
        log.info("pgdefer was upgraded from %s to %s", before, after)
    if pending := _rows(bind, sql.MIGRATION):
        with context.autocommit_block():
            for (statement,) in pending:
                _run(op.get_bind(), statement)


@_refused_in_one_line()
def downgrade(op: Operations, version: str | None = None, *, force: bool = False) -> None:
    """Undo `install`; or with a version undo `upgrade`, which leaves the queue unchanged.

    Undoing `install` removes every job, so `queue.uninstall` refuses it without `force`. If the
    queue was installed by plain SQL, its functions stay, because triggers may call them; they
    raise QJ090.

    Tables never return to an earlier version, and need not: clients of the previous release work
    with them. So undoing `upgrade` does nothing, and logs that.
    """
    context = op.get_context()
    if version is not None:
        log.warning("pgdefer stays as it is: its tables do not go back to %s", version)
        return
    statement = sql.UNINSTALL_BY_FORCE if force else sql.UNINSTALL
    if context.as_sql:
        context.impl.static_output(f"{statement.text};\n\n{sql.DROP_EXTENSION.text};")
        return
    bind = op.get_bind()
    if _version(bind) is None:
        log.warning("there is no queue to remove")
        return
    try:
        with translated():
            _run(bind, statement.text)
    except InvalidParameter as error:
        if not force:
            error.hint = (
                "Pass force=True to downgrade to remove them; for the branch pgdefer, call"
                " alembic -x pgdefer_force=yes."
            )
        raise
    if _found(bind).is_created:
        _run(bind, sql.DROP_EXTENSION.text)


def include_name(name: str | None, type_: str, parent_names: object) -> bool:
    """For `include_name` in env.py, with `include_schemas`: leave the queue's schema out."""
    del parent_names
    return not (type_ == "schema" and name == SCHEMA)


def include_object(
    object: Any,  # noqa: A002 (Alembic's own name)
    name: str | None,
    type_: str,
    reflected: bool,
    compare_to: object,
) -> bool:
    """For `include_object` in env.py: leave out the queue's schema, also the models."""
    del name, type_, reflected, compare_to
    table = getattr(object, "table", object)
    return getattr(table, "schema", None) != SCHEMA


@_refused_in_one_line()
def form_of(text: str) -> Form:
    """Return a form by its name, for `-x pgdefer=plain`. Raises InvalidParameter."""
    forms: dict[str, Form] = {"auto": "auto", "extension": "extension", "plain": "plain"}
    try:
        return forms[text]
    except KeyError:
        raise InvalidParameter(f"pgdefer={text}: give one of {', '.join(forms)}") from None


def _install(bind: sa.Connection, form: Form) -> str:
    """Install the queue, or upgrade it to this package's version; return its form."""
    found = _found(bind)
    chosen = choose(found, form)
    if chosen == "extension":
        statement = sql.UPDATE_EXTENSION if found.is_created else sql.CREATE_EXTENSION
        try:
            with bind.begin_nested():
                _run(bind, statement.text)
        except sa.exc.DBAPIError as error:
            if found.is_created or form == "extension":
                raise
            if sqlstate_of(error) != INSUFFICIENT_PRIVILEGE:
                raise
        else:
            _run(bind, sql.INSTALL.text)
            return "extension"
    _run_script(bind, plain_script())
    _run(bind, sql.AFTER_PLAIN_CODE.text)
    _run(bind, sql.AFTER_PLAIN_MESSAGES.text)
    return "plain"


def _found(bind: sa.Connection) -> Found:
    (row,) = _rows(bind, sql.HAS_EXTENSION)
    return Found(*row)


def _version(bind: sa.Connection) -> str | None:
    """Return the version of the tables, None if there are none."""
    if not _found(bind).has_code:
        return None
    with translated():
        (row,) = _rows(bind, sql.VERSION)
    return None if row[1] is None else str(row[1])


def _rows(bind: sa.Connection, statement: Statement) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in bind.execute(sa.text(statement.text))]


def _run(bind: sa.Connection, text: str) -> None:
    """Run one statement, in which neither % nor : marks a parameter."""
    bind.exec_driver_sql(text, execution_options={"no_parameters": True})


def _run_script(bind: sa.Connection, text: str) -> None:
    """Run many statements. Raises the driver's errors: SQLAlchemy's would show all of the text."""
    if bind.dialect.driver != "asyncpg":
        try:
            _run(bind, text)
        except sa.exc.DBAPIError as error:
            raise (translate(error) or error.orig or error) from None
        return
    # The driver takes many statements only unprepared, and SQLAlchemy prepares them.
    _run(bind, "select 1")  # begins the transaction
    connection: Any = bind.connection.dbapi_connection
    connection.run_async(lambda own: own.execute(text))


def _write(context: MigrationContext, form: Form, extension: Sequence[Statement]) -> None:
    """Write the SQL of an installation."""
    if form == "extension":
        statements = [statement.text for statement in extension]
    else:
        after = (sql.AFTER_PLAIN_CODE, sql.AFTER_PLAIN_MESSAGES)
        statements = [plain_script(), *(statement.text for statement in after)]
    for text in statements:
        context.impl.static_output(text.rstrip().removesuffix(";") + ";")

"""The queue in Alembic's migrations: as steps of the application's own, or a branch of its own.

    from alembic import op
    import pgdefer.alembic

    def upgrade() -> None:
        pgdefer.alembic.install(op)

`pgdefer.alembic:versions` in `version_locations` is the branch `pgdefer`, which does the same. In
env.py, `include_name` and `include_object` keep the queue's tables out of autogenerate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import sqlalchemy as sa
from alembic.runtime.migration import MigrationContext

from pgdefer import _sql
from pgdefer._errors import NotInstalled, PgDeferError, sqlstate_of, translate, translated
from pgdefer._install import Form, Found, choose, is_at_least, offered_version, plain_script
from pgdefer._sql import Statement

__all__ = ["downgrade", "include_name", "include_object", "install", "upgrade"]

SCHEMA = "queue"
INSUFFICIENT_PRIVILEGE = "42501"

# Below Alembic's own, whose configuration silences all others.
log = logging.getLogger("alembic.pgdefer")


class Operations(Protocol):
    """What is used of `alembic.op`."""

    def get_context(self) -> MigrationContext: ...
    def get_bind(self) -> sa.Connection: ...


def install(op: Operations, *, form: Form = "auto") -> None:
    """Install the queue, of this package's version; where it is there already, bring it to that.

    `auto` makes the extension where the server has its files and the role may, and otherwise runs
    the plain SQL. Offline (`--sql`) nobody can ask the server: there `auto` writes the plain SQL,
    and `extension` has to be asked for.

    Raises PgDeferError where neither is possible.
    """
    context = op.get_context()
    if context.as_sql:
        _write(context, form, [_sql.CREATE_EXTENSION, _sql.INSTALL])
        return
    done = _install(op.get_bind(), form)
    log.info("pgdefer %s is installed (%s)", _version(op.get_bind()), done)


def upgrade(op: Operations, version: str, *, form: Form = "auto") -> None:
    """Bring the queue to `version` or later: to this package's.

    A migration names the version that the application needs from there on, so that one that is run
    again, years later and with a newer package, finds it done. Indexes that are built without
    stopping anybody (`queue.migration()`) are built outside the migration's transaction, which is
    committed before that.

    Raises NotInstalled, and PgDeferError where the package or the server's files are older.
    """
    context = op.get_context()
    if not is_at_least(offered_version(), version):
        raise PgDeferError(
            f"the migration wants pgdefer {version}, and this is {offered_version()}",
            hint=f"pip install 'pgdefer>={version}'",
        )
    if context.as_sql:
        _write(context, form, [_sql.UPDATE_EXTENSION, _sql.MIGRATE])
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
    if pending := _rows(bind, _sql.MIGRATION):
        with context.autocommit_block():
            for (statement,) in pending:
                _run(op.get_bind(), statement)


def downgrade(op: Operations, version: str | None = None, *, force: bool = False) -> None:
    """Undo `install`; or, with a version, `upgrade`, which means to leave the queue as it is.

    What `install` made is removed with every job, so that `queue.uninstall` refuses it without
    `force`. Where the queue was installed by plain SQL its functions stay, as triggers may call
    them; they raise QJ090.

    The tables do not go back to an earlier version, and need not: clients of the release before
    work with them. So nothing is done, and said.
    """
    context = op.get_context()
    if version is not None:
        log.warning("pgdefer stays as it is: its tables do not go back to %s", version)
        return
    statement = _sql.UNINSTALL_BY_FORCE if force else _sql.UNINSTALL
    if context.as_sql:
        context.impl.static_output(f"{statement.text};\n\n{_sql.DROP_EXTENSION.text};")
        return
    bind = op.get_bind()
    if _version(bind) is None:
        log.warning("there is no queue to remove")
        return
    with translated():
        _run(bind, statement.text)
    if _found(bind).is_created:
        _run(bind, _sql.DROP_EXTENSION.text)


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
    """For `include_object` in env.py: leave out what is in the queue's schema, models included."""
    del name, type_, reflected, compare_to
    table = getattr(object, "table", object)
    return getattr(table, "schema", None) != SCHEMA


def form_of(text: str) -> Form:
    """Return a form by its name, as `-x pgdefer=plain` gives it. Raises ValueError."""
    forms: dict[str, Form] = {"auto": "auto", "extension": "extension", "plain": "plain"}
    try:
        return forms[text]
    except KeyError:
        raise ValueError(f"pgdefer={text}: give one of {', '.join(forms)}") from None


def _install(bind: sa.Connection, form: Form) -> str:
    """Make the queue, or bring it to this package's version; return which form it has."""
    found = _found(bind)
    chosen = choose(found, form)
    if chosen == "extension":
        statement = _sql.UPDATE_EXTENSION if found.is_created else _sql.CREATE_EXTENSION
        try:
            with bind.begin_nested():
                _run(bind, statement.text)
        except sa.exc.DBAPIError as error:
            if found.is_created or form == "extension":
                raise
            if sqlstate_of(error) != INSUFFICIENT_PRIVILEGE:
                raise
        else:
            _run(bind, _sql.INSTALL.text)
            return "extension"
    _run_script(bind, plain_script())
    _run(bind, _sql.AFTER_PLAIN_CODE.text)
    _run(bind, _sql.AFTER_PLAIN_MESSAGES.text)
    return "plain"


def _found(bind: sa.Connection) -> Found:
    (row,) = _rows(bind, _sql.HAS_EXTENSION)
    return Found(*row)


def _version(bind: sa.Connection) -> str | None:
    """Return the version of the tables, None where there are none."""
    if not _found(bind).has_code:
        return None
    with translated():
        (row,) = _rows(bind, _sql.VERSION)
    return None if row[1] is None else str(row[1])


def _rows(bind: sa.Connection, statement: Statement) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in bind.execute(sa.text(statement.text))]


def _run(bind: sa.Connection, text: str) -> None:
    """Run one statement, in which neither % nor : stands for a parameter."""
    bind.exec_driver_sql(text, execution_options={"no_parameters": True})


def _run_script(bind: sa.Connection, text: str) -> None:
    """Run many statements. Raises the driver's errors: SQLAlchemy's would show all of the text."""
    if bind.dialect.driver != "asyncpg":
        try:
            _run(bind, text)
        except sa.exc.DBAPIError as error:
            raise (translate(error) or error.orig or error) from None
        return
    # It takes many only where there is nothing to prepare, and SQLAlchemy's way prepares.
    _run(bind, "select 1")  # begins the transaction
    connection: Any = bind.connection.dbapi_connection
    connection.run_async(lambda own: own.execute(text))


def _write(context: MigrationContext, form: Form, extension: Sequence[Statement]) -> None:
    """Write what an installation takes, as SQL."""
    if form == "extension":
        statements = [statement.text for statement in extension]
    else:
        after = (_sql.AFTER_PLAIN_CODE, _sql.AFTER_PLAIN_MESSAGES)
        statements = [plain_script(), *(statement.text for statement in after)]
    for text in statements:
        context.impl.static_output(text.rstrip().removesuffix(";") + ";")

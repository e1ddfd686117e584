"""The migration operation that installs and upgrades the queue.

Tests: contrib/test_django.py.
"""

from __future__ import annotations

from typing import Any, cast

import psycopg
from django.db import DatabaseError, transaction
from django.db.migrations.operations.base import Operation

from pgdefer.contrib.django import conf
from pgdefer.database import sql
from pgdefer.database.callers import rows_on_django
from pgdefer.database.install import Form, Found, choose, plain_script
from pgdefer.errors import sqlstate_of, translated

__all__ = ["InstallQueue"]


class InstallQueue(Operation):
    """Installs the queue in this package's version, or upgrades it; repeating it changes nothing.

    Backwards it removes the queue if no job is lost by that; else `queue.uninstall` refuses.
    """

    reduces_to_sql = True
    reversible = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: the models are views."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Install the queue in the migration's transaction: as an extension if that is possible."""
        del app_label, from_state, to_state
        settings = conf.read()
        connection = schema_editor.connection
        if connection.alias != settings.DATABASE:
            return
        if schema_editor.collect_sql:
            schema_editor.execute(plain_script(), params=None)
            return
        (row,) = rows_on_django(connection, sql.HAS_EXTENSION, {})
        found = Found(*row)
        form = choose(found, cast("Form", settings.FORM))
        if form == "extension" and _make_extension(
            schema_editor, found, is_needed=form == settings.FORM
        ):
            return
        schema_editor.execute(plain_script(), params=None)
        for statement in (sql.AFTER_PLAIN_CODE, sql.AFTER_PLAIN_MESSAGES):
            schema_editor.execute(statement.text, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Remove the queue. The functions of the plain form stay, as triggers may call them."""
        del app_label, from_state, to_state
        alias = schema_editor.connection.alias
        if alias != conf.read().DATABASE:
            return
        with translated():
            schema_editor.execute(sql.UNINSTALL_IF_EMPTY.text, params=None)
        schema_editor.execute(sql.DROP_EXTENSION.text, params=None)

    def describe(self) -> str:
        """Return a description of the operation."""
        return "Install or upgrade the job queue"

    @property
    def migration_name_fragment(self) -> str:
        """The name of a migration that only does this."""
        return "install"


def _make_extension(schema_editor: Any, found: Found, *, is_needed: bool) -> bool:
    """Create or update the extension; return False if this role may not, and need not."""
    statement = sql.UPDATE_EXTENSION if found.is_created else sql.CREATE_EXTENSION
    try:
        with transaction.atomic(using=schema_editor.connection.alias):
            schema_editor.execute(statement.text, params=None)
    except DatabaseError as error:
        is_forbidden = sqlstate_of(error) == psycopg.errors.InsufficientPrivilege.sqlstate
        if found.is_created or is_needed or not is_forbidden:
            raise
        return False
    schema_editor.execute(sql.INSTALL.text, params=None)
    return True

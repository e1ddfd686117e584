"""Reads and calls of visitors, as their own database roles.

Tests: contrib/test_web.py, contrib/test_web_faults.py.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg.types.string import TextLoader

from .pool import Connection, Full, Pool

__all__ = ["Database", "LoginRefused", "Reader", "Refused", "Unreachable"]

Row = dict[str, Any]

CONNECT_TIMEOUT = 5  # s
STATEMENT_TIMEOUT = 5_000  # ms
STALE_AFTER = 2.0  # s; after that a connection is tested before it is used
# Of each transaction, not of the session: behind pgbouncer others have that next.
SETTINGS = {
    "statement_timeout": str(STATEMENT_TIMEOUT),
    "lock_timeout": "2000",
    "idle_in_transaction_session_timeout": "10000",
    "timezone": "UTC",
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "search_path": "pg_catalog",
    "jit": "off",  # compiling takes longer than a page's statement
}
# The server ended a session because the page was idle for too long within a transaction.
IDLED = "25P03"
# Authentication methods that require a password. Any other would accept whatever role is named.
PASSWORDS = "scram-sha-256,md5,password"

ABOUT = """
select current_user::text as role,
  array(select p.proname::text from pg_proc p where p.pronamespace = 'queue'::regnamespace
    and has_function_privilege(p.oid, 'execute')) as functions,
  array(select c.relname::text from pg_class c where c.relnamespace = 'queue'::regnamespace
    and c.relkind = 'v' and has_table_privilege(c.oid, 'select')) as views
"""


class Unreachable(Exception):  # noqa: N818 (what it says)
    """The server can't be reached, or the connection was lost."""


class LoginRefused(Exception):  # noqa: N818
    """The server does not accept this role with this password."""


class Refused(Exception):  # noqa: N818
    """The server refused a call or a value: its message, without internals of the page."""

    def __init__(self, sqlstate: str, message: str, detail: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message
        self.detail = detail
        self.hint = hint


class Reader:
    """One visit: its statements are kept with their values, to be shown."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.statements: list[tuple[str, dict[str, Any]]] = []

    def rows(self, statement: str, **values: Any) -> list[Row]:
        """Run a statement and return its rows."""
        self.statements.append((statement.strip(), values))
        return self._connection.execute(statement.encode(), values).fetchall()

    def one(self, statement: str, **values: Any) -> Row | None:
        """Return the first row, or None if there is none."""
        return next(iter(self.rows(statement, **values)), None)


class Database:
    """Connections to one database as one role. At most one stays open while idle."""

    def __init__(self, conninfo: str, pool: Pool, *, role: str | None = None, **login: str) -> None:
        self._pool = pool
        self._settings = SETTINGS if role is None else {**SETTINGS, "role": role}
        changes = (f"pg_catalog.set_config('{name}', %({name})s, true)" for name in self._settings)
        self._begin = (
            f"select pg_catalog.pg_is_in_recovery() as is_standby, {', '.join(changes)}".encode()
        )
        #: Whether the server was a standby when it was visited last.
        self.is_standby = False
        self._conninfo = make_conninfo(
            conninfo, connect_timeout=CONNECT_TIMEOUT, application_name="pgdefer page", **login
        )

    @contextlib.contextmanager
    def visit(self, *, writes: bool = False) -> Iterator[Reader]:
        """Run statements in one transaction, read-only unless it writes."""
        connection = self._take()
        try:
            connection.read_only = None if writes else True  # None: as the role's default says
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            with translated(), connection.transaction():
                row = connection.execute(self._begin, self._settings).fetchone()
                self.is_standby = row is not None and row["is_standby"]
                yield Reader(connection)
        finally:
            self._pool.give(self, connection)

    def close(self) -> None:
        """Close the idle connection."""
        self._pool.close(self)

    def _take(self) -> Connection:
        idle, since = self._pool.take(self)
        if idle is not None and time.monotonic() - since > STALE_AFTER:
            try:
                idle.execute("select")
                idle.rollback()
            except psycopg.Error:
                idle.close()
                idle = None
        try:
            return idle or self._connect()
        except BaseException:
            self._pool.give(self, None)
            raise

    def _connect(self) -> Connection:
        try:
            connection = psycopg.connect(
                self._conninfo, row_factory=dict_row, prepare_threshold=None
            )
        except psycopg.OperationalError as error:
            # libpq's text names hosts
            raise cause_of(error) from None
        # as text: infinity, and years that Python does not support
        for name in ("timestamptz", "interval", "date", "timestamp"):
            connection.adapters.register_loader(name, TextLoader)
        return connection


def cause_of(error: psycopg.OperationalError) -> Full | LoginRefused | Unreachable:
    """Return why nobody could connect: libpq passes on a text, but no SQLSTATE.

    In other languages than English, a server that is full looks like one that refuses a password.
    """
    text, connection = str(error), error.pgconn
    if re.search("FATAL: +(sorry, )?(too many|remaining connection slots)", text):
        return Full()
    if connection is not None and (connection.used_password or connection.needs_password):
        return LoginRefused()
    is_refusal = "authentication" in text or "role " in text
    return LoginRefused() if is_refusal else Unreachable()


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise the errors of this module in place of psycopg's."""
    try:
        yield
    except psycopg.Error as error:
        state = error.sqlstate
        if state is None and isinstance(error, (psycopg.DataError, psycopg.ProgrammingError)):
            raise Refused("22000", "PostgreSQL can't store this text.") from None
        if state is None or state == IDLED or (state[:2] in ("08", "57") and state != "57014"):
            raise Unreachable from None
        diag = error.diag
        raise Refused(
            state,
            diag.message_primary or "refused",
            diag.message_detail or "",
            diag.message_hint or "",
        ) from None


def login_with(
    conninfo: str, pool: Pool, role: str, password: str, *, needs_password: bool
) -> Database:
    """Return the database, with a role that logs in by its password."""
    login = {"user": role, "password": password}
    if needs_password:
        login["require_auth"] = PASSWORDS
    return Database(conninfo, pool, **login)

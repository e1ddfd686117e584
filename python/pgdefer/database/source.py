"""The address of the database, and connections to it.

Tests: integration/test_connections.py, integration/test_cli_wrong_input.py.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Format
from psycopg.types.datetime import TimestamptzBinaryLoader, TimestamptzLoader

from pgdefer._text import logger
from pgdefer.checks import check_flag
from pgdefer.database import sql
from pgdefer.database.addresses import with_addresses
from pgdefer.database.own_threads import in_own_thread
from pgdefer.errors import InvalidParameter

if TYPE_CHECKING:
    from pgdefer.database.embedded import EmbeddedServer

__all__ = [
    "DSN",
    "FIRST",
    "LAST",
    "LOCATING",
    "PLACE",
    "AsyncPsycopgConnection",
    "PsycopgConnection",
    "Source",
    "adapt",
    "adapt_own",
    "close_now",
    "completed",
    "of_libpq",
]

AsyncPsycopgConnection = psycopg.AsyncConnection[tuple[Any, ...]]
PsycopgConnection = psycopg.Connection[tuple[Any, ...]]

log = logger("pgdefer")

# The environment variable whose DSN counts wherever none is given.
DSN = "PGDEFER_DSN"
# libpq's environment variables that name a database.
LOCATING = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")
# The parts of a DSN that say which database it is.
PLACE = ("service", "host", "hostaddr", "port", "dbname")

# With these, a dead peer is noticed within half a minute, regardless of the system's defaults.
DEFAULTS: dict[str, Any] = {
    "fallback_application_name": "pgdefer",
    "client_encoding": "UTF8",
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
# The text of a SQLAlchemy URL.
_WHOLE_URL = "pass url.render_as_string(hide_password=False)"
# libpq's parameters; those of pools and of Django include psycopg's own.
_LIBPQ = frozenset(option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults())


@contextlib.contextmanager
def _connecting() -> Iterator[None]:
    """Mark the errors of failed connects: with them it is certain that no call has been made."""
    try:
        yield
    except psycopg.OperationalError as error:
        error.is_unreached = True  # type: ignore[attr-defined]
        raise


# These represent moments that a datetime can't hold, infinity for example, in any time zone.
FIRST = dt.datetime(1, 1, 2, tzinfo=dt.UTC)
LAST = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)


class _TextTime(TimestamptzLoader):
    """Loads moments that a datetime can't hold as FIRST or LAST."""

    def load(self, data: Buffer) -> dt.datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            text = bytes(data)
            return FIRST if text.startswith(b"-") or text.endswith(b"BC") else LAST


class _BinaryTime(TimestamptzBinaryLoader):
    """As _TextTime, for the binary format."""

    def load(self, data: Buffer) -> dt.datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            return FIRST if bytes(data)[0] & 0x80 else LAST


class _BinaryJson(Loader):
    """Loads jsonb with Python's json, even if the program has called psycopg's set_json_loads."""

    format = Format.BINARY

    def load(self, data: Buffer) -> Any:
        return json.loads(bytes(data)[1:])  # after the byte of the format's version


class Source:
    """A DSN, libpq's environment variables, or the embedded server; `kind` says which.

    If no DSN is given, that of PGDEFER_DSN counts. Without that and without any of libpq's
    variables, the source is the embedded server; if `embedded` is False, libpq's defaults count
    instead. The embedded server is started, and the queue is installed on it, when first needed.

    Behind pgbouncer in transaction mode, LISTEN does not work. Then `listen_dsn` may lead to the
    same database directly.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        embedded: bool | EmbeddedServer | None = None,
        pgbouncer: bool = False,
        listen_dsn: str | None = None,
    ) -> None:
        for name, given in (("dsn", dsn), ("listen_dsn", listen_dsn)):
            if given is not None and not isinstance(given, str):
                raise _no_text(name, given)
        check_flag("pgbouncer", pgbouncer)
        if not (embedded is None or isinstance(embedded, bool) or hasattr(embedded, "dsn")):
            raise TypeError(f"embedded must be True, False or an EmbeddedServer, not {embedded!r}")
        if dsn is not None and embedded:
            raise ValueError("give a DSN or embedded=True, not both")
        if dsn is None and not embedded:
            dsn = os.environ.get(DSN) or None
        # False if the embedded server is used only because nothing names another one.
        is_chosen = dsn is not None or embedded is not None
        self.is_chosen = is_chosen or any(map(os.environ.get, LOCATING))
        if dsn is not None:
            self.kind = "dsn"
        elif embedded or not self.is_chosen:
            self.kind = "embedded"
        else:
            self.kind = "environment"
        self.pgbouncer = pgbouncer
        #: The DSN for LISTEN; None: only polling is possible.
        self.notify_source: Source | None = None if pgbouncer else self
        if listen_dsn is not None:
            self.notify_source = Source(listen_dsn)
        self._server = None if embedded is None or isinstance(embedded, bool) else embedded
        self._dsn = None if dsn is None else re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", dsn)
        _check(self._dsn or "")
        self._lock = threading.Lock()
        self._is_installed = False

    def conninfo(self, *, restart: bool = False) -> str:
        """Return the DSN. Starts the embedded server if necessary, which takes a few seconds."""
        dsn = self._dsn or ""
        if self.kind == "embedded":
            dsn = self._embedded(restart=restart)
        return completed(dsn)

    def _embedded(self, *, restart: bool) -> str:
        from pgdefer.database.embedded import EmbeddedServer, ServerError  # noqa: PLC0415 (not on every system)
        from pgdefer.database.install import install  # noqa: PLC0415 (needs this module)

        with self._lock:
            if self._dsn is None or restart:
                self._server = self._server or EmbeddedServer()
                if not self.is_chosen:
                    log.info("no database is named: jobs are in the embedded server's database")
                    if "DATABASE_URL" in os.environ:
                        log.warning(
                            "DATABASE_URL is not used: pass it to App, or set %s to its value", DSN
                        )
                try:
                    self._dsn = self._server.ensure_running()
                except (ServerError, OSError) as error:
                    if self._dsn is None:
                        raise
                    # It has run, and may run again: clients treat it as a server that is down.
                    raise psycopg.OperationalError(str(error)) from error
            if not self._is_installed:
                install(self._dsn)
                self._is_installed = True
            return self._dsn

    def connect(self) -> PsycopgConnection:
        """Open a connection; every statement is a transaction of its own, in READ COMMITTED."""
        try:
            return self._connect(self.conninfo())
        except psycopg.OperationalError:
            if self.kind != "embedded":
                raise
        return self._connect(self.conninfo(restart=True))

    def _connect(self, conninfo: str) -> PsycopgConnection:
        with _connecting():
            connection = psycopg.connect(
                conninfo, autocommit=True, prepare_threshold=None if self.pgbouncer else 5
            )
        adapt(connection.adapters)
        if not self.pgbouncer:  # the session may serve another client next time
            try:
                connection.execute(sql.READ_COMMITTED.psycopg)
            except BaseException:
                close_now(connection)
                raise
        return connection

    async def connect_async(self) -> AsyncPsycopgConnection:
        """Open a connection; every statement is a transaction of its own, in READ COMMITTED."""
        try:
            return await self._connect_async(await self._conninfo_async(restart=False))
        except psycopg.OperationalError:
            if self.kind != "embedded":
                raise
        return await self._connect_async(await self._conninfo_async(restart=True))

    async def _conninfo_async(self, *, restart: bool) -> str:
        if self.kind != "embedded":
            return self.conninfo()
        return await in_own_thread(self.conninfo, restart=restart)

    async def _connect_async(self, conninfo: str) -> AsyncPsycopgConnection:
        with _connecting():
            connection = await psycopg.AsyncConnection.connect(
                await with_addresses(conninfo),
                autocommit=True,
                prepare_threshold=None if self.pgbouncer else 5,
            )
        adapt(connection.adapters)
        if not self.pgbouncer:
            try:
                await connection.execute(sql.READ_COMMITTED.psycopg)
            except BaseException:
                close_now(connection)
                raise
        return connection


def completed(dsn: str, **others: Any) -> str:
    """Return a DSN with other parameters of libpq, and with DEFAULTS for what it leaves out."""
    named = conninfo_to_dict(dsn, **others)
    missing = {name: value for name, value in DEFAULTS.items() if name not in named}
    if "fallback_application_name" in missing and "application_name" in named:
        del missing["fallback_application_name"]
    return make_conninfo(dsn, **others, **missing)


def of_libpq(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return those parameters that are libpq's, not psycopg's, and have a value."""
    return {name: value for name, value in named.items() if name in _LIBPQ and value is not None}


def _no_text(name: str, given: object) -> TypeError:
    instead = f": {_WHOLE_URL}" if hasattr(given, "render_as_string") else ""
    return TypeError(f"{name} must be text, not of type {type(given).__name__}{instead}")


def _check(dsn: str) -> None:
    """Raise InvalidParameter for a malformed DSN. The error does not quote it: it may be secret."""
    try:
        named = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise InvalidParameter(
            "the DSN can't be read",
            hint="Write postgresql://user@host:5432/database or host=... dbname=... user=...; "
            "further parameters are libpq's, such as sslmode.",
        ) from None
    if named.get("password") == "***":
        raise InvalidParameter(
            "the password in the DSN is ***",
            hint=f"str(url) hides that of a SQLAlchemy URL: {_WHOLE_URL}.",
        )


def adapt(adapters: AdaptersMap) -> None:
    """Make connections load moments that a datetime can't hold, such as infinity: see FIRST."""
    for loader in (_TextTime, _BinaryTime):
        adapters.register_loader("timestamptz", loader)


def adapt_own(adapters: AdaptersMap) -> None:
    """Adapt a cursor for the package's own statements, whose answers are binary."""
    adapters.register_loader("timestamptz", _BinaryTime)
    adapters.register_loader("jsonb", _BinaryJson)


def close_now(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Close without waiting; for connections that are dead or belong to a dead loop."""
    with contextlib.suppress(Exception):
        connection.pgconn.finish()

"""Where the database is, and connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import re
import select
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg.abc import Buffer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.types.datetime import TimestamptzBinaryLoader, TimestamptzLoader

from . import _sql
from ._errors import InvalidParameter

if TYPE_CHECKING:
    from ._server import EmbeddedServer

__all__ = ["FIRST", "LAST", "AsyncPool", "Source", "SyncPool", "close_now"]

AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]
Connection = psycopg.Connection[tuple[Any, ...]]

# Those of libpq's environment variables that say where a database is.
LOCATING = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")

# A dead peer is noticed within half a minute, whatever the system's own limits are.
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


# What stands for the moments that a datetime can't hold, infinity among them, in any time zone.
FIRST = dt.datetime(1, 1, 2, tzinfo=dt.UTC)
LAST = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)


class _TextTime(TimestamptzLoader):
    """Loads what a datetime can't hold as FIRST or LAST."""

    def load(self, data: Buffer) -> dt.datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            text = bytes(data)
            return FIRST if text.startswith(b"-") or text.endswith(b"BC") else LAST


class _BinaryTime(TimestamptzBinaryLoader):
    """As _TextTime, of the binary format."""

    def load(self, data: Buffer) -> dt.datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            return FIRST if bytes(data)[0] & 0x80 else LAST


class Source:
    """A DSN, libpq's environment variables, or the embedded server; `kind` says which.

    Without a DSN and without any of libpq's variables it is the embedded server, which is started
    and has the queue installed when first needed.

    Behind pgbouncer in transaction mode nothing can be heard: `listen_dsn` is then the way to the
    same database past it.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        embedded: bool | EmbeddedServer = False,
        pgbouncer: bool = False,
        listen_dsn: str | None = None,
    ) -> None:
        if dsn is not None and embedded:
            raise ValueError("give a DSN or embedded=True, not both")
        # Whether somebody chose it: the embedded server is also what is left without a choice.
        self.is_chosen = bool(dsn is not None or embedded or any(map(os.environ.get, LOCATING)))
        if dsn is not None:
            self.kind = "dsn"
        elif embedded or not self.is_chosen:
            self.kind = "embedded"
        else:
            self.kind = "environment"
        self.pgbouncer = pgbouncer
        #: Where notifications can be heard; None: nowhere, so that there is only polling.
        self.ears: Source | None = None if pgbouncer else self
        if listen_dsn is not None:
            self.ears = Source(listen_dsn)
        self._server = None if isinstance(embedded, bool) else embedded
        self._dsn = None if dsn is None else re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", dsn)
        _check(self._dsn or "")
        self._lock = threading.Lock()
        self._is_installed = False

    def conninfo(self, *, restart: bool = False) -> str:
        """Return the DSN. Starts the embedded server where that isn't running: a few seconds."""
        dsn = self._dsn or ""
        if self.kind == "embedded":
            dsn = self._embedded(restart=restart)
        given = conninfo_to_dict(dsn)
        missing = {name: value for name, value in DEFAULTS.items() if name not in given}
        if "fallback_application_name" in missing and "application_name" in given:
            del missing["fallback_application_name"]
        return make_conninfo(dsn, **missing)

    def _embedded(self, *, restart: bool) -> str:
        from ._install import install  # noqa: PLC0415 (needs this module)
        from ._server import EmbeddedServer, ServerError  # noqa: PLC0415 (not on every system)

        with self._lock:
            if self._dsn is None or restart:
                self._server = self._server or EmbeddedServer()
                try:
                    self._dsn = self._server.ensure_running()
                except (ServerError, OSError) as error:
                    if self._dsn is None:
                        raise
                    # It has run, and may again: to who is connected it is away as any other.
                    raise psycopg.OperationalError(str(error)) from error
            if not self._is_installed:
                install(self._dsn)
                self._is_installed = True
            return self._dsn

    def connect(self) -> Connection:
        """Open a connection; every statement is a transaction of its own, in READ COMMITTED."""
        try:
            return self._connect(self.conninfo())
        except psycopg.OperationalError:
            if self.kind != "embedded":
                raise
        return self._connect(self.conninfo(restart=True))

    def _connect(self, conninfo: str) -> Connection:
        connection = psycopg.connect(
            conninfo, autocommit=True, prepare_threshold=None if self.pgbouncer else 5
        )
        _adapt(connection)
        if not self.pgbouncer:  # the session may serve another the next time
            try:
                connection.execute(_sql.READ_COMMITTED.psycopg)
            except BaseException:
                close_now(connection)
                raise
        return connection

    async def connect_async(self) -> AsyncConnection:
        """As `connect`, for asyncio."""
        try:
            return await self._connect_async(await self._conninfo_async(restart=False))
        except psycopg.OperationalError:
            if self.kind != "embedded":
                raise
        return await self._connect_async(await self._conninfo_async(restart=True))

    async def _conninfo_async(self, *, restart: bool) -> str:
        if self.kind != "embedded":
            return self.conninfo()
        return await asyncio.to_thread(self.conninfo, restart=restart)

    async def _connect_async(self, conninfo: str) -> AsyncConnection:
        connection = await psycopg.AsyncConnection.connect(
            conninfo, autocommit=True, prepare_threshold=None if self.pgbouncer else 5
        )
        _adapt(connection)
        if not self.pgbouncer:
            try:
                await connection.execute(_sql.READ_COMMITTED.psycopg)
            except BaseException:
                close_now(connection)
                raise
        return connection


def _check(dsn: str) -> None:
    """Raise InvalidParameter for a DSN that can't be read, which is not quoted: it has secrets."""
    try:
        conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise InvalidParameter(
            "the DSN can't be read",
            hint="Write postgresql://user@host:5432/database or host=... dbname=... user=...",
        ) from None


def _adapt(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    for loader in (_TextTime, _BinaryTime):
        connection.adapters.register_loader("timestamptz", loader)


def close_now(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Close without waiting for anything; for connections that are dead or of a dead loop."""
    with contextlib.suppress(Exception):
        connection.pgconn.finish()


def _is_usable(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether an idle connection seems alive: a dead one has its end to be read."""
    if connection.closed:
        return False
    try:
        poll = select.poll()
        poll.register(connection.pgconn.socket, select.POLLIN | select.POLLHUP)
        readable = poll.poll(0)
    except (OSError, psycopg.Error):
        return False
    return not readable and connection.info.transaction_status == TransactionStatus.IDLE


class _Idle:
    """Open connections that nobody uses; the last one in is the first one out."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def take(self) -> Any:
        """Return a usable connection, or None."""
        while self.items:
            try:
                connection = self.items.pop()
            except IndexError:
                return None
            if _is_usable(connection):
                return connection
            close_now(connection)
        return None

    def close(self) -> None:
        """Close them all."""
        while self.items:
            close_now(self.items.pop())

    def __del__(self) -> None:
        self.close()


class SyncPool:
    """Connections for synchronous calls, from any thread; `most` at once, None: without a limit."""

    def __init__(self, source: Source, max_idle: int = 4, most: int | None = None) -> None:
        self._source = source
        self._max_idle = max_idle
        self._most = most
        #: Whose idle connections are closed where the server gives no more.
        self.partner: AsyncPool | None = None
        self._pid = os.getpid()
        self._inherited: list[_Idle] = []
        self._start()

    def _start(self) -> None:
        self._idle = _Idle()
        self._turn = threading.BoundedSemaphore(self._most) if self._most else _NO_TURN

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lend a connection; wait for one where all are lent."""
        if self._pid != os.getpid():
            # After a fork they are the parent's: not ours to use, nor to close.
            self._inherited.append(self._idle)
            self._start()
            self._pid = os.getpid()
        idle = self._idle
        with self._turn:
            connection = cast("Connection | None", idle.take()) or self._connect()
            try:
                yield connection
            finally:
                if len(idle.items) < self._max_idle and not connection.closed:
                    idle.items.append(connection)
                else:
                    connection.close()

    def _connect(self) -> Connection:
        try:
            return self._source.connect()
        except psycopg.OperationalError:
            if self.partner is not None:
                self.partner.close_idle()
            raise

    def close(self) -> None:
        """Close the idle ones; later calls open new ones."""
        self._idle.close()


class AsyncPool:
    """Connections for asynchronous calls, for each event loop its own; `most` at once in each."""

    def __init__(self, source: Source, max_idle: int = 4, most: int | None = None) -> None:
        self._source = source
        self._max_idle = max_idle
        self._most = most
        #: As a SyncPool's.
        self.partner: SyncPool | None = None
        self._loops: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[_Idle, contextlib.AbstractAsyncContextManager[Any]]
        ] = weakref.WeakKeyDictionary()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection]:
        """Lend a connection; wait for one where all are lent."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            turn = asyncio.Semaphore(self._most) if self._most else _NO_TURN
            self._loops[loop] = _Idle(), turn
        idle, turn = self._loops[loop]
        async with turn:
            connection = cast("AsyncConnection | None", idle.take())
            if connection is None:
                connection = await self._connect()
            try:
                yield connection
            finally:
                if len(idle.items) < self._max_idle and _is_usable(connection):
                    idle.items.append(connection)
                else:
                    close_now(connection)

    async def _connect(self) -> AsyncConnection:
        try:
            return await self._source.connect_async()
        except psycopg.OperationalError:
            if self.partner is not None:
                self.partner.close()
            raise

    def close_idle(self) -> None:
        """Close the idle ones of all loops; from any thread."""
        for idle, _ in list(self._loops.values()):
            idle.close()

    def close(self) -> None:
        """Close the running loop's idle ones; later calls open new ones."""
        idle, _ = self._loops.pop(asyncio.get_running_loop(), (None, None))
        if idle is not None:
            idle.close()


_NO_TURN: Any = contextlib.nullcontext()


def cursor(connection: psycopg.Connection[Any]) -> psycopg.Cursor[tuple[Any, ...]]:
    """Return a plain cursor, whatever factories the connection has."""
    return psycopg.Cursor(connection, row_factory=tuple_row)


def async_cursor(connection: psycopg.AsyncConnection[Any]) -> psycopg.AsyncCursor[tuple[Any, ...]]:
    """As `cursor`, for asyncio."""
    return psycopg.AsyncCursor(connection, row_factory=tuple_row)

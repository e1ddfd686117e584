"""Connections whose calls have a time limit, and that distinguish a loss from an error.

Tests: integration/test_connections.py, integration/test_worker_connections.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
from psycopg.types.string import TextBinaryLoader

from pgdefer._text import logger
from pgdefer.database import sql, watchdog
from pgdefer.database.source import AsyncPsycopgConnection, Source, close_now
from pgdefer.database.sql import Statement
from pgdefer.errors import describe, is_lost, sqlstate_of

__all__ = ["Connection", "ConnectionLost", "NotifyConnection", "Rows"]

log = logger("pgdefer.worker")

Rows = list[tuple[Any, ...]]


class ConnectionLost(Exception):  # noqa: N818
    """The connection was lost: it is unknown whether the statement ran."""

    @property
    def lasting_cause(self) -> BaseException | None:
        """The error that waiting can't mend, such as a malformed DSN; None if it may pass."""
        cause = self.__cause__
        if isinstance(cause, psycopg.ProgrammingError):
            return cause
        return None if isinstance(cause, psycopg.Error | OSError) else cause


class _StoredJson(TextBinaryLoader):
    """Leaves jsonb as received, with the version byte before the text: see codec.unwrap."""


class Connection:
    """A connection that opens when needed, and again after a loss."""

    def __init__(self, source: Source, timeout: float | None = None) -> None:
        self._source = source
        #: The time limit of one call, in seconds.
        self.timeout = watchdog.CALL_TIMEOUT if timeout is None else timeout
        self._connection: AsyncPsycopgConnection | None = None
        self._encoding = "UTF8"
        self._cursor: psycopg.AsyncCursor[tuple[Any, ...]] | None = None
        # The session's pid; and the pid of a session that may still work on an unanswered call.
        self._session = 0
        self._left: int | None = None
        # Two callers at once would each connect, and one would listen where nobody hears it.
        self._opening = asyncio.Lock()

    async def open(self) -> AsyncPsycopgConnection:
        """Connect unless connected. Raises ConnectionLost."""
        async with self._opening:
            return await self._open()

    async def _open(self) -> AsyncPsycopgConnection:
        if self._connection is None:
            try:
                async with asyncio.timeout(self.timeout):
                    connection = await self._connect()
            except TimeoutError as error:
                raise ConnectionLost(f"no connection within {self.timeout:g} s") from error
            except ConnectionLost:
                raise
            except Exception as error:  # also of an application's function that finds the DSN
                raise ConnectionLost(describe(error)) from error
            connection.adapters.register_loader("jsonb", _StoredJson)
            self._connection, self._session = connection, connection.info.backend_pid
            encoding = connection.info.parameter_status("server_encoding")
            self._encoding = encoding or self._encoding
            self._cursor = connection.cursor(binary=True)
            self._opened(connection)
        return self._connection

    async def _connect(self) -> AsyncPsycopgConnection:
        """Connect, unless the server still works on a call that was given up.

        Otherwise, while commits wait for a standby, each call would leave one more session there.
        """
        connection = await self._source.connect_async()
        if self._left is not None and not self._source.pgbouncer:
            try:
                cursor = await connection.execute(sql.IS_BUSY.psycopg, {"session": self._left})
                row = await cursor.fetchone()
                if row is not None and row[0]:
                    raise ConnectionLost(
                        "the server still works on the last call, or a standby has not confirmed it"
                    )
            except BaseException as error:
                # If the server refuses the question itself, the connection may still be used.
                if not isinstance(error, psycopg.Error) or is_lost(error):
                    close_now(connection)
                    raise
        self._left = None
        if not self._source.pgbouncer:  # the session may serve another client next time
            try:
                await connection.execute(sql.BOUND_WAITS.psycopg)
            except BaseException:
                close_now(connection)
                raise
        return connection

    def _opened(self, connection: AsyncPsycopgConnection) -> None:
        """Set up a new connection."""

    @property
    def encoding(self) -> str:
        """The database's encoding, by PostgreSQL's name, as of the last connection."""
        return self._encoding

    async def call(self, statement: Statement, **parameters: object) -> Rows:
        """Run a statement. Raises ConnectionLost, or psycopg's error if the statement failed."""
        connection = await self.open()
        cursor = self._cursor
        assert cursor is not None
        with self._guarded(connection):
            await cursor.execute(statement.psycopg, parameters or None)
            return [] if cursor.description is None else await cursor.fetchall()

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[AsyncPsycopgConnection]:
        """Lend the connection for calls that `call` can't make. Raises as `call`."""
        connection = await self.open()
        with self._guarded(connection):
            yield connection

    @contextlib.contextmanager
    def _guarded(self, connection: AsyncPsycopgConnection) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.timeout, watchdog.cut, connection)
        session = self._session
        try:
            yield
        except (psycopg.Error, OSError) as error:
            # A read-only server is of no use: the DSN may name another one.
            if connection.closed or is_lost(error) or sqlstate_of(error) == "25006":
                self.close()
                self._left = session
                is_late = timer.when() <= loop.time()
                said = f"no answer within {self.timeout:g} s" if is_late else describe(error)
                raise ConnectionLost(said) from error
            raise
        except asyncio.CancelledError:
            # The answer to a call in flight will not be read.
            self.close()
            self._left = session
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close at once; the next call connects again."""
        connection, self._connection, self._cursor = self._connection, None, None
        if connection is not None:
            close_now(connection)


class NotifyConnection(Connection):
    """A connection that receives notifications, during statements and between them."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._lock = asyncio.Lock()
        self._channels: set[str] = set()
        self._descriptor: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def exchange(self, statement: Statement, **parameters: object) -> Rows:
        """Run a statement, one at a time. Raises as `call`."""
        async with self._lock:
            await self.open()
            self._watch(on=False)
            try:
                return await super().call(statement, **parameters)
            finally:
                self._watch(on=True)

    async def listen(self, channel: str) -> None:
        """Listen on this channel from now on. Raises ConnectionLost."""
        if channel not in self._channels:
            await self.exchange(sql.listen(channel))
            self._channels.add(channel)

    def _heard(self, channel: str, payload: str) -> None:
        """Handle a notification."""

    def _lost(self) -> None:
        """Handle a loss of the connection between statements."""

    def _opened(self, connection: AsyncPsycopgConnection) -> None:
        # For notifications that arrive with the answer to a statement.
        heard = weakref.WeakMethod(self._heard)
        connection.add_notify_handler(lambda said: _call(heard, said.channel, said.payload))

    def _watch(self, *, on: bool) -> None:
        """Watch for notifications between statements, or stop; during statements psycopg does."""
        self._loop = loop = asyncio.get_running_loop()
        if self._descriptor is not None:
            loop.remove_reader(self._descriptor)
            self._descriptor = None
        if on and self._connection is not None:
            self._descriptor = self._connection.pgconn.socket
            # A weak reference, so that the loop does not keep this object alive.
            loop.add_reader(self._descriptor, _call, weakref.WeakMethod(self._readable))

    def hear(self) -> None:
        """Handle the notifications that have come, unless a statement is under way."""
        if self._descriptor is not None:
            self._readable()

    def _readable(self) -> None:
        assert self._connection is not None
        pgconn = self._connection.pgconn
        try:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                self._heard(notify.relname.decode(), notify.extra.decode())
        except psycopg.Error as error:
            log.warning("the listening connection was lost: %s", describe(error))
            self.close()
            self._lost()

    def close(self) -> None:
        """Close at once; the next call connects again, but does not listen until `listen`."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._descriptor = None
        self._channels.clear()
        super().close()


def _call(method: weakref.WeakMethod[Callable[..., None]], *args: object) -> None:
    """Call a method if its object still exists."""
    found = method()
    if found is not None:
        found(*args)

"""Pools of connections: one for all threads, and one for each event loop.

Tests: integration/test_connections.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.rows import tuple_row

from pgdefer.database import sql
from pgdefer.database.source import (
    AsyncPsycopgConnection,
    PsycopgConnection,
    Source,
    adapt_own,
    close_now,
)

__all__ = ["AsyncPool", "SyncPool", "async_cursor", "cursor", "is_usable"]


def is_usable(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether an idle connection seems alive: on a dead one, its end can be read."""
    if connection.closed:
        return False
    try:
        poll = select.poll()
        poll.register(connection.pgconn.socket, select.POLLIN | select.POLLHUP)
        readable = poll.poll(0)
    except (OSError, psycopg.Error):
        return False
    return not readable and connection.info.transaction_status == TransactionStatus.IDLE


def _is_unchanged(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether the next borrower's transactions are as usual. Without autocommit none would end."""
    return (
        connection.autocommit
        and connection.read_only is None
        and connection.deferrable is None
        and connection.isolation_level in (None, psycopg.IsolationLevel.READ_COMMITTED)
    )


_NAMES = "row_factory cursor_factory server_cursor_factory prepare_threshold prepared_max".split()


def _set_on(connection: Any) -> dict[str, Any]:
    """Return what a block may set on a connection object; `_put_back` restores it."""
    return {
        **{name: getattr(connection, name) for name in _NAMES},
        "_adapters": AdaptersMap(connection.adapters),
        "_notice_handlers": list(connection._notice_handlers),
        "_notify_handlers": list(connection._notify_handlers),
    }


def _put_back(connection: Any, before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        setattr(connection, name, value)


# How long a borrower waits for answers to UNDO, in seconds. Then it opens a new connection.
_UNDO_TIMEOUT = 5.0


def _begin_undo(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Send UNDO; return whether that was possible.

    The answer is read when the connection is lent again, so nobody waits for it: another round trip
    for each job would slow transactional jobs down.
    """
    try:
        connection.pgconn.send_query(sql.UNDO.psycopg)
        return connection.pgconn.flush() == 0
    except psycopg.Error:
        return False


def _is_undoing(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether the answer to UNDO is still incomplete. An idle connection awaits no other answer.

    Raises psycopg's error if the connection is lost, or if UNDO has failed.
    """
    pgconn = connection.pgconn
    if pgconn.transaction_status != TransactionStatus.ACTIVE:
        return False
    pgconn.consume_input()
    while not pgconn.is_busy():
        result = pgconn.get_result()
        if result is None:
            return False
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise psycopg.OperationalError("the session's settings could not be reset")
    return True


def _undone(connection: psycopg.Connection[Any], end: float) -> bool:
    """Wait for the answer to UNDO until `end`; return whether the connection is as new."""
    try:
        while _is_undoing(connection):
            poll = select.poll()
            poll.register(connection.pgconn.socket, select.POLLIN | select.POLLHUP)
            if not poll.poll(max(end - time.monotonic(), 0) * 1000):
                return False
    except (OSError, psycopg.Error):
        return False
    return True


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _undone_async(connection: psycopg.AsyncConnection[Any], end: float) -> bool:
    """As `_undone`."""
    try:
        while _is_undoing(connection):
            loop, socket = asyncio.get_running_loop(), connection.pgconn.socket
            readable = loop.create_future()
            loop.add_reader(socket, _finish, readable)
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0)):
                    await readable
            finally:
                loop.remove_reader(socket)
    except (OSError, psycopg.Error):  # a TimeoutError is an OSError
        return False
    return True


# Once spare connections have been closed, their sessions take a moment to end. Meanwhile, a call
# that the server refuses tries again: for how long, and how often, in seconds.
_MAKING_ROOM, _PAUSE = 1.0, 0.02


class _Spare:
    """Keeps a process's idle connections for a moment, beyond those that each pool keeps.

    In a burst, calls then need not each open a connection, which takes as long as many calls. They
    are few for all pools together, so that others can connect to the server.
    """

    MOST = 20
    #: In seconds. A connection is closed after this time, and before twice this time.
    REST = 1.0

    def __init__(self) -> None:
        self._forked: list[object] = []
        self._start()
        os.register_at_fork(after_in_child=self._start_again)

    def _start(self) -> None:
        self._items: list[tuple[_Idle, Any, float]] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._emptied_at = -math.inf

    def _start_again(self) -> None:
        self._forked.append(self._items)  # kept, as closing them would end the parent's sessions
        self._start()

    def put(self, pool: _Idle, connection: Any) -> None:
        """Take a connection of a pool."""
        with self._lock:
            self._items.append((pool, connection, time.monotonic()))
            surplus, self._items = self._items[: -self.MOST], self._items[-self.MOST :]
            self._start_timer()
        self._close(surplus)

    def take(self, pool: _Idle) -> Any:
        """Return the pool's connection that came last, or None."""
        with self._lock:
            for n in reversed(range(len(self._items))):
                if self._items[n][0] is pool:
                    return self._items.pop(n)[1]
        return None

    def close(self, pool: _Idle) -> None:
        """Close the spare connections of a pool."""
        with self._lock:
            closed = [item for item in self._items if item[0] is pool]
            self._items = [item for item in self._items if item[0] is not pool]
        self._close(closed)

    def make_room(self) -> bool:
        """Close all. Return whether the server may accept one more soon: some were just closed."""
        with self._lock:
            closed, self._items = self._items, []
            if closed:
                self._emptied_at = time.monotonic()
            was_just_emptied = time.monotonic() < self._emptied_at + _MAKING_ROOM
        self._close(closed)
        return was_just_emptied

    def _start_timer(self) -> None:
        if self._items and self._timer is None:
            timer = threading.Timer(self.REST, self._close_rested)
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # no more threads: the next call tries again
                timer.start()
                self._timer = timer

    def _close_rested(self) -> None:
        with self._lock:
            end = time.monotonic() - self.REST
            rested = [item for item in self._items if item[2] <= end]
            self._items = [item for item in self._items if item[2] > end]
            self._timer = None
            self._start_timer()
        self._close(rested)

    @staticmethod
    def _close(items: Iterable[tuple[_Idle, Any, float]]) -> None:
        for _, connection, _ in items:
            close_now(connection)


_SPARE = _Spare()


class _Idle:
    """A pool's open connections that are not in use; the last one in is the first one out.

    Those beyond `kept` are spare. A forked process must neither use nor close the connections of
    its parent.
    """

    def __init__(self, kept: int) -> None:
        self.items: list[Any] = []
        self._kept = kept
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether they are this process's."""
        return self._pid == os.getpid()

    def take(self) -> PsycopgConnection | None:
        """Return a usable connection, or None."""
        end = time.monotonic() + _UNDO_TIMEOUT
        while (taken := self._take()) is not None:
            connection: PsycopgConnection = taken
            try:
                if _undone(connection, end) and is_usable(connection):
                    return connection
            except BaseException:  # a JobTimeout may be raised in this thread
                close_now(connection)
                raise
            close_now(connection)
        return None

    async def take_async(self) -> AsyncPsycopgConnection | None:
        """Return a usable connection, or None."""
        end = time.monotonic() + _UNDO_TIMEOUT
        while (taken := self._take()) is not None:
            connection: AsyncPsycopgConnection = taken
            try:
                if await _undone_async(connection, end) and is_usable(connection):
                    return connection
            except BaseException:
                close_now(connection)
                raise
            close_now(connection)
        return None

    def _take(self) -> Any:
        try:
            return self.items.pop()
        except IndexError:
            return _SPARE.take(self)

    def put(self, connection: Any, *, undo: bool) -> bool:
        """Take a connection back, if it is usable; return whether it is."""
        if not is_usable(connection) or not _is_unchanged(connection):
            return False
        if undo and not _begin_undo(connection):
            return False
        if len(self.items) < self._kept:
            self.items.append(connection)
        else:
            _SPARE.put(self, connection)
        return True

    def close(self) -> None:
        """Close all of them, unless they are another process's."""
        self._close_kept()
        _SPARE.close(self)

    def _close_kept(self) -> None:
        while self.items and self.is_here:
            close_now(self.items.pop())

    def __del__(self) -> None:
        # Spare connections refer to this object, so there are none, and no lock is needed: this
        # thread may hold it.
        self._close_kept()


class SyncPool:
    """Connections for synchronous calls, from any thread.

    At most `most` are lent at once (None: no limit), not counting those lent without waiting. At
    most `kept` idle ones stay open.
    """

    def __init__(self, source: Source, kept: int = 4, most: int | None = None) -> None:
        self._source = source
        self._kept = kept
        self._most = most
        #: The pool whose idle connections are closed if the server accepts no more.
        self.partner: AsyncPool | None = None
        self._inherited: list[_Idle] = []
        self._start()

    def _start(self) -> None:
        self._idle = _Idle(self._kept)
        self._turn = threading.BoundedSemaphore(self._most) if self._most else _NO_TURN

    @contextlib.contextmanager
    def connection(self, *, waits: bool = True, undo: bool = False) -> Iterator[PsycopgConnection]:
        """Lend a connection; with `waits`, wait for one if `most` are lent.

        Blocks that run the application's code must not wait, or their calls could wait for each
        other's connections forever. With `undo`, the next borrower finds nothing that the block has
        left on the connection, except prepared statements. Behind pgbouncer, what is left in the
        session can't be undone: the next statement may reach another session.
        """
        if not self._idle.is_here:
            self._inherited.append(self._idle)
            self._start()
        idle = self._idle
        with self._turn if waits else _NO_TURN:
            connection = idle.take() or self._connect()
            before: dict[str, Any] = {}
            try:
                before = _set_on(connection) if undo else before
                yield connection
            except psycopg.errors.ReadOnlySqlTransaction:
                connection.close()  # new ones may lead to another server of the DSN, the primary
                self.close()
                raise
            finally:
                _put_back(connection, before)
                undo = undo and not self._source.pgbouncer
                if idle.is_here and not idle.put(connection, undo=undo):
                    connection.close()

    def _connect(self) -> PsycopgConnection:
        end = time.monotonic() + _MAKING_ROOM
        while True:
            try:
                return self._source.connect()
            except psycopg.OperationalError:
                if self.partner is not None:
                    self.partner.close_idle()
                if not _SPARE.make_room() or time.monotonic() > end:
                    raise
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Close idle connections; later calls open new ones."""
        self._idle.close()


class AsyncPool:
    """Connections for asynchronous calls, separate for each event loop; otherwise as SyncPool."""

    def __init__(self, source: Source, kept: int = 4, most: int | None = None) -> None:
        self._source = source
        self._kept = kept
        self._most = most
        #: As in SyncPool.
        self.partner: SyncPool | None = None
        self._loops: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[_Idle, contextlib.AbstractAsyncContextManager[Any]]
        ] = weakref.WeakKeyDictionary()

    @contextlib.asynccontextmanager
    async def connection(
        self, *, waits: bool = True, undo: bool = False
    ) -> AsyncIterator[AsyncPsycopgConnection]:
        """Lend a connection: as SyncPool."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops or not self._loops[loop][0].is_here:
            # A semaphore keeps a reference to the loop in which somebody waited for it.
            for other in self._known_loops():
                if other.is_closed():
                    self._drop(other)
            turn = asyncio.Semaphore(self._most) if self._most else _NO_TURN
            self._loops[loop] = _Idle(self._kept), turn
        idle, turn = self._loops[loop]
        async with turn if waits else _NO_TURN:
            connection = await idle.take_async() or await self._connect()
            before: dict[str, Any] = {}
            try:
                before = _set_on(connection) if undo else before
                yield connection
            except psycopg.errors.ReadOnlySqlTransaction:
                close_now(connection)  # as in SyncPool
                self.close_idle()
                raise
            finally:
                _put_back(connection, before)
                undo = undo and not self._source.pgbouncer
                if idle.is_here and not idle.put(connection, undo=undo):
                    close_now(connection)

    async def _connect(self) -> AsyncPsycopgConnection:
        end = time.monotonic() + _MAKING_ROOM
        while True:
            try:
                return await self._source.connect_async()
            except psycopg.OperationalError:
                if self.partner is not None:
                    self.partner.close()
                if not _SPARE.make_room() or time.monotonic() > end:
                    raise
            await asyncio.sleep(_PAUSE)

    def close_idle(self) -> None:
        """Close the idle connections of all loops; from any thread."""
        for loop in self._known_loops():
            idle, _ = self._loops.get(loop, (None, None))
            if idle is not None:
                idle.close()

    def close(self) -> None:
        """Close the running loop's idle connections; later calls open new ones."""
        self._drop(asyncio.get_running_loop())

    def _known_loops(self) -> list[asyncio.AbstractEventLoop]:
        # Not over the dict itself: other threads' loops come and go meanwhile.
        loops = [reference() for reference in self._loops.keyrefs()]
        return [loop for loop in loops if loop is not None]

    def _drop(self, loop: asyncio.AbstractEventLoop) -> None:
        idle, _ = self._loops.pop(loop, (None, None))
        if idle is not None:
            idle.close()


_NO_TURN: Any = contextlib.nullcontext()


def cursor(connection: psycopg.Connection[Any]) -> psycopg.Cursor[tuple[Any, ...]]:
    """Return a cursor of tuples, even if the connection has other factories."""
    made = psycopg.Cursor(connection, row_factory=tuple_row)
    adapt_own(made.adapters)
    return made


def async_cursor(connection: psycopg.AsyncConnection[Any]) -> psycopg.AsyncCursor[tuple[Any, ...]]:
    """Return a cursor of tuples, even if the connection has other factories."""
    made = psycopg.AsyncCursor(connection, row_factory=tuple_row)
    adapt_own(made.adapters)
    return made

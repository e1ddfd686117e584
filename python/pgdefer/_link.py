"""A worker's connections: every call has a time limit, a lost one is told apart from an error."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import psycopg
from psycopg.types.string import TextBinaryLoader

from . import _sql
from ._connect import AsyncConnection, Source, close_now
from ._errors import describe, is_lost, sqlstate_of
from ._options import interval_text
from ._sql import Statement
from ._text import logger

if TYPE_CHECKING:
    from ._context import JobContext

__all__ = [
    "CALL_LIMIT",
    "Backoff",
    "Ears",
    "Heart",
    "Link",
    "Listener",
    "LostError",
    "Sleep",
    "clock",
    "watch",
]

log = logger("pgdefer.worker")

# How long the database has for one answer, in seconds.
CALL_LIMIT = 20.0
# How often to look for jobs that outlive their timeout, and to keep their claims, in seconds: reap
# waits for 10. The lease is longer than that, so that it tells them apart.
LOOK = 3.0
SHORTEST_LEASE = 15.0

Rows = list[tuple[Any, ...]]


class LostError(Exception):
    """The connection was lost: nobody knows whether the statement was run."""


def clock() -> float:
    """Return seconds by a clock that goes on while the machine is suspended, where there is one."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Backoff:
    """Delays between attempts: from 0.1 s, doubling up to 5 s, less a random part."""

    def __init__(self, first: float = 0.1, last: float = 5.0) -> None:
        self._first = first
        self._last = last
        self._next = first

    def reset(self) -> None:
        """Start over: it worked."""
        self._next = self._first

    def delay(self) -> float:
        """Return how long to wait now."""
        delay = self._next
        self._next = min(self._next * 2, self._last)
        return delay * random.uniform(0.7, 1.0)  # noqa: S311


class _StoredJson(TextBinaryLoader):
    """Leaves jsonb as it came, its version's byte before the text: see _codec.unwrap."""


class Link:
    """A connection that is opened when needed, and again when it was lost."""

    def __init__(self, source: Source, limit: float | None = None) -> None:
        self._source = source
        #: How long one call may take, in seconds.
        self.limit = CALL_LIMIT if limit is None else limit
        self._connection: AsyncConnection | None = None
        self._encoding = "UTF8"
        self._cursor: psycopg.AsyncCursor[tuple[Any, ...]] | None = None

    async def open(self) -> AsyncConnection:
        """Connect unless connected. Raises LostError."""
        if self._connection is None:
            try:
                async with asyncio.timeout(self.limit):
                    connection = await self._source.connect_async()
            except TimeoutError as error:
                raise LostError(f"no connection within {self.limit:g} s") from error
            except (psycopg.OperationalError, OSError) as error:
                raise LostError(describe(error)) from error
            connection.adapters.register_loader("jsonb", _StoredJson)
            self._connection = connection
            encoding = connection.info.parameter_status("server_encoding")
            self._encoding = encoding or self._encoding
            self._cursor = connection.cursor(binary=True)
            self._opened(connection)
        return self._connection

    def _opened(self, connection: AsyncConnection) -> None:
        """Do what a new connection needs."""

    @property
    def encoding(self) -> str:
        """The database's encoding, by PostgreSQL's name; that of the last connection."""
        return self._encoding

    async def call(self, statement: Statement, **parameters: object) -> Rows:
        """Run a statement. Raises LostError, or psycopg's error of a statement that failed."""
        connection = await self.open()
        cursor = self._cursor
        assert cursor is not None
        with self._guarded(connection):
            await cursor.execute(statement.psycopg, parameters or None)
            return [] if cursor.description is None else await cursor.fetchall()

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[AsyncConnection]:
        """Lend the connection for a call of another kind. Raises as `call`."""
        connection = await self.open()
        with self._guarded(connection):
            yield connection

    @contextlib.contextmanager
    def _guarded(self, connection: AsyncConnection) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        limit = loop.call_later(self.limit, cut, connection)
        try:
            yield
        except (psycopg.Error, OSError) as error:
            if connection.closed or is_lost(error):
                self.close()
                is_late = limit.when() <= loop.time()
                said = f"no answer within {self.limit:g} s" if is_late else describe(error)
                raise LostError(said) from error
            raise
        except asyncio.CancelledError:
            # Whatever was under way, its answer will not be read.
            self.close()
            raise
        finally:
            limit.cancel()

    def close(self) -> None:
        """Close at once; the next call connects again."""
        connection, self._connection, self._cursor = self._connection, None, None
        if connection is not None:
            close_now(connection)


def cut(connection: Any) -> None:
    """Have whoever waits for an answer learn that the connection is lost; from any thread.

    Not by cancelling: psycopg would then try for long to cancel the statement. The connection is
    psycopg's, or another driver's: one that tells its descriptor, or has a transport, as asyncpg.
    """
    with contextlib.suppress(Exception):
        if not hasattr(connection, "fileno"):
            connection = connection._transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


class Watch:
    """Cuts connections whose time is over, from a thread of its own: it is for calls that block."""

    def __init__(self) -> None:
        self._limits: dict[object, tuple[float, Any]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def limited(self, connection: Any) -> Iterator[None]:
        """Cut the connection where this takes longer than CALL_LIMIT."""
        stop = self.begin(connection)
        try:
            yield
        finally:
            stop()

    def begin(self, connection: Any) -> Callable[[], None]:
        """Cut the connection after CALL_LIMIT, unless what is returned is called before."""
        key = object()
        with self._changed:
            self._limits[key] = time.monotonic() + CALL_LIMIT, connection
            if self._thread is None or not self._thread.is_alive():  # as after a fork
                self._thread = threading.Thread(target=self._run, name="pgdefer-watch", daemon=True)
                self._thread.start()
            elif len(self._limits) == 1:
                self._changed.notify()

        def stop() -> None:
            with self._changed:
                self._limits.pop(key, None)

        return stop

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for key, (limit, connection) in list(self._limits.items()):
                    if limit <= now:
                        del self._limits[key]
                        cut(connection)
                self._changed.wait(min(CALL_LIMIT, 1.0) if self._limits else None)


#: Of this process.
watch = Watch()


class Ears(Link):
    """A connection that hears notifications, in statements and between them."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._lock = asyncio.Lock()
        self._channels: set[str] = set()
        self._descriptor: int | None = None

    async def exchange(self, statement: Statement, **parameters: object) -> Rows:
        """Run a statement, one at a time. Raises as `call`."""
        async with self._lock:
            await self.open()
            self._watch(on=False)
            try:
                return await self.call(statement, **parameters)
            finally:
                self._watch(on=True)

    async def listen(self, channel: str) -> None:
        """Hear this channel from now on. Raises LostError."""
        if channel not in self._channels:
            await self.exchange(_sql.listen(channel))
            self._channels.add(channel)

    def _heard(self, channel: str) -> None:
        """Take in a notification."""

    def _lost(self) -> None:
        """Take in that the connection was lost while nothing was asked."""

    def _opened(self, connection: AsyncConnection) -> None:
        # For those that come with the answer to a statement.
        connection.add_notify_handler(lambda notify: self._heard(notify.channel))

    def _watch(self, *, on: bool) -> None:
        """Hear, or not, what comes between statements; psycopg hears what comes in them."""
        loop = asyncio.get_running_loop()
        if self._descriptor is not None:
            loop.remove_reader(self._descriptor)
            self._descriptor = None
        if on and self._connection is not None:
            self._descriptor = self._connection.pgconn.socket
            loop.add_reader(self._descriptor, self._readable)

    def _readable(self) -> None:
        assert self._connection is not None
        pgconn = self._connection.pgconn
        try:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                self._heard(notify.relname.decode())
        except psycopg.Error as error:
            log.warning("the listening connection was lost: %s", describe(error))
            self.close()
            self._lost()

    def close(self) -> None:
        """Close at once; the next call connects again, but hears nothing until told to."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._descriptor = None
        self._channels.clear()
        super().close()


class Sleep(NamedTuple):
    """What queue.before_sleep has said: for how many seconds, and whether nothing is left.

    None: it could not be asked.
    """

    seconds: float
    is_drained: bool | None = None

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """Return it as said in a row."""
        _, wait_for, _, is_drained = row
        seconds = wait_for.total_seconds() if isinstance(wait_for, dt.timedelta) else 1.0
        return cls(max(seconds, 0.0), is_drained)


class Listener(Ears):
    """The connection on which a worker goes to sleep and wakes."""

    def __init__(
        self,
        source: Source,
        *,
        on_work: Callable[[], None],
        on_message: Callable[[], None],
        on_deaf: Callable[[], None],
    ) -> None:
        super().__init__(source)
        self._on_work = on_work
        self._on_message = on_message
        self._on_deaf = on_deaf
        self._wanted: list[str] = []
        self._backoff = Backoff()
        self._not_before = 0.0
        self.is_latched = False

    async def before_sleep(
        self, worker: int, queues: Sequence[str] | None, options: str | None = None
    ) -> Sleep:
        """Say that this worker goes to sleep; return for how long it may, at most.

        Without a connection it is a second: then the worker polls. `options` are queue.fetch's.
        """
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            return Sleep(1.0)
        if self._lock.locked():
            # It does what was due, and hears nothing until that is done.
            return Sleep(0.05)
        try:
            while True:
                rows = await self.exchange(
                    _sql.BEFORE_SLEEP, worker=worker, queues=queues, options=options
                )
                session = self._connection
                self._wanted = channels = rows[0][2]
                await self.listen_again()
                if self._connection is session:
                    break
                # Another session listens now than the one that the database took note of.
        except LostError as error:
            log.warning("the listening connection was lost: %s", error)
            self._not_before = loop.time() + self._backoff.delay()
            return Sleep(1.0)
        self._backoff.reset()
        self.is_latched = bool(channels)
        return Sleep.of(rows[0])

    async def listen_again(self) -> None:
        """Hear what `before_sleep` has said, and is heard no more. Raises LostError."""
        while missing := [name for name in self._wanted if name not in self._channels]:
            await self.listen(missing[0])

    async def after_sleep(self, worker: int) -> None:
        """Say that this worker is busy again."""
        if self.is_latched:
            self.is_latched = False
            try:
                await self.exchange(_sql.AFTER_SLEEP, worker=worker)
            except LostError:
                self._lost()

    async def tick(self) -> None:
        """Do what is due. Raises LostError."""
        try:
            await self.exchange(_sql.TICK)
        except LostError:
            self._lost()
            raise

    def _opened(self, connection: AsyncConnection) -> None:
        super()._opened(connection)
        self.is_latched = False

    def _heard(self, channel: str) -> None:
        if channel == "pgdefer":
            self._on_work()
        else:
            self._on_message()

    def _lost(self) -> None:
        self._on_deaf()

    def close(self) -> None:
        """Close at once; the next call connects and listens again."""
        self.is_latched = False
        super().close()


class Heart:
    """Heartbeats, in a thread, an event loop and a connection of their own.

    The callbacks are called in the worker's loop: `on_beat` after each heartbeat that was answered,
    with (id, claim, reason) of the jobs to abort, `on_gone` when the worker was given up for dead,
    `on_lost` with a job whose claim was to be kept and had ended, `on_suspects` with the number of
    jobs that wait to be claimed alone.
    """

    def __init__(
        self,
        source: Source,
        interval: float,
        dead_after: float,
        *,
        on_beat: Callable[[list[tuple[int, int, str]]], None],
        on_gone: Callable[[int], None],
        on_lost: Callable[[JobContext], None],
        on_suspects: Callable[[int], None],
    ) -> None:
        self._source = source
        self._interval = interval
        self._on_beat = on_beat
        self._on_gone = on_gone
        self._on_lost = on_lost
        self._on_suspects = on_suspects
        self._outer = asyncio.get_running_loop()
        self._inner: asyncio.AbstractEventLoop | None = None
        self._event: asyncio.Event | None = None
        #: Until when, by `clock`, a claimed job may take: then its claim is to be kept.
        self.limits: dict[JobContext, float] = {}
        self._lease = interval_text(dt.timedelta(seconds=max(dead_after, SHORTEST_LEASE)))
        self._late: set[JobContext] = set()
        self._worker: int | None = None
        self._is_stopped = False
        #: When the last heartbeat that was answered was sent, by `clock`.
        self.beat_at = 0.0
        self._thread = threading.Thread(target=self._run, name="pgdefer-heart", daemon=True)

    def start(self, worker: int, registered_at: float) -> None:
        """Beat for this worker from now on."""
        self.beat_at = registered_at
        self._worker = worker
        if self._thread.ident is None:
            self._thread.start()
        else:
            self.poke()

    def poke(self) -> None:
        """Beat now: there is a message for the worker."""
        inner, event = self._inner, self._event
        if inner is not None and event is not None:
            with contextlib.suppress(RuntimeError):
                inner.call_soon_threadsafe(event.set)

    async def stop(self) -> None:
        """Beat no more."""
        self._is_stopped = True
        self.poke()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, 2.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._beat())
        except Exception:
            log.exception("heartbeats have ended")

    async def _beat(self) -> None:
        self._inner = asyncio.get_running_loop()
        self._event = asyncio.Event()
        link = Link(self._source, self._interval)
        backoff = Backoff(last=2.0)
        try:
            while not self._is_stopped:
                self._event.clear()
                worker = self._worker
                delay = self._interval
                try:
                    if worker is not None:
                        sent_at = clock()
                        rows = await link.call(_sql.HEARTBEAT, worker=worker)
                        if self._worker == worker:
                            self.beat_at = sent_at
                        aborts = [(row[0], row[1], row[2]) for row in rows]
                        self._tell(self._on_beat, aborts)
                        backoff.reset()
                        if not self._is_stopped:
                            await self._tick(link)
                except LostError as error:
                    delay = backoff.delay()
                    log.warning("no heartbeat: %s", describe(error))
                except psycopg.Error as error:
                    if sqlstate_of(error) == "QJ007":
                        if self._worker == worker:
                            self._worker = None
                        self._tell(self._on_gone, worker)
                    else:
                        delay = backoff.delay()
                        log.warning("no heartbeat: %s", describe(error))
                await self._rest(link, delay)
        finally:
            link.close()

    async def _rest(self, link: Link, delay: float) -> None:
        """Wait until the next beat, or until poked; keep meanwhile what is to be kept."""
        assert self._event is not None
        end = time.monotonic() + delay
        while not self._is_stopped:
            await self._keep(link)
            left = end - time.monotonic()
            if left <= 0 or self._event.is_set():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), min(left, LOOK))

    async def _keep(self, link: Link) -> None:
        """Keep the claims of jobs that outlive their timeout: what they hold is in use.

        That is decided here, beside the worker's loop, which a handler may block.
        """
        now = clock()
        late = {job for job, limit in self.limits.copy().items() if limit <= now}
        self._late &= late
        for job in late:
            if job not in self._late:
                self._late.add(job)
                log.warning("%r outlives its timeout: its claim is kept until it ends", job)
            try:
                await link.call(_sql.EXTEND, id=job.id, claim=job.claim, lease=self._lease)
            except LostError as error:
                log.warning("%r: its claim could not be kept: %s", job, error)
                return
            except psycopg.Error as error:
                if sqlstate_of(error) in ("QJ001", "QJ002"):
                    self.limits.pop(job, None)
                    self._tell(self._on_lost, job)
                else:
                    log.warning("%r: its claim could not be kept: %s", job, describe(error))

    async def _tick(self, link: Link) -> None:
        try:
            rows = await link.call(_sql.TICK)
            self._tell(self._on_suspects, rows[0][0] or 0)
        except (LostError, psycopg.Error) as error:
            log.warning("tick: %s", describe(error))

    def _tell(self, callback: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):
            self._outer.call_soon_threadsafe(callback, value)

"""Waiting for the result of a job: woken by a notification, with polling as the safety net."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import os
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

import psycopg

from pgdefer.codec import Codec
from pgdefer.database import sql
from pgdefer.database.connection import ConnectionLost, NotifyConnection, Rows
from pgdefer.database.execute import execute
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.database.own_threads import blocks_worker
from pgdefer.database.pool import SyncPool, cursor
from pgdefer.database.source import AsyncPsycopgConnection, PsycopgConnection, Source, close_now
from pgdefer.database.sql import Statement
from pgdefer.database.watchdog import cut
from pgdefer.errors import JobCancelled, JobFailed, PgDeferError, is_lost, translated

__all__ = ["Waiter", "wait"]

T = TypeVar("T")

# The polling interval if no notification can arrive.
POLL_FIRST, POLL_LAST = 0.02, 1.0
# How long to wait for an answer about a late job, in seconds.
ANSWER_TIME = 1.0
# Timers have a limit, so longer waits are cut to this, in seconds.
YEAR = 3e7
# The questions about a late job; not every role may ask why.
LATE = (sql.STATE, sql.WHY)


def _has_succeeded(id: int, row: Sequence[Any]) -> bool:
    """Return whether the job has succeeded. Raises JobFailed, JobCancelled."""
    state, _, error, *_ = row
    if state == "failed":
        raise JobFailed(id, error)
    if state == "cancelled":
        raise JobCancelled(id, error)
    return bool(state == "succeeded")


def _late(id: int, timeout: float | None, found: Sequence[str]) -> TimeoutError:
    """Return the error for a job that is late; `found` are the answers to LATE."""
    said = f": {', '.join(found)}" if found else ""
    return TimeoutError(f"job {id} has not finished within {timeout:g} s{said}")


def _look(id: int, connection: PsycopgConnection) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(psycopg.Error, PgDeferError):
        for statement in LATE:
            ((said,),) = execute(connection, statement, {"id": id})
            found.append(said)
    return found


def wait(id: int, timeout: float | None, pool: SyncPool, source: Source, codec: Codec) -> Any:
    """Return the job's result once it has succeeded; see `App.result`."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    lost = GrowingDelay()
    while True:
        try:
            with (
                pool.connection() as connection,
                _cut_after(connection, end),
                _Listening(connection) as listening,
            ):
                stored = _wait(
                    id, end, connection, listening, hears=source.notify_source is not None
                )
                if stored is None:
                    raise _late(id, timeout, _look(id, connection))
                return codec.decode(stored[0])
        except psycopg.Error as error:
            if not is_lost(error):
                raise
            delay = lost.next()
            if time.monotonic() + delay > end:
                raise _late(id, timeout, []) from error
            time.sleep(delay)


def _wait(
    id: int, end: float, connection: PsycopgConnection, listening: _Listening, *, hears: bool
) -> tuple[Any] | None:
    """Return the stored result, or None at `end`."""
    pause = GrowingDelay(POLL_FIRST, POLL_LAST)
    while True:
        row = execute(connection, sql.RESULT, {"id": id})[0]
        if _has_succeeded(id, row):
            return (row[1],)
        channel, wait_for = row[3], row[4].total_seconds()
        if channel is None or not hears:
            wait_for = pause.next()
        elif listening.to is None:
            listening.start(channel)
            continue
        wait_for = min(wait_for, end - time.monotonic())
        if wait_for <= 0:
            return None
        if blocks_worker():  # this worker may be the only one that can run the job
            raise RuntimeError(
                "result() would block the worker's event loop: await result_async(...), or"
                " current_job().call_async(...)"
            )
        listening.sleep(wait_for)


@contextlib.contextmanager
def _cut_after(connection: PsycopgConnection, end: float) -> Iterator[None]:
    """Cut the connection shortly after `end`: the database may not answer at all."""
    if math.isinf(end):
        yield
        return
    seconds = max(end - time.monotonic(), 0.0) + ANSWER_TIME
    timer = threading.Timer(min(seconds, YEAR), cut, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Listening:
    """A connection that may listen on a channel, and stops before it is returned."""

    def __init__(self, connection: PsycopgConnection) -> None:
        self._connection = connection
        self.to: str | None = None

    def start(self, channel: str) -> None:
        cursor(self._connection).execute(sql.listen(channel).psycopg)
        self.to = channel

    def sleep(self, seconds: float) -> None:
        if self.to is None:
            time.sleep(seconds)
        else:
            collections.deque(self._connection.notifies(timeout=seconds, stop_after=1), maxlen=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.to is not None and not self._connection.closed:
            cursor(self._connection).execute(sql.unlisten(self.to).psycopg)


class Waiter(NotifyConnection):
    """One connection per event loop, for all waits for results in it."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._pid = os.getpid()
        self._waiting: collections.defaultdict[str, set[asyncio.Event]] = collections.defaultdict(
            set
        )
        self._asking: set[asyncio.Task[Any]] = set()

    async def wait(
        self,
        id: int,
        timeout: float | None,  # noqa: ASYNC109 (names the late job)
        codec: Codec,
    ) -> Any:
        """Return the job's result once it has succeeded."""
        timer = asyncio.timeout(timeout)
        try:
            async with timer:
                stored = await self._wait(id)
        except TimeoutError:
            if not timer.expired():
                raise
            stored = await self._last_look(id, timeout)
        return None if stored is None else await codec.decode_stored_async(stored)

    async def _last_look(self, id: int, timeout: float | None) -> str | None:  # noqa: ASYNC109
        """Return the stored result if it is there by now; else ask why the job is late.

        Waits at most ANSWER_TIME. Raises TimeoutError, or as `_has_succeeded`.
        """
        found: list[str] = []
        cause: BaseException | None = None
        try:
            async with asyncio.timeout(ANSWER_TIME):
                with translated():
                    (row,) = await self._ask(sql.RESULT, id=id)
                if _has_succeeded(id, row):
                    stored: str | None = row[1]
                    return stored
                for statement in LATE:
                    ((said,),) = await self._ask(statement, id=id)
                    found.append(said)
        except ConnectionLost as error:
            cause = error.__cause__
        except (psycopg.Error, TimeoutError):
            pass
        raise _late(id, timeout, found) from cause

    async def _wait(self, id: int) -> str | None:
        event = asyncio.Event()
        pause, lost = GrowingDelay(POLL_FIRST, POLL_LAST), GrowingDelay()
        channel: str | None = None
        try:
            while True:
                event.clear()
                try:
                    if channel is not None:
                        await self.listen(channel)
                    with translated():
                        (row,) = await self._ask(sql.RESULT, id=id)
                except ConnectionLost as error:
                    if error.lasting_cause is not None:
                        raise error.lasting_cause from None
                    await asyncio.sleep(lost.next())
                    continue
                if _has_succeeded(id, row):
                    stored: str | None = row[1]
                    return stored
                if row[3] is None or self._source.notify_source is None:
                    await asyncio.sleep(pause.next())
                elif channel is None:
                    channel = row[3]
                    self._waiting[channel].add(event)
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(event.wait(), row[4].total_seconds())
        finally:
            if channel is not None:
                await self._stop_waiting(channel, event)

    async def _stop_waiting(self, channel: str, event: asyncio.Event) -> None:
        """Forget an event; stop listening on its channel if no other waits for that."""
        self._waiting[channel].discard(event)
        if not self._waiting[channel]:
            del self._waiting[channel]
            with contextlib.suppress(ConnectionLost):
                await self.unlisten(channel)

    async def _ask(self, statement: Statement, **parameters: object) -> Rows:
        return await self._to_its_end(self.exchange(statement, **parameters))

    async def _to_its_end(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, even if the waiting task is cancelled."""
        asking = asyncio.create_task(coroutine)
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return await asyncio.shield(asking)

    async def listen(self, channel: str) -> None:
        """Listen on this channel from now on, unless nobody waits for it any more."""
        if channel not in self._channels:
            await self._to_its_end(self._listen(channel))

    async def _listen(self, channel: str) -> None:
        await self.exchange(sql.listen(channel))
        self._channels.add(channel)
        if channel not in self._waiting:  # the wait was cancelled meanwhile
            self._channels.discard(channel)
            await self.exchange(sql.unlisten(channel))

    async def unlisten(self, channel: str) -> None:
        """Stop listening on this channel. Raises ConnectionLost."""
        if channel in self._channels:
            self._channels.discard(channel)
            await self._ask(sql.unlisten(channel))

    def _heard(self, channel: str, payload: str) -> None:  # noqa: ARG002
        for event in self._waiting.get(channel, ()):
            event.set()

    def _lost(self) -> None:
        for events in self._waiting.values():
            for event in events:
                event.set()

    def __del__(self) -> None:
        # In a forked process, the connection is still that of its parent.
        if self._connection is None or self._pid != os.getpid():
            return
        if self._loop is None or self._descriptor is None:
            close_now(self._connection)
            return
        # The loop must forget the descriptor before another connection has it.
        end = (self._loop, self._descriptor, self._connection)
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(_end, *end)
        else:
            _end(*end)


def _end(
    loop: asyncio.AbstractEventLoop, descriptor: int, connection: AsyncPsycopgConnection
) -> None:
    if not loop.is_closed():
        loop.remove_reader(descriptor)
    close_now(connection)

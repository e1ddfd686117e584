"""The connection on which a worker goes to sleep and wakes.

Tests: integration/test_worker_connections.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Self

import psycopg

from pgdefer._text import logger
from pgdefer.database import sql
from pgdefer.database.connection import ConnectionLost, NotifyConnection, Rows
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.database.source import AsyncPsycopgConnection, Source
from pgdefer.errors import describe

__all__ = ["OnlyConnection", "Sleep", "SleepListener"]

log = logger("pgdefer.worker")
PAUSES_AT_ONCE = 10


class Sleep(NamedTuple):
    """The answer of queue.before_sleep: for how many seconds, and whether nothing is left.

    `is_drained` is None if the database could not be asked. `must_look`: there may be a job whose
    commit has woken nobody. `look_after`: how long to leave a job to another worker.
    """

    seconds: float
    is_drained: bool | None = None
    must_look: bool = True
    look_after: float = 0.0

    @classmethod
    def of(cls, row: tuple[Any, ...], *, has_listened: bool = False) -> Self:
        """Return the answer in a row; `has_listened`: on all its channels, since before it."""
        _, wait_for, _, is_drained, look_after = row
        seconds = wait_for.total_seconds() if isinstance(wait_for, dt.timedelta) else 1.0
        must_look = not (has_listened and is_drained)
        return cls(max(seconds, 0.0), is_drained, must_look, look_after.total_seconds())


class SleepListener(NotifyConnection):
    """The connection on which a worker goes to sleep and wakes."""

    def __init__(
        self,
        source: Source,
        *,
        on_work: Callable[[], None],
        on_message: Callable[[], None],
        on_pause: Callable[[], None],
        on_connection_lost: Callable[[], None],
    ) -> None:
        super().__init__(source)
        self._on_work = on_work
        self._on_message = on_message
        self._on_pause = on_pause
        self._on_connection_lost = on_connection_lost
        self._wanted: list[str] = []
        self._delays = GrowingDelay()
        self._not_before = 0.0
        self.holds_sleep_lock = False
        # Whether `after_sleep` is under way: the next call waits for it, in the lock's order.
        self._is_leaving = False
        #: Whether the worker fetches as soon as producers notify; otherwise `_look_after` seconds
        #: later.
        self.is_first = False
        self._look_after = 0.0
        self._look: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        # Each pause moves it on by a second; it may be ahead of the clock by PAUSES_AT_ONCE.
        self._pauses_until = 0.0

    async def before_sleep(
        self, worker: int, queues: Sequence[str] | None, options: str | None = None
    ) -> Sleep:
        """Report that this worker goes to sleep; return for how long it may, at most.

        Without a connection the worker polls, each second. `options` are those of
        queue.before_sleep (`Slots.sleep_options`).
        """
        loop = asyncio.get_running_loop()
        if loop.time() < self._not_before:
            return Sleep(1.0)
        if self._lock.locked() and not self._is_leaving:
            # While the connection is busy, it hears nothing.
            return Sleep(0.05)
        try:
            while True:
                listened = set(self._channels)
                rows = await self.exchange(
                    sql.BEFORE_SLEEP, worker=worker, queues=queues, options=options
                )
                session = self._connection
                self._wanted = channels = rows[0][2]
                # A new session listens to nothing yet.
                has_listened = listened.issuperset(channels) and self._channels == listened
                await self.listen_again()
                if self._connection is session:
                    break
                # The database took note of a session that no longer listens.
        except ConnectionLost as error:
            log.warning("the listening connection was lost: %s", error)
            self._not_before = loop.time() + self._delays.next()
            return Sleep(1.0)
        self._delays.reset()
        self.holds_sleep_lock = bool(channels)
        sleep = Sleep.of(rows[0], has_listened=has_listened)
        self._look_after = sleep.look_after
        self.is_first = "pgdefer" in channels and not sleep.look_after
        return sleep

    async def listen_again(self) -> None:
        """Listen to the channels of `before_sleep`, and to no other. Raises ConnectionLost."""
        while missing := [name for name in self._wanted if name not in self._channels]:
            await self.listen(missing[0])
        while others := [name for name in self._channels if name not in self._wanted]:
            self._channels.discard(others[0])
            await self.exchange(sql.unlisten(others[0]))

    async def after_sleep(self, worker: int) -> None:
        """Report that this worker is busy again."""
        self.is_first = False
        if self.holds_sleep_lock:
            self.holds_sleep_lock = False
            self._is_leaving = True
            try:
                await self.exchange(sql.AFTER_SLEEP, worker=worker)
            except ConnectionLost:
                self._lost()
            except psycopg.Error as error:
                # As when the call takes too long. The end of the session frees its lock, too.
                log.warning("the listening connection is closed: %s", describe(error))
                self.close()
                self._lost()
            finally:
                self._is_leaving = False

    def _opened(self, connection: AsyncPsycopgConnection) -> None:
        super()._opened(connection)
        self.holds_sleep_lock = self.is_first = False

    def _heard(self, channel: str, payload: str) -> None:
        if channel != "pgdefer" and payload == "pause":
            self._heard_of_pause()
        elif channel != "pgdefer" and payload != "sleep":
            self._on_message()
        elif channel != "pgdefer" or not self._look_after:
            self._on_work()
        elif self._look is None:
            self._look = asyncio.get_running_loop().call_later(self._look_after, self._look_now)

    def _heard_of_pause(self) -> None:
        """Report a pause at once; of many, one a second, because any role can send this message."""
        if self._pause is not None:
            return
        loop = asyncio.get_running_loop()
        self._pauses_until = max(self._pauses_until, loop.time()) + 1
        wait = self._pauses_until - loop.time() - PAUSES_AT_ONCE
        if wait <= 0:
            self._on_pause()
        else:
            self._pause = loop.call_later(wait, self._tell_of_pause)

    def _tell_of_pause(self) -> None:
        self._pause = None
        self._on_pause()

    def _look_now(self) -> None:
        self._look = None
        self._on_work()

    def _lost(self) -> None:
        self._on_connection_lost()

    def close(self) -> None:
        """Close at once; the next call connects and listens again."""
        self.holds_sleep_lock = self.is_first = False
        super().close()


class OnlyConnection(SleepListener):
    """The only connection of a worker: it makes its calls here too, one at a time."""

    async def call(self, statement: sql.Statement, **parameters: object) -> Rows:
        """Run a statement. Raises as `Connection.call`."""
        return await self.exchange(statement, **parameters)

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[AsyncPsycopgConnection]:
        """Lend the connection. Raises as `call`."""
        async with self._lock:
            await self.open()
            self._watch(on=False)
            try:
                async with super().lend() as connection:
                    yield connection
            finally:
                self._watch(on=True)

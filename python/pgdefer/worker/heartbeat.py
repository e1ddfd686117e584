"""A worker's heartbeats, and extensions of claims whose jobs outlive their timeout.

Tests: integration/test_worker_heartbeats.py, integration/test_worker_timeouts.py.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime as dt
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import psycopg

from pgdefer._text import logger
from pgdefer.database import sql
from pgdefer.database.connection import Connection, ConnectionLost, Rows
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.database.own_threads import in_own_thread
from pgdefer.database.source import Source
from pgdefer.errors import describe, sqlstate_of
from pgdefer.options import interval_text
from pgdefer.worker.claim import Claim

__all__ = ["Heartbeat", "HeartbeatThread", "clock"]

log = logger("pgdefer.worker")

# How often to look for jobs that outlive their timeout, and to extend their claims, in seconds:
# reap waits 10 s after a timeout. The lease is longer than that, which tells such claims apart.
LOOK = 3.0
SHORTEST_LEASE = 15.0
# How often to say again that the worker's loop does not answer, in seconds.
SAY_EVERY = 60.0
# How long a heartbeat over the worker's own connection may take before it is sent over another.
PATIENCE = 3.0
# How long to wait for the locked row of a claim that is to be extended, in seconds.
ROW_PATIENCE = 1.0
NOT_EXTENDED = "%r: its claim could not be extended: %s"

Aborts = list[tuple[int, int, str]]


def clock() -> float:
    """Return seconds by a clock that also runs while the machine is suspended, if there is one."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _never() -> bool:
    return False


class HeartbeatThread:
    """A thread with an event loop, for the heartbeats of one or several workers."""

    def __init__(self) -> None:
        #: Called every few seconds; one timer for all, because each of 200 would cost as much.
        self.looks: set[Callable[[], None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="pgdefer-heartbeat", daemon=True)
        self._is_ready = threading.Event()

    def start(self, beats: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        """Run heartbeats in the thread."""
        if self._thread.ident is None:
            self._thread.start()
        self._is_ready.wait()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(beats, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Call in the thread, if it runs."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    async def stop(self) -> None:
        """End the thread and what still runs in it, without waiting long for that."""
        if self._thread.ident is not None:
            assert self._loop is not None
            self.call(self._loop.stop)
            await in_own_thread(self._thread.join, 2.0)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.call_later(LOOK, self._look, self._loop)
            self._is_ready.set()
            self._loop.run_forever()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(LOOK, self._look, loop)
        for look in self.looks:
            look()


class _Sent(NamedTuple):
    """A heartbeat over the worker's own connection."""

    worker: int
    at: float
    answer: concurrent.futures.Future[Rows | Exception]


class Heartbeat:
    """Heartbeats, in a thread and an event loop of their own.

    Those of a worker that has the thread to itself go over a connection of their own and, if that
    can't be opened, over the worker's (`over`), as long as its loop answers. Those of several
    workers, which share a thread, go over the worker's connection and, if that fails while jobs run
    (`is_needed`), over one of their own.

    The callbacks are called in the worker's loop: `on_beat` after each heartbeat that was answered,
    with (id, claim, reason) of the jobs to abort; `on_gone` when the worker was declared dead;
    `on_lost` with a claim that should have been extended and had ended. `memory` is called in the
    heartbeats' thread, and returns what they tell. `on_silence` is called there, too, with the
    seconds for which the worker's loop has not answered while jobs run.
    """

    def __init__(
        self,
        source: Source,
        interval: float,
        dead_after: float,
        *,
        on_beat: Callable[[Aborts], None],
        on_gone: Callable[[int], None],
        on_lost: Callable[[Claim], None],
        thread: HeartbeatThread | None = None,
        on_silence: Callable[[float], None],
        memory: Callable[[], int | None],
        over: Callable[[int], Coroutine[Any, Any, Rows]] | None = None,
        is_needed: Callable[[], bool] = _never,
    ) -> None:
        self._source = source
        self._interval = interval
        self._dead_after = dead_after
        self._on_beat = on_beat
        self._on_gone = on_gone
        self._on_lost = on_lost
        self._outer = asyncio.get_running_loop()
        # Set to send a heartbeat now, or to extend claims.
        self._event: asyncio.Event | None = None
        self._was_poked = False
        #: The time, by `clock`, after which the claim of a job must be extended.
        self.extend_after: dict[Claim, float] = {}
        self._lease = interval_text(dt.timedelta(seconds=max(dead_after, SHORTEST_LEASE)))
        # Less than a call may take: the server would go on with a call that was cut off.
        patience = min(ROW_PATIENCE, interval / 2)
        self._patience = f"{max(round(patience * 1000), 1)}ms"
        self._late: set[Claim] = set()
        self._worker: int | None = None
        self._is_stopped = False
        #: When the last answered heartbeat was sent, by `clock`.
        self.beat_at = 0.0
        self._thread = thread or HeartbeatThread()
        self._has_own_thread = thread is None
        self._on_silence = on_silence
        # When the worker's loop was asked for an answer, by `clock`; None once it has given one.
        self._asked_at: float | None = None
        self._say_after = 0.0
        self._memory = memory
        self._over = over
        self._is_needed = is_needed
        # A heartbeat over the worker's connection that is under way.
        self._sent: _Sent | None = None
        self._running: concurrent.futures.Future[None] | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether no heartbeat was answered for so long that others may have the jobs by now."""
        return clock() - self.beat_at >= self._dead_after

    def start(self, worker: int, registered_at: float) -> None:
        """Send heartbeats for this worker from now on."""
        self.beat_at = registered_at
        self._worker = worker
        if self._running is None:
            self._running = self._thread.start(self._run())

    def on_first_fetch(self) -> None:
        """Send the first heartbeat, unless several workers share the thread."""
        if self._has_own_thread:
            self.poke()

    def poke(self) -> None:
        """Send a heartbeat now: there is a message for the worker."""
        self._thread.call(self._on_poke)

    def _on_poke(self) -> None:
        self._was_poked = True
        if self._event is not None:
            self._event.set()

    def _look(self) -> None:
        if self._event is not None and self._outlived():
            self._event.set()
        if self._is_needed():
            self._look_at_loop()

    def _look_at_loop(self) -> None:
        if self._asked_at is None:
            self._asked_at, self._say_after = clock(), 0.0
            with contextlib.suppress(RuntimeError):  # it has ended
                self._outer.call_soon_threadsafe(self._on_answer)
            return
        silence = clock() - self._asked_at
        if silence >= self._say_after:
            self._say_after = silence + SAY_EVERY
            self._on_silence(silence)

    def _on_answer(self) -> None:
        self._asked_at = None

    def _outlived(self) -> list[Claim]:
        """Return the claims that must be extended, in the order of their moments."""
        now = clock()
        moments = self.extend_after.copy()
        late = [claim for claim, moment in moments.items() if moment <= now]
        return sorted(late, key=moments.__getitem__)

    async def stop(self) -> None:
        """Stop sending heartbeats."""
        self._is_stopped = True
        self.poke()
        if self._running is not None:
            await asyncio.wait([asyncio.wrap_future(self._running)], timeout=2.0)
        if self._has_own_thread:
            await self._thread.stop()

    async def _run(self) -> None:
        """Send heartbeats until `stop`, whatever fails: without them, others get the jobs."""
        # A heartbeat may keep the first fetch from a job that has to run alone, so it waits for
        # that. Several workers do not send theirs all at the same time.
        part = 1.0 if self._has_own_thread else random.random()  # noqa: S311
        delay = self._interval * part
        delays = GrowingDelay(last=2.0)
        while not self._is_stopped:
            try:
                await self._beat(delay)
            except Exception:
                log.exception("heartbeats were interrupted")
                await asyncio.sleep(delays.next())
                delay = 0.0

    async def _beat(self, delay: float) -> None:
        self._event = asyncio.Event()
        self._thread.looks.add(self._look)
        connection = Connection(self._source, self._interval)
        delays = GrowingDelay(last=2.0)
        try:
            await self._rest(connection, delay)
            while not self._is_stopped:
                delay = await self._beat_once(connection, delays)
                await self._rest(connection, delay)
        finally:
            self._thread.looks.discard(self._look)
            connection.close()

    async def _beat_once(self, connection: Connection, delays: GrowingDelay) -> float:
        """Send a heartbeat, if there is a worker; return how long to wait before the next one."""
        self._was_poked = False
        worker = self._worker
        if worker is None:
            return self._interval
        try:
            sent_at, rows = await self._send(connection, worker)
        except (ConnectionLost, psycopg.Error) as error:
            if sqlstate_of(error) != "QJ007":
                log.warning("no heartbeat: %s", describe(error))
                return delays.next()
            if self._worker == worker:
                self._worker = None
            self._tell(self._on_gone, worker)
            return self._interval
        if self._worker == worker:
            self.beat_at = sent_at
        self._tell(self._on_beat, [(row[0], row[1], row[2]) for row in rows])
        delays.reset()
        return self._interval

    async def _send(self, connection: Connection, worker: int) -> tuple[float, Rows]:
        """Send a heartbeat; return when, and the answer. Raises as `Connection.call`."""
        if self._over is None or self._has_own_thread:
            try:
                await connection.open()
            except ConnectionLost as error:
                # An error without a cause says that the server still works on the last call.
                if self._over is None or error.__cause__ is None:
                    raise
                log.warning("heartbeats have no connection of their own: %s", error)
                return await self._send_over(worker)
            self._sent = None  # its answer would be out of date next time
            return await self._send_apart(connection, worker)
        try:
            answer = await self._send_over(worker)
        except Exception as error:
            if sqlstate_of(error) == "QJ007" or not self._is_needed():
                raise
            return await self._send_apart(connection, worker)
        connection.close()
        return answer

    async def _send_apart(self, connection: Connection, worker: int) -> tuple[float, Rows]:
        sent_at = clock()
        return sent_at, await connection.call(sql.HEARTBEAT, worker=worker, memory=self._memory())

    async def _send_over(self, worker: int) -> tuple[float, Rows]:
        """Send a heartbeat over the worker's connection, if its loop answers."""
        sent = self._sent
        if sent is None or sent.worker != worker:
            answer = asyncio.run_coroutine_threadsafe(self._ask(worker), self._outer)
            sent = self._sent = _Sent(worker, clock(), answer)
        # Not cancelled at the timeout: that would close the connection, on which other calls wait.
        patience = PATIENCE if self._is_needed() else self._interval
        await asyncio.wait([asyncio.wrap_future(sent.answer)], timeout=patience)
        if not sent.answer.done():
            raise ConnectionLost(f"no answer within {patience:g} s")
        self._sent = None
        found = sent.answer.result()
        if isinstance(found, Exception):
            raise found
        return sent.at, found

    async def _ask(self, worker: int) -> Rows | Exception:
        """Send a heartbeat over the worker's connection; return the answer, or the error."""
        assert self._over is not None
        try:
            return await self._over(worker)
        except Exception as error:
            return error

    async def _rest(self, connection: Connection, delay: float) -> None:
        """Wait until the next heartbeat, or until poked; meanwhile extend claims that need it."""
        assert self._event is not None
        end = time.monotonic() + delay
        while not self._is_stopped:
            self._event.clear()
            await self._extend_late(connection, end)
            left = end - time.monotonic()
            if left <= 0 or self._was_poked:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._event.wait()

    async def _extend_late(self, connection: Connection, end: float) -> None:
        """Extend the claims of jobs that outlive their timeout: their locks and slots are in use.

        This happens here, outside of the worker's loop, because a handler may block that. At the
        `end`, or when poked, the next heartbeat goes first.
        """
        late = self._outlived()
        self._late.intersection_update(late)
        for claim in late:
            if self._was_poked or time.monotonic() >= end:
                return
            job = claim.job
            if claim not in self._late:
                self._late.add(claim)
                said = "%r outlives its timeout: its claim is extended until it ends"
                log.warning(said, job, extra=job._log_fields())
            try:
                await connection.call(
                    sql.TRY_EXTEND,
                    id=job.id,
                    claim=job.claim,
                    lease=self._lease,
                    patience=self._patience,
                )
            except ConnectionLost as error:
                log.warning(NOT_EXTENDED, job, error, extra=job._log_fields())
                return
            except psycopg.Error as error:
                if sqlstate_of(error) in ("QJ001", "QJ002"):
                    self.extend_after.pop(claim, None)
                    self._tell(self._on_lost, claim)
                else:
                    log.warning(NOT_EXTENDED, job, describe(error), extra=job._log_fields())
                    if claim in self.extend_after:
                        self.extend_after[claim] = clock()  # next time after the others

    def _tell(self, callback: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):
            self._outer.call_soon_threadsafe(callback, value)

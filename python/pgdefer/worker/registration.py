"""Registers a worker. Calls on the main connection are retried.

Tests: integration/test_registration.py, integration/test_worker_heartbeats.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import json
import os
import platform
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import psycopg

from pgdefer._text import logger
from pgdefer._version import __version__
from pgdefer.client.base import HELD, NO_PATIENCE, PATIENCE
from pgdefer.database import sql
from pgdefer.database.connection import Connection, ConnectionLost
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.database.source import AsyncPsycopgConnection
from pgdefer.errors import PgDeferError, WorkerGone, describe, sqlstate_of, translate
from pgdefer.options import JobOptions, interval_text
from pgdefer.tasks.registry import Registry
from pgdefer.worker.completer import FATAL
from pgdefer.worker.heartbeat import Heartbeat, clock
from pgdefer.worker.slots import Slots
from pgdefer.worker.state import WorkerState
from pgdefer.worker.supervisor import SupervisorChannel

__all__ = ["Refused", "Registration", "raise_fatal"]

log = logger("pgdefer.worker")

#: For how long a worker tries to register tasks one by one, in seconds.
CATCH_UP = 1.0


class Refused(Exception):  # noqa: N818
    """The database refuses a call, and the worker must end."""


class Registration:
    """Registers a worker with its tasks and schedules, and tells its supervisor."""

    def __init__(
        self,
        registry: Registry,
        state: WorkerState,
        connection: Connection,
        heartbeat: Heartbeat,
        *,
        on_connection_lost: Callable[[], None],
        has_work: Callable[[], bool],
        name: str,
        queues: list[str] | None,
        slots: list[Slots],
        heartbeat_every: float,
        dead_after: float,
        prune_schedules: bool,
        register_schedules: bool,
        channel: SupervisorChannel | None,
    ) -> None:
        self._registry = registry
        self._state = state
        self._connection = connection
        self._heartbeat = heartbeat
        self._on_connection_lost = on_connection_lost
        self._has_work = has_work
        self._name = name
        self._queues = queues
        self._max_running = slots[0].max_running or {}
        self._info = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "client": f"pgdefer {__version__}",
            "python": platform.python_version(),
            "concurrency": sum(each.size for each in slots),
            "slots": [str(each) for each in slots],
            "heartbeat_every": heartbeat_every,
            "dead_after": interval_text(dt.timedelta(seconds=dead_after)),
            "listen": registry.client.source.notify_source is not None,
        }
        self._prune_schedules = prune_schedules
        self._channel = channel
        self._announced: int | None = None
        #: Whether the database has once taken its tasks, and its schedules if it registers any.
        self.was_accepted = False
        self._register_schedules = register_schedules
        #: The tasks that are not registered yet, as other transactions hold them.
        self._held: dict[str, JobOptions] = {}
        self._is_catching_up = False

    async def register(self) -> None:
        """Register the tasks, the schedules and the worker, and start its heartbeats."""
        registry = self._registry
        await self._with_connection(self._register_tasks)
        if not self.was_accepted:
            # Only once: a schedule that was removed by hand stays removed.
            if self._register_schedules:
                await self._with_connection(
                    functools.partial(registry._register_schedules, prune=self._prune_schedules)
                )
            self.was_accepted = True
        registered_at = clock()
        ((worker,),) = await self.ask(
            sql.REGISTER_WORKER, name=self._name, queues=self._queues, info=json.dumps(self._info)
        )
        self._state.id = worker
        self._heartbeat.start(worker, registered_at)

    async def _register_tasks(self, connection: AsyncPsycopgConnection) -> None:
        """Register the tasks, but do not wait long for a transaction that registers one, too.

        That may be any transaction in which a changed task is deferred for the first time.
        """
        client = self._registry.client
        self._held = {}
        try:
            await client.register_async(connection, patience=PATIENCE)
        except HELD:
            self._held = dict(client.defaults)
            await self._register_held(connection)
            if self._held:
                log.warning(
                    "an open transaction registers tasks of this worker, too: until it ends, the"
                    " worker's defaults have no effect for %s",
                    _listed(self._held),
                )

    async def _register_held(self, connection: AsyncPsycopgConnection) -> None:
        """Register those tasks that other transactions held, unless they still do."""
        client, end = self._registry.client, clock() + CATCH_UP
        for name, defaults in list(self._held.items()):
            if clock() > end:
                return
            self._held.pop(name, None)
            try:
                only = {name: defaults}
                await client.register_async(connection, only, patience=NO_PATIENCE)
            except HELD:
                self._held[name] = defaults  # the next time after the others
            except (ConnectionLost, psycopg.Error, asyncio.CancelledError):
                self._held[name] = defaults
                raise

    async def catch_up(self) -> None:
        """Register tasks that could not be registered before, if there are any.

        A worker that stops leaves them to its successors, whose defaults may be newer.
        """
        if not self._held or self._state.is_stopping or self._is_catching_up:
            return
        names = _listed(self._held)
        self._is_catching_up = True
        try:
            async with self._connection.lend() as connection:
                await self._register_held(connection)
        except (ConnectionLost, psycopg.Error, PgDeferError) as error:
            log.warning("tasks are not registered yet: %s", describe(error))
            if isinstance(error, ConnectionLost):  # it may be the one on which the worker listens
                self._on_connection_lost()
        else:
            if not self._held:
                log.info("registered now: %s", names)
        finally:
            self._is_catching_up = False

    async def announce(self) -> None:
        """Report to the supervisor, then to the log, which worker this is.

        Before that, report to the database that the worker which this one replaces is dead.
        """
        worker = self._state.registered()
        if self._announced == worker:
            return
        channel = self._channel
        if channel is not None:
            if channel.replaces is not None:
                with contextlib.suppress(WorkerGone):  # it serves queues that this role may not use
                    ((ended,),) = await self.ask(sql.WORKER_DIED, worker=channel.replaces)
                    log.info("worker %d is dead, ended claims: %d", channel.replaces, ended)
                channel.replaces = None
            channel.tell(worker)
        is_first = self._announced is None
        self._announced = worker
        log.info("worker %d serves %s", worker, ", ".join(self._queues or ["all queues"]))
        if is_first:
            await self._warn_of_unknown_queues()

    async def _warn_of_unknown_queues(self) -> None:
        """Warn of queues that may be misspelt. Not an error: their first jobs may come later."""
        registry = self._registry
        known: set[object] = {"default"}
        known.update(task.defaults.arguments.get("queue") for task in registry.tasks.values())
        known.update(schedule.options.get("queue") for schedule in registry.schedules.values())
        limited = []
        for name in self._max_running:
            if any(_overlap(name, queue) for queue in self._queues or ["*"]):
                limited.append(name)
            else:
                log.warning(
                    "max_running limits the queue %r, which this worker does not serve", name
                )
        listed = dict.fromkeys([*(self._queues or ()), *limited])
        names = [name for name in listed if name not in known and name[-1] != "*"]
        if not names:
            return
        try:
            rows = await self._connection.call(sql.KNOWN_QUEUES, names=names)
        except (ConnectionLost, psycopg.Error):
            return  # this role may not read the view, or it takes too long: it is only a warning
        found = {name for (name,) in rows}
        for name in names:
            if name not in found:
                log.warning(
                    "the queue %r is new or misspelt: no job was ready in it, no task names it",
                    name,
                )

    def tell_done(self) -> None:
        """Report to the supervisor that nothing is left of this worker."""
        if self._channel is not None:
            self._channel.tell_done()

    # Calls with retries

    async def ask(self, statement: sql.Statement, **parameters: object) -> list[tuple[Any, ...]]:
        """Make a call on the main connection; retry temporary errors, raise permanent ones."""
        delays = GrowingDelay()
        while True:
            try:
                return await self._connection.call(statement, **parameters)
            except psycopg.Error as error:
                await self.try_again(error, delays)

    async def _with_connection(
        self, function: Callable[[AsyncPsycopgConnection], Awaitable[object]]
    ) -> None:
        """Run a function with the main connection; retry as `ask` does."""
        delays = GrowingDelay()
        while True:
            try:
                async with self._connection.lend() as connection:
                    await function(connection)
            except psycopg.Error as error:
                await self.try_again(error, delays)
            else:
                return

    async def try_again(self, error: psycopg.Error, delays: GrowingDelay) -> None:
        """Wait before the next try. Raises permanent errors, and Refused if there is none."""
        raise_fatal(error)
        if self._state.is_stopping and not self._has_work():
            raise Refused(describe(error)) from error
        log.warning("trying again: %s", describe(error))
        await self._state.pause(delays.next())
        if self._state.must_stop_at_once.is_set():
            raise Refused(describe(error)) from error


def _listed(names: Iterable[str]) -> str:
    """Return the first names, as text."""
    first, *others = sorted(names)
    shown = [repr(name) for name in (first, *others[:4])]
    return ", ".join(shown) + (f" and {len(others) - 4} more" if len(others) > 4 else "")


def _overlap(one: str, other: str) -> bool:
    """Whether a queue may have both names, each of which may be a pattern."""
    if other.endswith("*"):
        one, other = other, one
    if not one.endswith("*"):
        return one == other
    start, rest = one[:-1], other.removesuffix("*")
    return rest.startswith(start) or (other != rest and start.startswith(rest))


def raise_fatal(error: psycopg.Error) -> None:
    """Raise errors that waiting can't fix, and those that say that the worker is gone."""
    code = sqlstate_of(error)
    if code == "QJ007" or code in FATAL:
        raise translate(error) or error

"""One process that works for many databases: a worker in each, which share the slots."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import psycopg

from pgdefer._text import database_in_logs, logger
from pgdefer.checks import check_number
from pgdefer.client.base import Refusal
from pgdefer.client.client import Client
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.database.own_threads import in_own_thread
from pgdefer.database.source import Source
from pgdefer.errors import InvalidParameter, PgDeferError, describe, translate
from pgdefer.tasks.registry import Registry
from pgdefer.worker.blocking import warn_at_stop
from pgdefer.worker.databases import Database, DsnFile, read_dsns
from pgdefer.worker.heartbeat import HeartbeatThread, clock
from pgdefer.worker.options import WorkerOptions, check_options
from pgdefer.worker.prefetch import MOST_OF_MANY
from pgdefer.worker.probes import Answer, Probes, answer
from pgdefer.worker.shared_slots import DatabaseSlots, SharedSlots
from pgdefer.worker.shielded import run_shielded
from pgdefer.worker.state import check_may_run
from pgdefer.worker.threads import Threads
from pgdefer.worker.turnstile import Turnstile
from pgdefer.worker.unix_signals import run_until_signal, signals
from pgdefer.worker.worker import Shared, Worker

__all__ = ["MultiWorker"]

log = logger("pgdefer.worker")

# How often to look whether the file with the DSNs has changed, in seconds.
LOOK = 1.0
# How many workers connect and register at a time: of all databases, and of those of one server.
STARTS, STARTS_OF_ONE = 64, 8
# When to try again in a database that refuses the worker: after 1 s, then up to a minute.
RETRY_FIRST, RETRY_LAST = 1.0, 60.0
# What only a worker of one database takes.
SINGLE = ("slots", "max_jobs")


class MultiWorker:
    """Runs an app's jobs in many databases: of a list of DSNs, or of a file with one per line.

    The file is read again when it changes, and databases are added and removed. All databases share
    `concurrency` slots. A free slot goes to the database that has waited longest; the jobs of one
    database use at most `per_database` slots at once, half of them by default. So a database whose
    handlers hang leaves slots to the others. The other options are those of `Worker`, without
    `slots` and `max_jobs`. At most twice `prefetch` jobs are claimed ahead, because two databases
    may do so at a time.

    The worker has one connection to each database, as long as the event loop answers. If a database
    can't be reached, or refuses the worker, this is logged and tried again; the others go on.
    """

    def __init__(
        self,
        app: Registry,
        dsns: Iterable[str] | Path,
        queues: Sequence[str] | None = None,
        *,
        per_database: int | None = None,
        **options: Unpack[WorkerOptions],
    ) -> None:
        check_options(options)
        if refused := ", ".join(name for name in SINGLE if options.get(name) is not None):
            raise ValueError(f"a worker of many databases takes no option {refused}")
        if isinstance(dsns, str):
            raise TypeError("dsns must be a list of DSNs or a Path, not a string")
        self.app = app
        self._client = app.client
        self._file = DsnFile(dsns) if isinstance(dsns, Path) else None
        self._listed = {} if isinstance(dsns, Path) else read_dsns(dsns)
        self.concurrency = options.pop("concurrency", 20)
        self.per_database = -(-self.concurrency // 2) if per_database is None else per_database
        check_number("per_database", self.per_database, int, at_least=1)
        if self.per_database > self.concurrency:
            raise ValueError(
                f"per_database must be from 1 to concurrency, {self.concurrency}, "
                f"not {self.per_database}"
            )
        self.http = options.pop("http", None)
        self.drain = options.get("drain", False)
        self._prefetch = options.pop("prefetch", MOST_OF_MANY)
        self._queues = queues
        self._options = options
        Worker(app, queues, **options)  # checks the rest
        self._slots = SharedSlots(
            self.concurrency, self.per_database, self._prefetch, keep=self.concurrency
        )
        #: What answers probes while it runs.
        self.probes: Probes | None = None
        self._served: dict[tuple[str, ...], _Served] = {}
        # Removed databases whose jobs have not ended: another DSN for them may be served meanwhile.
        self._leaving: set[_Served] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._news: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Of workers that have ended.
        self._finished = self._given_back = self._unreported = self._unresponsive = 0
        self._errors: dict[str, str] = {}

    # What has become of its jobs, as of a Worker

    @property
    def workers(self) -> dict[str, Worker]:
        """The workers that run now, by the names of their databases; not those that only end."""
        return {
            served.database.name: served.worker
            for served in list(self._served.values())
            if served.worker is not None
        }

    def _all_workers(self) -> list[Worker]:
        return [one.worker for one in self._all_served() if one.worker is not None]

    def _all_served(self) -> list[_Served]:
        return [*self._served.values(), *self._leaving]

    @property
    def finished(self) -> int:
        """The number of jobs that have ended here."""
        return self._finished + sum(worker.finished for worker in self._all_workers())

    @property
    def given_back(self) -> int:
        """The number of running jobs that were given back for a stop."""
        return self._given_back + sum(worker.given_back for worker in self._all_workers())

    @property
    def unreported(self) -> int:
        """The number of outcomes that databases have not accepted: after the end, for good."""
        return self._unreported + sum(worker.unreported for worker in self._all_workers())

    @property
    def unresponsive(self) -> int:
        """The number of coroutines that did not end when told to; after `run`, also of threads."""
        return self._unresponsive + sum(worker.unresponsive for worker in self._all_workers())

    # Life

    def run(self) -> None:
        """Run until a signal: `stop` at the first SIGTERM, SIGINT or SIGHUP.

        At a second SIGTERM or SIGINT, or at SIGQUIT, `stop_at_once`.
        """
        run_until_signal(self.run_async, self._note_unresponsive)

    async def run_async(self, *, handle_signals: bool = False) -> None:
        """Run until `stop`. If cancelled, stop first: at once, unless `shutdown_timeout` is set.

        With `drain`, raises PgDeferError in the end if some databases could not be drained.
        """
        check_may_run(has_run=self._loop is not None)
        self._client.check_worker()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self.app.import_tasks()
        self._check_tasks()
        if self._file is not None:
            try:
                self._listed = self._file.read()
            except OSError as error:
                raise InvalidParameter(f"the list of databases can't be read: {error}") from error
        # Slots limit the threads, too. A handler that goes on when its worker has ended keeps its
        # thread, but no slot.
        self._shared = Shared(Threads(self._loop), HeartbeatThread())
        self._turnstile = Turnstile(STARTS, STARTS_OF_ONE)
        with contextlib.ExitStack() as stack:
            if not self._client.source.is_chosen:
                stack.enter_context(self._refused_elsewhere())
            if handle_signals:
                stack.enter_context(self._on_signals())
            self.app.databases = self._reached
            stack.callback(setattr, self.app, "databases", None)
            if self.http is not None:
                self.probes = Probes(self.http, self._answer)
            try:
                await self._serve_all()
            finally:
                await run_shielded(self._close)
        if self._errors:
            raise PgDeferError(
                f"{len(self._errors)} databases could not be drained: "
                + "; ".join(f"{name}: {said}" for name, said in self._errors.items())
            )

    async def _close(self) -> None:
        """Close what the workers have shared. May be repeated."""
        if self.probes is not None:
            await in_own_thread(self.probes.close)
        await self._shared.heartbeats.stop()
        self._shared.threads.close()

    def stop(self) -> None:
        """Claim no more jobs, and end when the running ones end, at most after `shutdown_timeout`.

        May be called from any thread, as may `stop_at_once`.
        """
        self._tell()
        self._call(self._stop, False)

    def stop_at_once(self) -> None:
        """Abort the running jobs and give back those that don't end within a second."""
        self._tell()
        self._call(self._stop, True)

    def _call(self, function: Any, *args: Any) -> None:
        if self._loop is None:
            self._is_stopping = True
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    def _tell(self) -> None:
        for served in self._all_served():
            if served.worker is not None:
                served.worker.state.tell_to_stop()

    def _on_signals(self) -> contextlib.AbstractContextManager[None]:
        loop = asyncio.get_running_loop()

        def on_deaf() -> None:
            for worker in self._all_workers():
                warn_at_stop(loop, worker.executor.running)

        return signals(self._on_stop, self.stop_at_once, self._tell, on_deaf)

    def _on_stop(self) -> None:
        self._stop(self._is_stopping)

    def _stop(self, at_once: bool) -> None:
        if not self._is_stopping:
            log.info("stopping the workers of %d databases", len(self._served))
        self._is_stopping = True
        for served in self._all_served():
            served.stop(at_once=at_once)
        self._look_again()

    @contextlib.contextmanager
    def _refused_elsewhere(self) -> Iterator[None]:
        """Make calls outside of jobs fail: nothing says which database they are meant for."""
        before = self._client.stand_in
        self._client.stand_in = Refusal(
            "this worker serves many databases, and no job says here which one is meant: use "
            "app.bind(dsn), or start threads with contextvars.copy_context()"
        )
        try:
            yield
        finally:
            self._client.stand_in = before

    def _check_tasks(self) -> None:
        """Refuse tasks whose transactions would all be in one database, not in the job's."""
        for task in self.app.tasks.values():
            if callable(task.execution.transactional):
                raise InvalidParameter(
                    f"the task {task.name!r} is transactional with sessions of its own, which lead "
                    "to one database",
                    hint="Use transactional=True.",
                )

    # The databases

    async def _serve_all(self) -> None:
        assert self._news is not None
        watching = None if self._file is None else asyncio.create_task(self._watch(self._file))
        if not self._listed:
            log.warning("there are no databases yet")
        try:
            while True:
                self._news.clear()
                self._start_missing()
                is_over = self._is_stopping or self.drain or watching is None
                if is_over and not self._all_served():
                    return
                await self._news.wait()
        finally:
            if watching is not None:
                watching.cancel()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await run_shielded(lambda: asyncio.gather(*self._tasks, return_exceptions=True))

    async def _watch(self, file: DsnFile) -> None:
        """Add and remove databases when the file changes."""
        while not self._is_stopping:
            await asyncio.sleep(LOOK)
            found = await in_own_thread(file.changed)
            if found is None or self._is_stopping:
                continue
            self._listed = found
            for place, served in list(self._served.items()):
                if found.get(place) != served.database:
                    self._leaving.add(self._served.pop(place))
                    served.stop()
            log.info("%s has changed: it lists %d databases", file.path, len(found))
            self._look_again()

    def _start_missing(self) -> None:
        for place, database in self._listed.items():
            if place not in self._served and not self._is_stopping:
                served = self._served[place] = _Served(database, self._client)
                task = asyncio.create_task(self._serve(served))
                self._tasks.add(task)
                task.add_done_callback(functools.partial(self._on_end, place, served))

    def _on_end(self, place: tuple[str, ...], served: _Served, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        served.client.close_idle()
        if served in self._leaving:
            self._leaving.remove(served)
        else:
            del self._served[place]
            self._listed.pop(place, None)
        self._look_again()

    def _look_again(self) -> None:
        if self._news is not None:
            self._news.set()

    async def _serve(self, served: _Served) -> None:
        """Work for one database; try again when it refuses the worker."""
        database_in_logs.set(served.database.name)
        delays = GrowingDelay(RETRY_FIRST, RETRY_LAST)
        with served.client.entered():
            while not served.is_stopping:
                worker = self._worker(served)
                began = clock()
                try:
                    await worker.run_async()
                    return
                except (PgDeferError, psycopg.Error, OSError) as error:
                    served.said = describe(translate(error) or error)
                    log.error("no jobs are run there: %s", served.said)
                except Exception as error:
                    served.said = type(error).__qualname__
                    log.exception("no jobs are run there")
                finally:
                    self._forget(served, worker)
                if self.drain:
                    self._errors[served.database.name] = served.said
                    return
                if clock() - began > RETRY_LAST:
                    delays.reset()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(served.stopped.wait(), delays.next())

    def _worker(self, served: _Served) -> Worker:
        worker = Worker(served.app(self.app), self._queues, **self._options)
        slots = served.own_slots = DatabaseSlots(self._slots, worker.slots[0])
        slots.start_next = functools.partial(worker.executor.start_next, slots)
        slots.on_turn, slots.on_rest = worker.state.hint, worker.rest
        worker.slots = [slots]
        worker.concurrency, worker.shared = slots.size, self._shared
        worker.turnstile = functools.partial(self._turnstile.entered, served.database.server)
        served.worker = worker
        return worker

    def _forget(self, served: _Served, worker: Worker) -> None:
        """Add up what a worker has done."""
        served.worker = None
        if served.own_slots is not None:
            self._slots.forget(served.own_slots)
        self._finished += worker.finished
        self._given_back += worker.given_back
        self._unreported += worker.unreported
        self._unresponsive += worker.unresponsive

    def _note_unresponsive(self, count: int) -> None:
        self._unresponsive = max(self._unresponsive, count)

    # Probes

    def _answer(self, path: str) -> Answer:
        """Answer a probe. Called in threads."""
        return answer(path, self._call, self._ready, self.app.metrics)

    def _reached(self) -> dict[str, Registry]:
        """Return the apps for the databases that are served. Called in threads."""
        served = list(self._served.values())
        return {one.database.name: one.app(self.app) for one in served if one.trouble() is None}

    def _ready(self) -> tuple[bool, str]:
        served = list(self._served.values())
        troubles = [(one.database.name, said) for one in served if (said := one.trouble())]
        lines = [f"{len(served) - len(troubles)} of {len(served)} databases are served"]
        lines += [f"{name}: {said}" for name, said in sorted(troubles)]
        is_ready = not self._is_stopping and (not served or len(troubles) < len(served))
        return is_ready, "\n".join(lines)


class _Served:
    """A database that is worked for, until it is stopped."""

    def __init__(self, database: Database, client: Client) -> None:
        self.database = database
        source = Source(database.dsn, pgbouncer=client.source.pgbouncer)
        self.client = client.bound(source)
        self.worker: Worker | None = None
        self.own_slots: DatabaseSlots | None = None
        self.stopped = asyncio.Event()
        self.said = ""

    def app(self, app: Registry) -> Registry:
        """Return the app, with the client of this database."""
        twin = copy.copy(app)
        twin._client = self.client
        return twin

    @property
    def is_stopping(self) -> bool:
        """Whether not to try again."""
        return self.stopped.is_set()

    def stop(self, *, at_once: bool = False) -> None:
        """Stop its worker."""
        self.stopped.set()
        if self.worker is not None:
            if at_once:
                self.worker.stop_at_once()
            else:
                self.worker.stop()

    def trouble(self) -> str | None:
        """Return why it is not served, or None if it is."""
        worker = self.worker
        if worker is None:
            return self.said or "not registered"
        return worker.trouble()

"""The worker: its life, from the first connection until everything has been reported."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import os
import socket
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Unpack

from pgdefer._text import logger
from pgdefer.checks import check_texts
from pgdefer.database import sql
from pgdefer.database.connection import Connection, ConnectionLost, Rows
from pgdefer.database.own_threads import in_own_thread
from pgdefer.database.pool import AsyncPool, SyncPool
from pgdefer.options import as_list
from pgdefer.tasks.registry import Registry
from pgdefer.worker.announcer import Announcer
from pgdefer.worker.batch_runner import BatchRunner
from pgdefer.worker.blocking import warn_at_stop, warn_of_silence
from pgdefer.worker.claim import Claim, Runner
from pgdefer.worker.completer import Completer
from pgdefer.worker.ending import STOPPED
from pgdefer.worker.executor import Executor
from pgdefer.worker.fetcher import Fetcher
from pgdefer.worker.heartbeat import Heartbeat, HeartbeatThread
from pgdefer.worker.listener import OnlyConnection, SleepListener
from pgdefer.worker.memory import resident
from pgdefer.worker.options import (
    DEAD_AFTER,
    HEARTBEAT_EVERY,
    JOBS_PER_PROCESS,
    WorkerOptions,
    check_options,
)
from pgdefer.worker.prefetch import MOST
from pgdefer.worker.probes import Answer, Probes, answer
from pgdefer.worker.processes import Processes
from pgdefer.worker.registration import Registration
from pgdefer.worker.runners import FunctionRunner, LoopRunner, ProcessRunner, ThreadRunner
from pgdefer.worker.shielded import run_shielded
from pgdefer.worker.slots import parse_slots
from pgdefer.worker.state import GRACE, WorkerState, check_may_run
from pgdefer.worker.supervisor import SupervisorChannel
from pgdefer.worker.threads import Threads
from pgdefer.worker.turnstile import Turn
from pgdefer.worker.unix_signals import run_until_signal, signals

__all__ = ["Shared", "Worker"]

log = logger("pgdefer.worker")


@dataclasses.dataclass
class Shared:
    """What the workers of one process share."""

    threads: Threads
    heartbeats: HeartbeatThread
    # The process's memory, and when it was read: 200 heartbeats need not read it 20 times a second.
    _memory: int | None = None
    _read_at: float = -math.inf

    def memory(self) -> int | None:
        """Return the resident bytes of this process, as of the last second."""
        now = time.monotonic()
        if now >= self._read_at + 1.0:
            self._memory, self._read_at = resident(), now
        return self._memory


class Worker:
    """Runs an app's jobs, of the queues named (patterns too; None: all).

    `WorkerOptions` says what else can be set. A worker runs until `stop`, even if the database is
    down for a while. An error that waiting can't mend, such as missing rights, ends it with an
    exception. So does a first connection that is refused for its database, role or password, and an
    embedded server that can't be started when it is first needed.
    """

    def __init__(
        self, app: Registry, queues: Sequence[str] | None = None, **options: Unpack[WorkerOptions]
    ) -> None:
        check_options(options)
        self.app = app
        self.queues = None if queues is None else as_list("queues", queues)
        check_texts("queues", self.queues or (), "mail")
        slots = options.get("slots", [options.get("concurrency", 20)])
        tasks = options.get("tasks")
        self.tasks = None if tasks is None else as_list("tasks", tasks)
        check_texts("tasks", self.tasks or (), "mail.send")
        is_listed = options.get("order") == "listed"
        if is_listed and self.queues is None:
            raise ValueError("order='listed' needs a list of queues")
        self.slots = parse_slots(
            as_list("slots", slots),
            self.tasks,
            is_listed=is_listed,
            prefetch=options.get("prefetch", MOST),
            max_running=options.get("max_running"),
        )
        self.concurrency = sum(slots.size for slots in self.slots)
        self.name = options.get("name") or f"{socket.gethostname()}:{os.getpid()}"
        self.shutdown_timeout = options.get("shutdown_timeout")
        self.heartbeat_every = options.get("heartbeat_every", HEARTBEAT_EVERY)
        self.dead_after = options.get("dead_after", DEAD_AFTER)
        self.poll_every = options.get("poll_every")
        self.drain = options.get("drain", False)
        self.prune_schedules = options.get("prune_schedules", False)
        self.http = options.get("http")
        #: The server at that address, while the worker runs.
        self.probes: Probes | None = None
        self.register_schedules = options.get("register_schedules", True)
        self.jobs_per_process = options.get("jobs_per_process", JOBS_PER_PROCESS)
        #: The way to the supervisor, if one has started this worker.
        self.supervisor: SupervisorChannel | None = None
        #: The runner of all jobs, if their tasks' handlers are not to run them.
        self.only_runner: Runner | None = None
        #: What it shares with workers of other databases. Then it has one connection, and keeps
        #: none for handlers for long.
        self.shared: Shared | None = None
        # Connecting waits here for its turn, where many workers connect at once.
        self.turnstile: Turn = contextlib.nullcontext
        self.state = WorkerState(options.get("max_jobs"))
        self._announcer = Announcer(app.hooks, app.meters)
        self.completer = Completer(self._announcer)
        self.executor = Executor(app, self.state, self.completer, self._announcer)
        self._background: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None
        self._is_reconnecting = False
        # While hooks of worker_start run: their limit, which a stop sets.
        self._starting: asyncio.Timeout | None = None

    @property
    def id(self) -> int | None:
        """The worker's id in the database while it is registered."""
        return self.state.id

    @property
    def finished(self) -> int:
        """The number of jobs that have ended here."""
        return self.executor.finished

    @property
    def given_back(self) -> int:
        """The number of running jobs that were given back for a stop."""
        return self.executor.given_back

    @property
    def unreported(self) -> int:
        """The number of outcomes that the database has not accepted: after the end, for good."""
        return len(self.completer.left)

    @property
    def unresponsive(self) -> int:
        """The number of coroutines that did not end when told to; after `run`, also of threads."""
        return self.executor.unresponsive

    # Life

    def run(self) -> None:
        """Run until a signal: `stop` at the first SIGTERM, SIGINT or SIGHUP.

        At a second SIGTERM or SIGINT, or at SIGQUIT, `stop_at_once`.
        """
        run_until_signal(self.run_async, self.executor.note_unresponsive)

    async def run_async(self, *, handle_signals: bool = False) -> None:
        """Run until `stop`. If cancelled, stop first: at once, unless `shutdown_timeout` is set."""
        check_may_run(has_run=self._loop is not None)
        self.app.client.check_worker()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.app.import_tasks()
        for task in self.tasks or ():
            if task not in self.app.tasks and self.only_runner is None:
                log.warning(
                    "the task %r isn't known here: only a function of the database can run it", task
                )
        self._make_parts()
        self.executor.attach(
            self.heartbeat,
            self._runner_of,
            self.listener.hear,
            makes_batches=self.only_runner is None,
        )
        # Signals are handled until all is reported: a further one must not kill the worker before.
        with self._on_signals() if handle_signals else contextlib.nullcontext():
            try:
                if self.http is not None:
                    self.probes = Probes(self.http, self._answer)
                self._starting = asyncio.timeout(None)
                await self._announcer.call("worker_start", self, self._starting)
                self._starting = None
                await self._fetch_until_end()
            except BaseException:
                self.stop_at_once()
                raise
            finally:
                await run_shielded(self._end)

    async def _fetch_until_end(self) -> None:
        """Fetch until the end. If cancelled, stop first, if there is a `shutdown_timeout`."""
        fetching = asyncio.ensure_future(self.fetcher.run())
        try:
            await asyncio.shield(fetching)
        except asyncio.CancelledError:
            if self.shutdown_timeout is not None and not fetching.done():
                self.stop()
                await asyncio.wait([fetching])
            raise
        finally:
            fetching.cancel()
            await run_shielded(lambda: asyncio.gather(fetching, return_exceptions=True))

    def _answer(self, path: str) -> Answer:
        """Answer a probe. Called in threads."""
        return answer(path, self._call_soon, self._ready, self.app.metrics)

    def _ready(self) -> tuple[bool, str]:
        trouble = self.trouble()
        return trouble is None, trouble or "ok"

    def trouble(self) -> str | None:
        """Return why the worker gets no jobs, or None. May be called from any thread."""
        if self.state.id is None or self.state.is_stopping:
            return "not registered, or stopping"
        if self.heartbeat.is_overdue:
            return "no heartbeat reaches the database"
        return None

    def _make_parts(self) -> None:
        """Make the parts that need the running loop. Nothing connects yet."""
        client = self.app.client
        source = client.source
        assert self._loop is not None
        shared = self.shared
        is_only = shared is not None and source.notify_source is not None
        kind = OnlyConnection if is_only else SleepListener
        self.listener = kind(
            source.notify_source or source,
            on_work=self.state.hint,
            on_message=self._on_message,
            on_pause=self.executor.on_pause,
            on_connection_lost=self._on_connection_lost,
        )
        self._connection = self.listener if is_only else Connection(source)
        self.heartbeat = Heartbeat(
            source,
            self.heartbeat_every,
            self.dead_after,
            on_beat=self._on_beat,
            on_gone=self._on_worker_gone,
            on_lost=self.executor.on_claim_lost,
            thread=None if shared is None else shared.heartbeats,
            on_silence=functools.partial(
                warn_of_silence,
                asyncio.get_running_loop(),
                threading.get_ident(),
                self.executor.running,
            ),
            memory=self._memory,
            over=self._beat if source.notify_source is not None else None,
            is_needed=lambda: bool(self.executor.running),
        )
        self._registration = Registration(
            self.app,
            self.state,
            self._connection,
            self.heartbeat,
            on_connection_lost=self._on_connection_lost,
            has_work=lambda: not self.executor.is_idle or bool(self.completer.left),
            name=self.name,
            queues=self.queues,
            slots=self.slots,
            heartbeat_every=self.heartbeat_every,
            dead_after=self.dead_after,
            prune_schedules=self.prune_schedules,
            register_schedules=self.register_schedules,
            channel=self.supervisor,
        )
        self.fetcher = Fetcher(
            client=client,
            state=self.state,
            connection=self._connection,
            listener=self.listener,
            registration=self._registration,
            executor=self.executor,
            completer=self.completer,
            heartbeat=self.heartbeat,
            queues=self.queues,
            slots=self.slots,
            is_drain=self.drain,
            poll_every=self.poll_every,
            stop=self.stop,
            spawn=self._spawn,
            turnstile=self.turnstile,
        )
        self._make_runners(self._loop)

    def _make_runners(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the runners, and the pools of connections for handlers."""
        source, shared = self.app.client.source, self.shared
        kept = 1 if shared else self.concurrency
        self._pool = SyncPool(source, kept)
        self._async_pool = AsyncPool(source, kept)
        self._pool.partner, self._async_pool.partner = self._async_pool, self._pool
        self._threads = shared.threads if shared else Threads(loop, self.concurrency)
        keeper = self.executor
        self._thread_runner = ThreadRunner(self._threads, self._pool, keeper)
        self._loop_runner = LoopRunner(self._async_pool, self._thread_runner, keeper)
        self._batch_runner = BatchRunner(self._threads, self._thread_runner, keeper)
        self._processes = Processes(source, self.jobs_per_process)
        self._function_runner = FunctionRunner(self._threads, self._pool, keeper, self.app)
        self._process_runner = ProcessRunner(self._threads, self._processes, keeper)

    def _runner_of(self, claim: Claim) -> Runner:
        """Return what runs a claim."""
        if self.only_runner is not None:
            return self.only_runner
        task = claim.task
        if task is None:
            # The database may have a function for it; if not, it sends the job back.
            return self._function_runner
        if claim.batch is not None:
            return self._batch_runner
        if task.is_async:
            return self._loop_runner
        if task.execution.run_in == "process":
            return self._process_runner
        if self.app.client.codec.how(claim.job._stored) == "async":
            return self._loop_runner
        return self._thread_runner

    def stop(self) -> None:
        """Claim no more jobs, and end when the running ones end, at most after `shutdown_timeout`.

        May be called from any thread, as may `stop_at_once`.
        """
        self.state.tell_to_stop()
        if self._is_elsewhere():
            self._call_soon(self.stop)
            return
        if self._starting is not None:
            with contextlib.suppress(RuntimeError):  # its time is over already
                self._starting.reschedule(0)
        if self.state.is_stopping:
            return
        self.state.stopping.set()
        log.info("stopping, running jobs: %d", len(self.executor.running))
        self.executor.recall()
        if self.shutdown_timeout is not None and self._loop is not None:
            self._loop.call_later(self.shutdown_timeout, self.stop_at_once)
        self.state.hint()

    def stop_at_once(self) -> None:
        """Abort the running jobs and give back those that don't end within a second."""
        self.state.tell_to_stop()
        if self._is_elsewhere():
            self._call_soon(self.stop_at_once)
            return
        if self.state.must_stop_at_once.is_set():
            return
        self.state.must_stop_at_once.set()
        self.stop()
        self.executor.abort_all(STOPPED)
        if self._loop is not None:
            self._loop.call_later(GRACE, self.executor.give_back_all)

    def rest(self) -> None:
        """Close idle connections and processes for handlers."""
        self._pool.close()
        self._async_pool.close_idle()
        self.app.client.close_idle()
        self._spawn(in_own_thread(self._process_runner.close_idle))

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread than the worker's."""
        return self._thread not in (None, threading.get_ident())

    def _call_soon(self, function: Any, *args: Any) -> None:
        """Call in the worker's loop, unless that has ended."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    async def _end(self) -> None:
        """Give back running jobs, report, leave. Each part has a limit, and may be repeated."""
        loop = asyncio.get_running_loop()
        end = loop.time() + GRACE
        while self.executor.running and (left := end - loop.time()) > 0:
            await self.state.wait(left)
        self.executor.give_back_all()
        await self.heartbeat.stop()
        await self.fetcher.close(GRACE)
        await self._announcer.call("worker_stop", self)
        await self._announcer.close()
        if self.probes is not None:
            await in_own_thread(self.probes.close)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.listener.close()
        self._connection.close()
        await in_own_thread(self._process_runner.close)
        if self.shared is None:
            self._threads.close()
        self._pool.close()
        self._async_pool.close()

    def _on_signals(self) -> contextlib.AbstractContextManager[None]:
        """Turn signals into `stop`; only the main thread may."""

        def on_stop() -> None:
            # A service manager may send the supervisor's signal, too: that counts once.
            is_alone = self.supervisor is None or self.supervisor.is_closed
            if self.state.is_stopping and is_alone:
                self.stop_at_once()
            else:
                self.stop()

        tell, loop = self.state.tell_to_stop, asyncio.get_running_loop()
        on_deaf = functools.partial(warn_at_stop, loop, self.executor.running)
        return signals(on_stop, self.stop_at_once, tell, on_deaf)

    # What the listener and the heartbeat tell

    def _on_message(self) -> None:
        self.heartbeat.poke()

    def _on_connection_lost(self) -> None:
        """If asleep, go to sleep again; if busy, listen again for this worker's messages."""
        self.state.hint()
        if not self._is_reconnecting:
            self._is_reconnecting = True
            self._spawn(self._listen_again())

    async def _listen_again(self) -> None:
        try:
            await self.fetcher.listen_again()
        finally:
            self._is_reconnecting = False

    def _on_beat(self, aborts: Sequence[tuple[int, int, str]]) -> None:
        if aborts:
            self.executor.abort_some(aborts)
        self.executor.on_beat()
        self._spawn(self._registration.catch_up())

    async def _beat(self, worker: int) -> Rows:
        """Send a heartbeat over the connection on which the worker listens."""
        try:
            return await self.listener.exchange(sql.HEARTBEAT, worker=worker, memory=self._memory())
        except ConnectionLost:
            self._on_connection_lost()
            raise

    def _memory(self) -> int | None:
        """Return the bytes of memory of this process and of those that run its handlers."""
        pids = self._processes.pids()
        return resident(pids) if pids or self.shared is None else self.shared.memory()

    def _on_worker_gone(self, worker: int | None) -> None:
        self.fetcher.on_worker_gone(worker)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

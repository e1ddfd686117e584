"""The worker: claims jobs, runs them, reports how they ended.

It decides nothing: what is claimed, in what order, what a failure leads to and when to sleep are
the database's answers. What it does itself is to keep many jobs in flight over one connection.

The pump is the only one that uses that connection. It takes all outcomes there are, sends them and
asks for as many jobs as there are free slots, in one round trip. So a single outcome leaves at
once, and what ends while a round trip is under way goes with the next one. A batch of jobs is
started in slices, so that the first outcomes leave while the others start.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import datetime as dt
import functools
import json
import math
import os
import platform
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import psycopg

from . import _outcome, _sql
from ._attempt import STOPPED, TIMED_OUT, Call, failed, outcome_of, run, run_async
from ._connect import AsyncConnection, AsyncPool, SyncPool
from ._context import JobAborted, JobContext, JobTimeout
from ._errors import (
    PgDeferError,
    UnknownTask,
    WorkerGone,
    describe,
    is_refused,
    is_transient,
    sqlstate_of,
    translate,
)
from ._link import Backoff, Heart, Link, Listener, LostError, Sleep, clock
from ._options import interval_text, listed
from ._processes import Processes
from ._slots import Slots, arrange
from ._suspects import Suspects
from ._task import Task
from ._text import logger
from ._threads import Interruptible, Threads

if TYPE_CHECKING:
    from ._app import App
    from ._supervisor import Tether

__all__ = ["Worker", "WorkerOptions", "check_options"]

log = logger("pgdefer.worker")

# How long to look again, and how often, before going to sleep after the last job.
LINGER_POLLS = 5
LINGER_DELAY = 0.002
# How many jobs are started before outcomes get their turn.
SLICE = 64
# The greatest number that the database takes.
MOST = 2**31 - 1
# How long aborted jobs have to unwind before they are given back.
GRACE = 1.0
# How long past its timeout a job may go on before its claim is kept, in seconds; how often a thread
# is told of it.
LATE = 2.0
AGAIN = 10.0
# How long past its timeout, counted from the claim, a job may still start: 10 s past it others may
# end its claim.
TOO_LATE = 5.0
LOST = "the claim was lost"
# When claims of an answer that was lost are looked for: the lost call may be under way still.
SUSPICION = (0.0, 15.0, 120.0)

# Errors that no waiting mends: wrong rights, wrong version, nothing installed, wrong call.
FATAL = frozenset({"QJ008", "QJ090", "22023", "42501", "3F000", "42883", "42P01", "28000", "28P01"})


# Errors that pass as a rule, but lie in an outcome that is refused with them this often: a fault of
# the server, and a time limit.
DOUBTFUL = frozenset({"XX", "57014"})
TRIES = 20


class Refused(Exception):  # noqa: N818
    """The database refuses a call, and the worker is to end."""


class WorkerOptions(TypedDict, total=False):
    """What `Worker` takes beside the queues.

    `concurrency`: how many jobs run at once (20). Or `slots`: `N`, or `N:HORIZON` for N that only
    take jobs whose deadline is nearer than 5s, 30m, 2h, 1d, 1w; `slots=["2:30m", 3]`.

    `shutdown_timeout`: for how many seconds `stop` lets running jobs go on; None, the default:
    until they end. `drain`: end once nothing is left that would start by itself, as
    `queue.before_sleep` says. `max_jobs`: end once so many have been run, such as to have a
    supervisor start a new process before a handler's leaks fill the memory.

    `heartbeat_every` and `dead_after` (10 and 30 seconds): how often the worker says that it lives,
    and after which silence its jobs are given to others. `jobs_per_process`: after how many jobs a
    child process is replaced (100). `prune_schedules`: remove the recurring runs that this app has
    registered before and no longer has.
    """

    concurrency: int
    slots: Sequence[int | str]
    name: str | None
    shutdown_timeout: float | None
    drain: bool
    max_jobs: int | None
    heartbeat_every: float
    dead_after: float
    jobs_per_process: int
    prune_schedules: bool


class Worker:
    """Runs an app's jobs, of the queues named (patterns too; None: all).

    `WorkerOptions` says what else can be given. A worker lives until `stop`, whatever becomes of
    the database meanwhile; what nothing mends, such as missing rights, ends it with an exception,
    and so does a first connection that is refused for its database, role or password, or an
    embedded server that can't be started when it is first needed.
    """

    def __init__(
        self, app: App, queues: Sequence[str] | None = None, **options: Unpack[WorkerOptions]
    ) -> None:
        check_options(options)
        self.app = app
        self.queues = None if queues is None else listed("queues", queues)
        slots = options.get("slots") or [options.get("concurrency", 20)]
        self.slots = arrange(listed("slots", slots))
        self.concurrency = sum(slots.size for slots in self.slots)
        self.name = options.get("name") or f"{socket.gethostname()}:{os.getpid()}"
        self.shutdown_timeout = options.get("shutdown_timeout")
        self.heartbeat_every = options.get("heartbeat_every", 10.0)
        self.dead_after = options.get("dead_after", 30.0)
        self.drain = options.get("drain", False)
        self.prune_schedules = options.get("prune_schedules", False)
        self.jobs_per_process = options.get("jobs_per_process", 100)
        #: The worker's id in the database while it is registered.
        self.id: int | None = None
        #: How many jobs have ended here, and how many that ran were given back for a stop.
        self.finished = 0
        self.given_back = 0
        #: How many coroutines were told to end and did not.
        self.deserters = 0
        self._listens = app.source.ears is not None
        #: What binds it to a supervisor, if one has started it.
        self.tether: Tether | None = None
        self._told: int | None = None
        self._thread: int | None = None
        self._claimed: collections.deque[JobContext] = collections.deque()
        self._running: set[JobContext] = set()
        self._outcomes: list[tuple[JobContext, str]] = []
        self._sending: list[tuple[JobContext, str]] = []
        # How often an outcome was refused on its own.
        self._refused: collections.Counter[JobContext] = collections.Counter()
        self._refusals = Backoff(last=1.0)
        self._lone: JobContext | None = None
        self._suspects = Suspects(self.heartbeat_every)
        self._background: set[asyncio.Task[Any]] = set()
        self._is_starting = False
        # Whether what was claimed waits for a heartbeat before it starts.
        self._is_held = False
        self._has_scheduled = False
        self._is_stopping = False
        # How many jobs it may still claim.
        self._left = options.get("max_jobs") or math.inf
        # Whether the last fetch found less than it asked for, and how often to look again soon.
        self._is_dry = False
        self._polls = 0
        self._was_hinted = False
        self._suspicion: list[float] = []
        self._waiter: asyncio.Future[bool] | None = None
        self._is_deaf = False

    # Life

    def run(self) -> None:
        """Run until SIGTERM or SIGINT, then end as `stop` says; again, or SIGQUIT: at once."""
        runner = asyncio.Runner()
        try:
            runner.run(self.run_async(handle_signals=True))
        finally:
            # Closing waits for every coroutine: not for those that would not end when told to.
            if not self.deserters:
                runner.close()

    async def run_async(self, *, handle_signals: bool = False) -> None:
        """Run until `stop`; cancelled, end at once."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._at_once = asyncio.Event()
        self.app.import_tasks()
        self._threads = Threads(self._loop, self.concurrency)
        self._link = Link(self.app.source)
        ears = self.app.source.ears or self.app.source
        self._listener = Listener(
            ears, on_work=self._on_hint, on_message=self._on_message, on_deaf=self._on_deaf
        )
        self._pool = SyncPool(self.app.source, self.concurrency)
        self._async_pool = AsyncPool(self.app.source, self.concurrency)
        self._pool.partner, self._async_pool.partner = self._async_pool, self._pool
        self._processes = Processes(self.app.source, self.jobs_per_process)
        self._heart = Heart(
            self.app.source,
            self.heartbeat_every,
            self.dead_after,
            on_beat=self._on_beat,
            on_gone=self._on_worker_gone,
            on_lost=self._on_claim_lost,
            on_suspects=self._on_suspects,
        )
        # Until all is reported: a signal more must not kill it before.
        with self._signals() if handle_signals else contextlib.nullcontext():
            try:
                await self._pump()
            except BaseException:
                self.stop_at_once()
                if runners := [job._runner for job in self._running if job._runner is not None]:
                    await asyncio.wait(runners, timeout=GRACE)
                raise
            finally:
                await self._end()

    def stop(self) -> None:
        """Claim no more; end when the running jobs have, or after `shutdown_timeout` at once.

        May be called from any thread, as may `stop_at_once`.
        """
        if self._is_elsewhere():
            with contextlib.suppress(RuntimeError):  # it has ended, and its loop is closed
                self._loop.call_soon_threadsafe(self.stop)
            return
        if self._is_stopping:
            return
        self._is_stopping = True
        log.info("stopping, %d jobs are running", len(self._running))
        while self._claimed:
            self._give_back(self._claimed.popleft())
        if self.shutdown_timeout is not None:
            self._loop.call_later(self.shutdown_timeout, self.stop_at_once)
        self._on_hint()

    def stop_at_once(self) -> None:
        """Abort the running jobs and give back those that don't end within a second."""
        if self._is_elsewhere():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.stop_at_once)
            return
        if self._at_once.is_set():
            return
        self._at_once.set()
        self.stop()
        for job in list(self._running):
            self._abort(job, STOPPED)
        self._loop.call_later(GRACE, self._give_back_all)

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread than the worker's."""
        return self._thread not in (None, threading.get_ident())

    async def _end(self) -> None:
        self._give_back_all()
        await self._heart.stop()
        if self.id is not None:
            worker, self.id = self.id, None
            try:
                self._link.limit = self._listener.limit = 2 * GRACE
                for _ in range(2):  # what is said in place of a refused one goes the second time
                    if self._outcomes:
                        await self._send_only()
                await self._link.call(_sql.DEREGISTER_WORKER, worker=worker)
                if self.tether is not None:
                    self.tether.tell_done()
                # Or those that sleep beside it would hear nothing for a while.
                await self._listener.after_sleep(worker)
            except (LostError, psycopg.Error) as error:
                log.warning("the worker could not deregister: %s", error)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._listener.close()
        self._link.close()
        await asyncio.to_thread(self._processes.close)
        self._threads.close()
        self._pool.close()
        self._async_pool.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn signals into `stop`; only the main thread may."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_stop() -> None:
            # A service manager may send what the supervisor sends, too: that would be twice.
            if self._is_stopping and (self.tether is None or self.tether.is_loose):
                self.stop_at_once()
            else:
                self.stop()

        handlers = {
            signal.SIGTERM: on_stop,
            signal.SIGINT: on_stop,
            signal.SIGQUIT: self.stop_at_once,
        }
        for number, handler in handlers.items():
            self._loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                self._loop.remove_signal_handler(number)

    # The pump

    async def _pump(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._link.open()
                if self.id is None:
                    await self._register()
                if self.tether is not None and self._told != self.id:
                    await self._tell_supervisor(self.tether)
                backoff.reset()
                await self._pump_connected()
                return
            except WorkerGone:
                self._on_worker_gone(self.id)
            except Refused as error:
                log.error("stopped while the database refuses its calls: %s", error)
                return
            except LostError as error:
                # Later a refusal may be mended: the database is restored, the password changed.
                cause = error.__cause__
                if not self._has_scheduled and cause is not None and is_refused(cause):
                    raise cause from None
                log.warning("the connection was lost: %s", error)
                self._suspicion = [self._loop.time() + delay for delay in SUSPICION]
                if self._is_ending and not (self._running or self._claimed or self._outcomes):
                    return
                if self._at_once.is_set() and not self._running:
                    log.error("%d outcomes could not be reported", len(self._outcomes))
                    return
                await self._pause(backoff.delay())

    async def _register(self) -> None:
        await self._call_with_connection(self.app.register_async)
        if not self._has_scheduled:
            # Not again with a new connection: what was removed by hand stays so.
            await self._call_with_connection(
                functools.partial(self.app.schedule_async, prune=self.prune_schedules)
            )
            self._has_scheduled = True
        info = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "client": f"pgdefer {_version()}",
            "python": platform.python_version(),
            "concurrency": self.concurrency,
            "slots": [str(slots) for slots in self.slots],
            "heartbeat_every": self.heartbeat_every,
            "dead_after": interval_text(dt.timedelta(seconds=self.dead_after)),
            "listen": self._listens,
        }
        registered_at = clock()
        rows = await self._ask(
            _sql.REGISTER_WORKER, name=self.name, queues=self.queues, info=json.dumps(info)
        )
        self.id = rows[0][0]
        self._heart.start(rows[0][0], registered_at)
        if self._listens:
            # From now on a busy worker hears what is meant for it, too.
            await self._before_sleep()
            await self._listener.after_sleep(self._registered())
        log.info("worker %d serves %s", self.id, ", ".join(self.queues or ["all queues"]))

    async def _tell_supervisor(self, tether: Tether) -> None:
        """Say who this is; before that, to the database, that the one it stands in for is dead."""
        if tether.replaces is not None:
            with contextlib.suppress(WorkerGone):  # of other queues than this role's
                ((ended,),) = await self._ask(_sql.WORKER_DIED, worker=tether.replaces)
                log.info("worker %d is dead: %d claims were ended", tether.replaces, ended)
            tether.replaces = None
        self._told = self._registered()
        tether.tell(self._told)

    async def _pump_connected(self) -> None:
        self._is_dry = False
        if self._left < math.inf and self._free() and not self._running:
            # One that ends soon may never come to make room for those that have crashed.
            await self._fetch_alone()
        while True:
            if self._suspicion and self._suspicion[0] <= self._loop.time():
                await self._look_for_lost_claims()
            free = self._free()
            if self._outcomes or (free and not self._is_dry):
                await self._round_trip(free)
            elif free:
                await self._idle(free)
            elif self._is_ending and not self._running and not self._claimed:
                return
            elif self._holds_back():
                if self._running or self._claimed:
                    await self._wait(1.0)
                elif not await self._fetch_alone():
                    self._suspects.done()
            else:
                # All slots are taken, or there are to be no more: until an outcome comes.
                await self._wait(None)
                self._is_dry = False

    async def _idle(self, free: list[Slots]) -> None:
        """Wait until it is worth while to look again: first for moments, then asleep."""
        if self._polls:
            self._polls -= 1
            await self._wait(LINGER_DELAY)
            self._is_dry = False
        elif not self._running and await self._fetch_alone():
            self._is_dry = False
        else:
            await self._sleep(free)

    def _free(self) -> list[Slots]:
        """Return the slots to fetch jobs for."""
        if self._is_ending or self._lone is not None or self._holds_back():
            return []
        return [slots for slots in self.slots if slots.free]

    def _holds_back(self) -> bool:
        """Whether this worker runs dry, so that jobs that crashed can run alone."""
        return not self._is_ending and self._suspects.holds_back(self._loop.time())

    @property
    def _is_ending(self) -> bool:
        """Whether it claims no more jobs."""
        return self._is_stopping or self._left <= 0

    async def _sleep(self, free: list[Slots]) -> None:
        """Sleep until there may be something to do; to drain, stop where there is nothing left."""
        if self._is_stopping:
            return
        self._was_hinted = False
        self._is_dry = False
        is_idle = not (self._running or self._claimed or self._outcomes)
        sleep = await self._before_sleep()
        if self.drain and is_idle and (sleep.is_drained or await self._is_drained(sleep)):
            self.stop()
            return
        if self._listens:
            # What came before we could be woken has woken nobody.
            if await self._round_trip(free):
                return
            self._is_dry = False
        if not await self._wait(sleep.seconds) and not self._is_stopping:
            # Something is due.
            if not self._listens:
                await self._ask(_sql.TICK)
            elif sleep.seconds > 0:
                self._spawn(self._tick())

    async def _fetch_alone(self) -> bool:
        """Fetch one of the jobs that nothing else may run beside: those that crashed before."""
        worker = self._registered()
        asked_at = clock()
        rows = await self._ask(
            _sql.FETCH,
            worker=worker,
            queues=self.queues,
            max_jobs=1,
            options=self.slots[-1].options(alone=True),
        )
        if not rows or self.id != worker:
            return False
        self._suspects.ran()
        self._left -= 1
        job = self._lone = JobContext(self.app, rows[0])
        if job.timeout is not None:
            self._limit(job, job.timeout, asked_at)
        if self._is_stopping:
            self._give_back(job)
        else:
            self._claimed.append(job)
            self._start_claimed()
        return True

    async def _before_sleep(self) -> Sleep:
        """Say that this worker goes to sleep, with what it would fetch for its widest slots."""
        worker, options = self._registered(), self.slots[-1].options()
        if not self._listens:
            rows = await self._ask(
                _sql.BEFORE_SLEEP, worker=worker, queues=self.queues, options=options
            )
            return Sleep.of(rows[0])
        try:
            return await self._listener.before_sleep(worker, self.queues, options)
        except psycopg.Error as error:
            self._raise_translated(error)
            log.warning("the worker polls: %s", describe(error))
            return Sleep(1.0)

    async def _is_drained(self, sleep: Sleep) -> bool | None:
        """Ask on the main connection whether nothing is left, where the other one is of no use.

        That session would be the one to be woken, so it says at once that it is busy.
        """
        if sleep.is_drained is None:
            worker, options = self._registered(), self.slots[-1].options()
            rows = await self._ask(
                _sql.BEFORE_SLEEP, worker=worker, queues=self.queues, options=options
            )
            await self._ask(_sql.AFTER_SLEEP, worker=worker)
            sleep = Sleep.of(rows[0])
        return sleep.is_drained

    async def _tick(self) -> None:
        try:
            await self._listener.tick()
        except (LostError, psycopg.Error) as error:
            log.warning("tick: %s", describe(error))
        self._on_hint()

    async def _round_trip(self, free: list[Slots]) -> int:
        """Send the outcomes there are, ask for jobs for free slots; return how many came."""
        if not free:
            await self._exchange(None)
            return 0
        found = 0
        is_dry = True
        for slots in free:
            if not (asked := self._wanted(slots)):
                break
            came = await self._exchange(slots)
            found += came
            is_dry = is_dry and came < asked
        self._is_dry = is_dry
        if found:
            self._polls = LINGER_POLLS
            if self._listener.is_latched:
                self._spawn(self._listener.after_sleep(self._registered()))
        return found

    def _wanted(self, slots: Slots) -> int:
        """Return how many jobs to ask for."""
        return int(min(slots.free, self._left))

    async def _exchange(self, slots: Slots | None) -> int:
        """Send the outcomes, and ask for as many jobs as there are slots; in one round trip."""
        worker = self._registered()
        rows: list[tuple[Any, ...]] = []
        asked = (
            {}
            if slots is None
            else {
                "worker": worker,
                "queues": self.queues,
                "max_jobs": self._wanted(slots),
                "options": slots.options(),
            }
        )
        self._sending, self._outcomes = self._outcomes, []
        sent = self._sending
        asked_at = clock()
        try:
            if not self._sending:
                rows = await self._ask(_sql.FETCH, **asked)
            elif asked:
                outcomes = _array(self._sending)
                rows = await self._ask(_sql.FINISH_AND_FETCH, outcomes=outcomes, **asked)
            else:
                await self._finish(self._sending)
            self._refusals.reset()
        except (LostError, asyncio.CancelledError):
            # Sent again: what was written down already will be refused, and dropped.
            self._outcomes[:0] = self._sending
            raise
        except psycopg.Error as error:
            await self._send_apart(error)
            self._on_hint()
        finally:
            self._sending = []
        # Given up for dead meanwhile, these claims are others' by now.
        if slots is None or self.id != worker:
            return 0
        return self._take(rows, slots, asked_at, sent)

    async def _send_apart(self, error: psycopg.Error) -> None:
        """Send the outcomes without asking for jobs; where one spoils the call, each alone."""
        log.warning("outcomes were refused: %s", describe(error))
        sending = self._sending
        try:
            try:
                await self._finish(sending)
            except psycopg.Error:
                for job, outcome in sending:
                    await self._send_one(job, outcome)
        except (LostError, asyncio.CancelledError):
            self._outcomes[:0] = sending
            raise
        if is_transient(error) or sqlstate_of(error) in FATAL - {"22023"}:
            await self._try_again(error, self._refusals)

    async def _send_one(self, job: JobContext, outcome: str) -> None:
        """Send an outcome; where it lies in that that it is refused, what comes nearest to it.

        No outcome is sent for ever: where nothing is taken, a lease ends the claim as crashed.
        """
        for text in self._nearest(job, outcome):
            try:
                await self._finish([(job, text)])
            except psycopg.Error as error:
                log.error("the outcome of %r was refused: %s", job, describe(error))
                if self._may_be_taken_later(job, error):
                    self._outcomes.append((job, outcome))
                    return
            else:
                del self._refused[job]
                return
        del self._refused[job]
        with contextlib.suppress(psycopg.Error):
            await self._link.call(_sql.EXTEND, id=job.id, claim=job.claim, lease="1 s")

    def _nearest(self, job: JobContext, outcome: str) -> Iterator[str]:
        """Yield an outcome, and what can be said in place of it."""
        yield outcome
        note = _outcome.without_result(outcome, job.id, job.claim)
        if note is not None:
            yield note
        else:
            for encoding in (self._link.encoding, "ASCII"):
                yield _outcome.storable_in(outcome, encoding)
        spoilt = PgDeferError("the outcome can't be stored")
        yield _outcome.failed(job.id, job.claim, spoilt)

    def _may_be_taken_later(self, job: JobContext, error: psycopg.Error) -> bool:
        code = sqlstate_of(error) or ""
        if DOUBTFUL & {code, code[:2]}:
            self._refused[job] += 1
            return self._refused[job] < TRIES
        return is_transient(error) or code in FATAL - {"22023"}

    async def _send_only(self) -> None:
        """Send the outcomes; where one spoils the call, each alone."""
        sending, self._outcomes = self._outcomes, []
        try:
            await self._finish(sending)
        except psycopg.Error as error:
            log.warning("outcomes were refused: %s", describe(error))
            for job, outcome in sending:
                await self._send_one(job, outcome)

    async def _finish(self, outcomes: Sequence[tuple[JobContext, str]]) -> None:
        rows = await self._link.call(_sql.FINISH_MANY, outcomes=_array(outcomes))
        for id, claim, _, error in rows:
            if error is not None:
                self._on_refused(id, claim, error, outcomes)

    def _on_refused(
        self, id: int, claim: int, error: str, sent: Sequence[tuple[JobContext, str]]
    ) -> None:
        """Drop an outcome whose claim is lost; if what it asks for is wrong, fail the job."""
        log.warning("the outcome of job %d, claim %d, was refused: %s", id, claim, error)
        for job, outcome in sent:
            if (job.id, job.claim) == (id, claim) and error != "QJ002" and not job._is_refused:
                job._is_refused = True
                refused = PgDeferError(f"the outcome was refused ({error}): {outcome[:1000]}")
                options = {"retryable": False}
                self._outcomes.append((job, _outcome.failed(id, claim, refused, options)))

    def _limit(self, job: JobContext, timeout: dt.timedelta, asked_at: float) -> None:
        """Have its claim kept where a job takes longer than its timeout, from the claim on."""
        job._asked_at = asked_at
        self._heart.limits[job] = asked_at + timeout.total_seconds() + LATE

    def _take(
        self,
        rows: Sequence[tuple[Any, ...]],
        slots: Slots,
        asked_at: float,
        sent: Sequence[tuple[JobContext, str]],
    ) -> int:
        """Take in what was fetched, and what was refused of what was sent; return how many jobs."""
        app = self.app
        claimed = self._claimed
        before = len(claimed)
        for row in rows:
            if len(row) == 14 and row[13] is not None:
                self._on_refused(row[0], row[1], row[13], sent)
            else:
                job = JobContext(app, row[:13])
                job._slots = slots
                claimed.append(job)
                if job.timeout is not None:
                    self._limit(job, job.timeout, asked_at)
        taken = len(claimed) - before
        slots.used += taken
        self._left -= taken
        if self._is_stopping:
            # They were asked for before.
            while claimed:
                self._give_back(claimed.popleft())
        else:
            self._start_claimed()
        return taken

    async def _ask(self, statement: _sql.Statement, **parameters: object) -> list[tuple[Any, ...]]:
        """Call on the main connection; what can be retried is, what can't is raised as ours."""
        backoff = Backoff()
        while True:
            try:
                return await self._link.call(statement, **parameters)
            except psycopg.Error as error:
                if "outcomes" in parameters:
                    raise
                await self._try_again(error, backoff)

    async def _call_with_connection(
        self, function: Callable[[AsyncConnection], Awaitable[object]]
    ) -> None:
        """As `_ask`, of a function that takes the main connection."""
        backoff = Backoff()
        while True:
            try:
                async with self._link.lent() as connection:
                    await function(connection)
            except psycopg.Error as error:
                await self._try_again(error, backoff)
            else:
                return

    async def _try_again(self, error: psycopg.Error, backoff: Backoff) -> None:
        """Wait before the next try. Raises what is fatal, and Refused where there is to be none."""
        self._raise_translated(error)
        if self._is_stopping and not (self._running or self._claimed or self._outcomes):
            raise Refused(describe(error)) from error
        log.warning("trying again: %s", describe(error))
        await self._pause(backoff.delay())
        if self._at_once.is_set():
            raise Refused(describe(error)) from error

    def _raise_translated(self, error: psycopg.Error) -> None:
        """Raise what is fatal, or tells that the worker is gone."""
        code = sqlstate_of(error)
        if code == "QJ007" or code in FATAL:
            raise translate(error) or error

    async def _look_for_lost_claims(self) -> None:
        """Give back claims whose answer was lost: the database holds them, and nobody runs them."""
        del self._suspicion[0]
        try:
            rows = await self._link.call(_sql.CLAIMS, worker=self._registered())
        except psycopg.Error as error:
            log.warning("claims whose answer was lost can't be looked for: %s", describe(error))
            return
        known = {(job.id, job.claim) for job in [*self._running, *self._claimed]}
        known |= {(job.id, job.claim) for job, _ in self._outcomes}
        lost = [(id, claim) for id, claim in rows if (id, claim) not in known]
        if lost:
            log.warning("%d claims whose answer was lost are given back", len(lost))
            outcomes = f"[{','.join(_outcome.released(id, claim) for id, claim in lost)}]"
            await self._link.call(_sql.FINISH_MANY, outcomes=outcomes)

    # Waiting

    async def _wait(self, seconds: float | None) -> bool:
        """Wait for a hint, an outcome or the end; returns whether it was one of them."""
        if self._was_hinted or self._outcomes:
            self._was_hinted = False
            return True
        self._waiter = waiter = self._loop.create_future()
        timer = None
        if seconds is not None:
            timer = self._loop.call_later(seconds, _resolve, waiter, False)
        try:
            hinted: bool = await waiter
            return hinted
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    async def _pause(self, seconds: float) -> None:
        """Sleep, at most until everything is to stop at once."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._at_once.wait(), seconds)

    def _on_hint(self) -> None:
        """Have the pump look again, now or when it is about to wait."""
        if self._waiter is None:
            self._was_hinted = True
        else:
            _resolve(self._waiter, True)

    def _on_message(self) -> None:
        self._heart.poke()

    def _on_deaf(self) -> None:
        """Go to sleep anew, if asleep; if busy, hear again what is meant for this worker."""
        self._on_hint()
        if not self._is_deaf:
            self._is_deaf = True
            self._spawn(self._hear_again())

    async def _hear_again(self) -> None:
        backoff = Backoff()
        try:
            while not self._at_once.is_set():
                try:
                    await self._listener.listen_again()
                except (LostError, psycopg.Error):
                    await self._pause(backoff.delay())
                else:
                    return
        finally:
            self._is_deaf = False

    def _on_beat(self, aborts: Sequence[tuple[int, int, str]]) -> None:
        if aborts:
            self._on_abort(aborts)
        if self._is_held:
            self._is_held = False
            self._start_some()

    def _on_abort(self, aborts: Iterable[tuple[int, int, str]]) -> None:
        wanted = {(id, claim): reason for id, claim, reason in aborts}
        for job in [*self._running, *self._claimed]:
            reason = wanted.get((job.id, job.claim))
            if reason is not None:
                self._abort(job, reason)

    def _on_claim_lost(self, job: JobContext) -> None:
        """Abort a job that was ended before its claim could be kept: it may run elsewhere."""
        if job in self._running or job in self._claimed:
            self._abort(job, LOST)
            self._interrupt(job)

    def _on_suspects(self, count: int) -> None:
        self._suspects.seen(count, self._loop.time())

    def _on_worker_gone(self, worker: int | None) -> None:
        """Abort everything: our claims are others' by now. The pump registers again."""
        if worker is None or worker != self.id:
            return
        log.error("worker %d was given up for dead: its jobs are aborted", worker)
        self.id = None
        while self._claimed:
            self._leave(self._claimed.popleft())
        if self._is_held:
            self._is_held = self._is_starting = False
        for job in list(self._running):
            self._abort(job, LOST)
        self._on_hint()

    def _registered(self) -> int:
        if self.id is None:
            raise WorkerGone("the worker is gone")
        return self.id

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Running jobs

    def _start_claimed(self) -> None:
        """Start what was claimed, unless that is under way."""
        if self._claimed and not self._is_starting:
            self._is_starting = True
            self._start_some()

    def _start_some(self) -> None:
        claimed = self._claimed
        if claimed and clock() - self._heart.beat_at >= self.dead_after:
            # This process was frozen, maybe: its jobs may be others' by now, and have ended.
            log.warning("%d jobs wait for a heartbeat before they start", len(claimed))
            self._is_held = True
            self._heart.poke()
            return
        for _ in range(min(SLICE, len(claimed))):
            job = claimed.popleft()
            if job._abort is not None:
                self._ended(job, outcome_of(job, None, JobAborted(job._abort)))
            elif self._is_too_late(job):
                log.warning("%r was claimed too long ago, and is given back", job)
                self._give_back(job)
            else:
                self._start(job)
        if claimed:
            self._loop.call_soon(self._start_some)
        else:
            self._is_starting = False

    def _is_too_late(self, job: JobContext) -> bool:
        """Whether a job waited here for so long that others may have ended its claim by now."""
        if job.timeout is None:
            return False
        return job._asked_at + job.timeout.total_seconds() + TOO_LATE <= clock()

    def _begin(self, job: JobContext) -> None:
        """Take note that a job runs, and for how long it may."""
        log.debug("%r starts", job)
        self._running.add(job)
        if job.timeout is not None:
            seconds = job.timeout.total_seconds()
            job._timer = self._loop.call_later(seconds, self._time_out, job)

    def _start(self, job: JobContext) -> None:
        self._begin(job)
        task = self.app.tasks.get(job.task)
        if task is None:
            error = UnknownTask(
                f"the task {job.task!r} isn't known to this worker",
                hint="Import the module that defines it: App(imports=[...]).",
            )
            self._ended(job, failed(job, None, error))
            return
        if task.is_async:
            job._runner = self._loop.create_task(self._run(job, task))
        elif task.handling.run_in == "process":
            job._is_in_process = True
            self._submit(job, functools.partial(self._processes.run, job, task))
        elif self.app.codec.how(job._stored) == "async":
            job._runner = self._loop.create_task(self._run(job, task))
        else:
            self._run_in_thread(job, task, None)

    async def _run(self, job: JobContext, task: Task[..., Any]) -> None:
        """Run a coroutine; for others only fetch what the arguments stand for."""
        try:
            ended: str | Call | None = await run_async(job, task, self._async_pool)
        except Exception as error:
            ended = _mishap(job, error)
        if isinstance(ended, tuple):
            job._runner = None
            self._run_in_thread(job, task, ended)
        else:
            self._ended(job, ended)

    def _run_in_thread(self, job: JobContext, task: Task[..., Any], call: Call | None) -> None:
        """Run a function in a thread, where it can be told that its timeout has passed."""
        context = contextvars.copy_context()
        function = functools.partial(context.run, run, job, task, self._pool, call)
        job._call = Interruptible(function)
        self._submit(job, job._call.run)

    def _submit(self, job: JobContext, function: Callable[[], str | None]) -> None:
        """Have a thread do this, which returns a job's outcome."""

        def work() -> Callable[[], None]:
            try:
                ended = function()
            except JobTimeout as error:
                # Raised beside the handler, before or after it.
                task = self.app.tasks.get(job.task)
                ended = outcome_of(job, None if task is None else task.handling, error)
            except Exception as error:
                ended = _mishap(job, error)
            return functools.partial(self._ended, job, ended)

        self._threads.submit(work)

    def _ended(self, job: JobContext, outcome: str | None) -> None:
        """Take in a job's outcome; None: it has been written already."""
        job._runner = None
        if job._timer is not None:
            job._timer.cancel()
            job._timer = None
        if job._is_released:
            return
        log.debug("%r has ended", job)
        self._leave(job)
        if outcome is not None:
            self._outcomes.append((job, outcome))
        if job._abort == STOPPED and outcome == _outcome.released(job.id, job.claim):
            self.given_back += 1
        self.finished += 1
        if outcome is None or self._waiter is not None:
            self._on_hint()

    def _leave(self, job: JobContext) -> None:
        """Free the job's slot."""
        self._running.discard(job)
        self._heart.limits.pop(job, None)
        if job is self._lone:
            self._lone = None
        if job._slots is not None:
            job._slots.used -= 1
            job._slots = None

    def _abort(self, job: JobContext, reason: str) -> None:
        """Tell a job to end: a coroutine is cancelled, others find out by should_abort."""
        if job._abort is None:
            job._abort = reason
            if job._runner is not None:
                # One that has not begun ends without a word.
                job._runner.add_done_callback(functools.partial(self._never_began, job))
                job._runner.cancel(reason)
            elif job._is_in_process:
                self._processes.tell(job, reason)
                self._loop.call_later(GRACE, self._kill, job)

    def _time_out(self, job: JobContext) -> None:
        """Tell a job that its timeout has passed."""
        self._abort(job, TIMED_OUT)
        self._interrupt(job)

    def _interrupt(self, job: JobContext) -> None:
        """Raise JobTimeout in a job's thread; again where that was lost, as in a destructor."""
        if job in self._running and job._call is not None:
            job._call.interrupt(JobTimeout)
            if job._timer is not None:
                job._timer.cancel()
            job._timer = self._loop.call_later(AGAIN, self._interrupt, job)

    def _kill(self, job: JobContext) -> None:
        """End the process of a job that was told to end."""
        if job in self._running:
            self._processes.kill(job)
            self._loop.call_later(GRACE, self._kill, job)

    def _never_began(self, job: JobContext, runner: asyncio.Task[None]) -> None:
        if job in self._running and job._runner is runner:
            task = self.app.tasks.get(job.task)
            handling = None if task is None else task.handling
            self._ended(job, outcome_of(job, handling, asyncio.CancelledError()))

    def _give_back(self, job: JobContext) -> None:
        if not job._is_released:
            job._is_released = True
            self.given_back += job in self._running
            self._leave(job)
            self._outcomes.append((job, _outcome.released(job.id, job.claim)))
            self._on_hint()

    def _give_back_all(self) -> None:
        while self._claimed:
            self._give_back(self._claimed.popleft())
        for job in list(self._running):
            self.deserters += job._runner is not None
            self._give_back(job)


def check_options(options: WorkerOptions) -> None:
    """Raise TypeError for an option that there is not, ValueError for a value out of range."""
    known = WorkerOptions.__annotations__
    if unknown := ", ".join(sorted(options.keys() - known.keys())):
        raise TypeError(f"a worker takes no option {unknown}: it takes queues, {', '.join(known)}")
    if "slots" in options and "concurrency" in options:
        raise ValueError("give slots or concurrency, not both")
    for name, value in options.items():
        if name in ("concurrency", "jobs_per_process", "max_jobs"):
            _check_number(name, value, int, at_least=1)
        elif name in ("shutdown_timeout", "heartbeat_every", "dead_after"):
            _check_number(name, value, (int, float), at_least=0)
    beat, dead = options.get("heartbeat_every", 10.0), options.get("dead_after", 30.0)
    if not 0 < beat < dead:
        raise ValueError(
            f"heartbeat_every must be above 0 and below dead_after: {beat:g} and {dead:g}"
        )


def _check_number(name: str, value: object, kind: Any, *, at_least: int) -> None:
    if value is None and name in ("max_jobs", "shutdown_timeout"):
        return
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value}")
    if not value <= MOST:  # NaN, too
        raise ValueError(f"{name} must be at most {MOST}, not {value}")


def _mishap(job: JobContext, error: Exception) -> str:
    """Return the outcome of a job that could not be given one: no slot must be lost by that."""
    log.error("%r: its outcome could not be made", job, exc_info=error)
    return _outcome.failed(job.id, job.claim, error)


def _resolve(waiter: asyncio.Future[bool], value: bool) -> None:
    if not waiter.done():
        waiter.set_result(value)


def _array(outcomes: Iterable[tuple[JobContext, str]]) -> str:
    return f"[{','.join([text for _, text in outcomes])}]"


def _version() -> str:
    from . import __version__  # noqa: PLC0415 (needs this module)

    return __version__

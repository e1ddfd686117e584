"""The fetcher: claims jobs and reports outcomes over one connection; it tells when a drain is done.

It decides nothing: what is claimed, in what order, what a failure leads to and when to sleep are
the database's answers.

In one round trip it sends all outcomes that there are, and asks for as many jobs as slots are free.
So a single outcome leaves at once, and outcomes that come during a round trip go with the next one.
The jobs of an answer are started in slices. If there are more to be had, the first outcomes leave
while others start; if not, the outcomes of quick jobs leave together.

Tests: integration/test_worker_connections.py, integration/test_drain.py,
integration/test_moments.py.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import psycopg

from pgdefer._text import logger
from pgdefer.client.client import Client
from pgdefer.database import sql
from pgdefer.database.connection import Connection, ConnectionLost
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.errors import WorkerGone, describe, is_refused
from pgdefer.tasks.context import JobContext
from pgdefer.worker import outcomes
from pgdefer.worker.claim import Claim
from pgdefer.worker.completer import Completer, may_be_taken_later, outcomes_json
from pgdefer.worker.executor import Executor
from pgdefer.worker.heartbeat import Heartbeat, clock
from pgdefer.worker.listener import Sleep, SleepListener
from pgdefer.worker.registration import Refused, Registration, raise_fatal
from pgdefer.worker.slots import Slots
from pgdefer.worker.state import GRACE, WorkerState
from pgdefer.worker.turnstile import Turn

__all__ = ["Fetcher"]

log = logger("pgdefer.worker")

# In a burst, BURST_FINDS fetches have found jobs within the last BURST_SECONDS. Then the worker
# looks LINGER_POLLS times more, every LINGER_DELAY seconds, before it sleeps: meanwhile producers
# send no notification. Without a burst it stays asleep while it works.
BURST_FINDS = 4
BURST_SECONDS = 0.02
LINGER_POLLS = 5
LINGER_DELAY = 0.002
# How long a worker waits, in seconds, for the ends of jobs that it has just started: to report them
# in one call; and before it says that it is busy, as that may wake another worker for nothing.
# Before it goes to sleep, it waits so long for the ends of jobs that have come, or for more jobs
# where they come often.
MOMENT = 0.005
# When to look for claims of an answer that was lost, in seconds: that call may still be under way.
LOST_CLAIM_CHECKS = (0.0, 15.0, 120.0)
# When to look again after the database has refused that, in seconds.
LOST_CLAIM_AGAIN = 5.0
# How often to look whether heartbeats are answered again, in seconds.
OVERDUE_WAIT = 0.5


class Fetcher:
    """The loop of a worker: it runs until there is nothing left to report."""

    def __init__(
        self,
        *,
        client: Client,
        state: WorkerState,
        connection: Connection,
        listener: SleepListener,
        registration: Registration,
        executor: Executor,
        completer: Completer,
        heartbeat: Heartbeat,
        queues: list[str] | None,
        slots: list[Slots],
        is_drain: bool,
        poll_every: float | None,
        stop: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        turnstile: Turn = contextlib.nullcontext,
    ) -> None:
        self._client = client
        self._state = state
        self._connection = connection
        self._listener = listener
        self._listens = client.source.notify_source is not None
        self._registration = registration
        self._executor = executor
        self._completer = completer
        self._heartbeat = heartbeat
        self._queues = queues
        self._slots = slots
        self._is_drain = is_drain
        # The longest sleep, in seconds, even if the database allows more.
        self._longest = math.inf if poll_every is None else poll_every
        self._stop = stop
        self._spawn = spawn
        # Connecting waits here for its turn, where many workers connect at once.
        self._turnstile = turnstile
        # Whether the last fetch found less than fills the free slots, whether it found less than it
        # asked for, and how often to look again soon.
        self._is_dry = False
        self._has_all = False
        # Whether the worker has waited for MOMENT since that fetch, before it says that it is busy.
        self._had_moment = False
        self._polls = 0
        # Whether the ends of jobs that have come, or more jobs, are likely within MOMENT.
        self._expects_more = False
        self._found_at: collections.deque[float] = collections.deque(maxlen=BURST_FINDS)
        self._refusals = GrowingDelay(last=1.0)
        self._lost_claim_checks: list[float] = []
        self._has_fetched = False

    @property
    def _has_work(self) -> bool:
        """Whether anything is claimed, runs, or has yet to be reported."""
        return not self._executor.is_idle or bool(self._completer.left)

    async def run(self) -> None:
        """Register, and fetch; connect again whenever the connection is lost."""
        delays = GrowingDelay()
        state = self._state
        while state.id is not None or not state.is_stopping or self._has_work:
            try:
                async with self._turnstile():
                    await self._begin()
                delays.reset()
                await self.run_connected()
                return
            except WorkerGone:
                self.on_worker_gone(state.id)
            except Refused as error:
                log.error("stopped while the database refuses its calls: %s", error)
                return
            except ConnectionLost as error:
                # Later a refusal may be mended: the database is restored, the password changed.
                cause = error.__cause__
                refusal = cause if cause is not None and is_refused(cause) else None
                lasting = refusal or error.lasting_cause
                was_there = self._registration.was_accepted
                if lasting is not None and not was_there:
                    raise lasting from None
                said = "the connection was lost: %s" if was_there else "no connection yet: %s"
                log.warning(said, error)
                now = asyncio.get_running_loop().time()
                self._lost_claim_checks = [now + delay for delay in LOST_CLAIM_CHECKS]
                if self._may_end(was_refused=refusal is not None):
                    return
                await state.pause(delays.next())

    def _may_end(self, *, was_refused: bool) -> bool:
        """Whether to end without a connection: nothing is left to report, or it can't be."""
        state = self._state
        if state.claims_no_more and not self._has_work:
            return True
        # After refusals for so long, the database may not exist any more, or others have the jobs.
        is_hopeless = state.claims_no_more and was_refused and self._heartbeat.is_overdue
        return not self._executor.running and (state.must_stop_at_once.is_set() or is_hopeless)

    async def _begin(self) -> None:
        """Connect, and register if the worker is new."""
        await self._connect()
        is_new = self._state.id is None
        if is_new:
            await self._registration.register()
            self._has_fetched = False
        elif self._connection is self._listener:
            try:
                await self._listener.listen_again()
            except psycopg.Error as error:
                self._on_no_sleep(error)
        await self._registration.announce()
        if is_new and self._listens:
            # From now on the worker hears its messages while it is busy, too.
            await self._before_sleep()
            await self._listener.after_sleep(self._state.registered())

    async def _connect(self) -> None:
        """Connect. A stop ends this after a moment, unless the worker has yet to deregister."""
        limit = asyncio.timeout(None)
        stopped = asyncio.ensure_future(self._limit_after_stop(limit))
        try:
            async with limit:
                await self._connection.open()
        except TimeoutError:
            raise ConnectionLost("the server does not answer, and the worker stops") from None
        finally:
            stopped.cancel()

    async def _limit_after_stop(self, limit: asyncio.Timeout) -> None:
        await self._state.stopping.wait()
        if self._state.id is None:
            limit.reschedule(asyncio.get_running_loop().time() + GRACE)

    def on_worker_gone(self, worker: int | None) -> None:
        """Abort all jobs: other workers may have the claims by now. `run` registers again."""
        if worker is None or worker != self._state.id:
            return
        log.error("worker %d was given up for dead: its jobs are aborted", worker)
        self._state.id = None
        self._executor.on_worker_gone()
        self._state.hint()

    async def run_connected(self) -> None:
        """Fetch until the worker or the connection ends."""
        state, executor = self._state, self._executor
        self._is_dry = False
        while True:
            if self._lost_claim_checks or self._completer.too_late:
                await self._make_up_for_losses()
            if self._completer.locked and self._completer.locked_until <= clock():
                await self._completer.send_locked(self._connection)
            free = self._free()
            if self._completer.unsent:
                await self._gather_outcomes()
                if not state.claims_no_more:
                    for slots in self._slots:
                        await slots.turn()
                await self._round_trip(self._open())
            elif free and not self._is_dry and (asking := self._open()):
                # Not looked up again: others, and time, change what may be asked for.
                await self._round_trip(asking)
            elif free and self._is_dry:
                await self._idle(free)
            elif state.claims_no_more and executor.is_idle and self._may_leave:
                return
            else:
                await self._wait_for_slots()

    async def _gather_outcomes(self) -> None:
        """Wait for the outcomes of jobs that are starting, if no others are ready.

        So they go in one call, however few slots there are. After slow jobs it does not wait: one
        that starts may keep the loop busy, and the outcomes before it must have left by then.
        """
        if not (self._has_all and all(slots.prefetch.is_quick for slots in self._slots)):
            return
        until = self._completer.since + MOMENT
        while self._executor.is_starting and clock() < until:  # noqa: ASYNC110 (one turn each)
            await asyncio.sleep(0)

    @property
    def _may_leave(self) -> bool:
        """Whether no outcome is worth waiting for that can't be reported now."""
        return not self._completer.locked or self._state.must_stop_at_once.is_set()

    # Slots

    @property
    def _may_claim(self) -> bool:
        """Whether to claim jobs. While heartbeats are overdue, they would have to go back."""
        return not (self._state.claims_no_more or self._heartbeat.is_overdue)

    def _free(self) -> list[Slots]:
        """Return the slots to fetch jobs for."""
        return [slots for slots in self._slots if slots.may_ask] if self._may_claim else []

    def _open(self) -> list[Slots]:
        """Return the slots to fetch jobs for in a call that is made anyway: full ones, too."""
        if not self._may_claim:
            return []
        for slots in self._slots:
            slots.prefetch.runs(self._executor.starts(slots), clock())
        return [slots for slots in self._slots if slots.wanted]

    def _wanted(self, slots: Slots) -> int:
        """Return how many jobs to ask for."""
        return int(min(slots.wanted, self._state.jobs_left))

    # Waiting

    async def _wait_for_slots(self) -> None:
        """While all slots are taken, or no jobs may be claimed: wait for an outcome or a turn."""
        if self._listener.holds_sleep_lock and self._has_all and not self._had_moment:
            # No job was left to others, and maybe one ends in a moment.
            self._had_moment = True
            await self._wait(MOMENT)
        else:
            self._say_busy()
            await self._wait(self._until_a_heartbeat())
        self._is_dry = False

    def _say_busy(self) -> None:
        """Say that this worker is busy, if it may still be woken. Do not wait for the answer."""
        if self._listener.holds_sleep_lock:
            self._spawn(self._listener.after_sleep(self._state.registered()))

    def _until_a_heartbeat(self) -> float | None:
        """Return how long to wait for what frees slots: briefly, if a heartbeat may do so."""
        if not self._heartbeat.is_overdue:
            return None
        self._state.registered()  # else the heartbeat has told that the worker is gone
        self._heartbeat.poke()
        return OVERDUE_WAIT

    async def _wait(self, seconds: float | None) -> bool:
        """Wait for a hint, an outcome or the end; return whether one of them came.

        No longer than until lost claims are to be looked for, or locked ones to be tried again.
        """
        if self._completer.unsent:
            self._state.forget_hint()
            return True
        if self._lost_claim_checks:
            due = max(self._lost_claim_checks[0] - asyncio.get_running_loop().time(), 0.0)
            seconds = due if seconds is None else min(seconds, due)
        if self._completer.locked:
            due = max(self._completer.locked_until - clock(), 0.0)
            due = min(due, 1.0) if self._state.is_stopping else due
            seconds = due if seconds is None else min(seconds, due)
        return await self._state.wait(seconds)

    async def _idle(self, free: list[Slots]) -> None:
        """Wait until it is worth looking again: first for moments, then asleep."""
        if self._polls:
            self._polls -= 1
            await self._wait(LINGER_DELAY)
            self._is_dry = False
        elif self._expects_more and self._listener.is_first:
            self._expects_more = False
            self._is_dry = not await self._wait(MOMENT)
        else:
            await self._sleep(free)

    async def _sleep(self, free: list[Slots]) -> None:
        """Sleep until there may be something to do. With `drain`, stop if nothing is left."""
        state = self._state
        if state.is_stopping:
            return
        state.forget_hint()
        is_idle = not self._has_work
        sleep = await self._before_sleep()
        if self._is_drain and is_idle and (sleep.is_drained or await self._is_drained(sleep)):
            self._stop()
            return
        if self._state.is_stopping:  # since
            return
        if self._listens and sleep.must_look and await self._round_trip(free):
            return
        # Unless this worker was meant, the next before_sleep tells whether it is worth looking.
        was_woken = await self._wait(min(sleep.seconds, self._longest))
        self._is_dry = not (was_woken and self._listener.is_first) and not sleep.must_look

    async def _before_sleep(self) -> Sleep:
        """Say that this worker goes to sleep, with what it would fetch for its widest slots."""
        if not self._listens:
            return await self._ask_before_sleep()
        # Let a spawned call that reports the worker as busy take the lock first.
        await asyncio.sleep(0)
        worker, options = self._state.registered(), self._sleep_options()
        try:
            return await self._listener.before_sleep(worker, self._queues, options)
        except psycopg.Error as error:
            self._on_no_sleep(error)
            return Sleep(1.0)

    def _on_no_sleep(self, error: psycopg.Error) -> None:
        """Go on without notifications. Raises permanent errors."""
        raise_fatal(error)
        log.warning("the worker polls: %s", describe(error))

    def _sleep_options(self) -> str:
        return self._slots[-1].sleep_options(is_busy=not self._executor.is_idle)

    async def _is_drained(self, sleep: Sleep) -> bool | None:
        """Return whether nothing is left; ask on the main connection if the other could not."""
        if sleep.is_drained is None:
            sleep = await self._ask_before_sleep(stays_awake=True)
        return sleep.is_drained

    async def _ask_before_sleep(self, *, stays_awake: bool = False) -> Sleep:
        """Ask on the main connection whether, and how long, to sleep; poll if that is refused.

        With `stays_awake`, report at once that the worker is busy, so that nobody relies on waking
        this session.
        """
        worker, options = self._state.registered(), self._sleep_options()
        try:
            rows = await self._connection.call(
                sql.BEFORE_SLEEP, worker=worker, queues=self._queues, options=options
            )
            if stays_awake:
                await self._connection.call(sql.AFTER_SLEEP, worker=worker)
        except psycopg.Error as error:
            self._on_no_sleep(error)
            return Sleep(1.0)
        return Sleep.of(rows[0])

    # Claiming

    async def _round_trip(self, free: list[Slots]) -> int:
        """Send the outcomes, and ask for jobs for free slots; return how many jobs came."""
        if not free:
            await self._exchange(None, 0, 0)
            return 0
        found = 0
        is_dry, has_all, was_refused = True, True, False
        for slots in free:
            if not (asked := self._wanted(slots)):
                break
            # Not as many as fill the batches: an answer holds fewer large jobs.
            least, at_once = min(slots.free, asked), min(slots.at_once, asked)
            came: int | None = None
            slots.ask(asked)
            try:
                came = await self._exchange(slots, asked, asked - at_once)
            finally:
                slots.answered(asked, came or 0)
            if came is None:
                # What there is is unknown; outcomes that have come go before the next try.
                is_dry, has_all, was_refused = False, False, True
                break
            found += came
            is_dry = is_dry and came < least
            has_all = has_all and came < asked
        self._is_dry, self._has_all = is_dry, has_all
        self._had_moment = False
        if not self._has_fetched and not was_refused:
            self._has_fetched = True
            self._heartbeat.on_first_fetch()
        if found:
            self._found_at.append(asyncio.get_running_loop().time())
            is_burst = self._has_found_lately(BURST_FINDS)
            self._polls = LINGER_POLLS if is_burst else 0
            if is_burst or not has_all or not self._listener.is_first:
                self._say_busy()
        self._expects_more = found > 0 or self._has_found_lately(2)
        return found

    def _has_found_lately(self, fetches: int) -> bool:
        """Whether so many fetches have found jobs within the last BURST_SECONDS."""
        found_at, now = self._found_at, asyncio.get_running_loop().time()
        return len(found_at) >= fetches and now - found_at[-fetches] < BURST_SECONDS

    async def _exchange(self, slots: Slots | None, max_jobs: int, ahead: int) -> int | None:
        """Send the outcomes and ask for jobs, some of which start later, in one round trip.

        Return how many jobs came; None if the database has refused the call.
        """
        worker = self._state.registered()
        rows: list[tuple[Any, ...]] = []
        asked: dict[str, object] = {}
        if slots is not None:
            asked = {
                "worker": worker,
                "queues": self._queues,
                "max_jobs": max_jobs,
                "options": slots.options(ahead),
            }
        tells = self._completer.has_others
        sending = self._completer.take()
        asked_at = clock()
        try:
            if sending and tells and asked:
                # Apart, as only this answer tells what becomes of jobs that have failed.
                await self._completer.send(self._connection, sending)
                sending = []
            if not sending:
                rows = await self._connection.call(sql.FETCH, **asked)
            elif asked:
                ended = outcomes_json(sending)
                rows = await self._connection.call(sql.FINISH_AND_FETCH, outcomes=ended, **asked)
                self._completer.announce_successes(sending, rows)
            else:
                await self._completer.send(self._connection, sending)
            self._refusals.reset()
        except (ConnectionLost, asyncio.CancelledError):
            self._completer.put_back(sending)
            raise
        except psycopg.Error as error:
            if sending:
                log.warning("outcomes were refused: %s", describe(error))
                await self._completer.send_apart(self._connection, sending)
            is_locked = isinstance(error, psycopg.errors.LockNotAvailable)
            if not sending or (may_be_taken_later(error) and not is_locked):
                await self._registration.try_again(error, self._refusals)
            self._state.hint()
            return None
        # If the worker was given up for dead meanwhile, others have these claims by now.
        if slots is None or self._state.id != worker:
            return 0
        return self._take(rows, slots, asked_at, sending, max_jobs)

    def _take(
        self,
        rows: Sequence[tuple[Any, ...]],
        slots: Slots,
        asked_at: float,
        sent: Sequence[tuple[Claim, str]],
        asked: int,
    ) -> int:
        """Take in what was fetched, and what was refused of what was sent; return how many jobs."""
        claims: list[Claim] = []
        for row in rows:
            error = row[sql.CLAIM_COLUMNS] if len(row) > sql.CLAIM_COLUMNS else None
            if error is not None:
                self._completer.on_refused(row[0], row[1], error, sent)
            else:
                job = JobContext(self._client, row[: sql.CLAIM_COLUMNS])
                claims.append(Claim(job, slots, asked_at))
        starts = self._executor.gather(claims)
        slots.claimed(len(starts))
        if starts is not claims:
            sizes = [start.batch.size for start in starts if start.batch is not None]
            are_all = len(claims) == asked and len(sizes) == len(starts)
            slots.filling.answered(len(claims), len(starts), max(sizes, default=1), grows=are_all)
        self._state.jobs_left -= len(claims)
        self._executor.take(starts)
        return len(claims)

    async def _make_up_for_losses(self) -> None:
        """Give back claims whose answer was lost, and report ends whose answer was lost."""
        now = asyncio.get_running_loop().time()
        if self._lost_claim_checks and self._lost_claim_checks[0] <= now:
            await self._release_lost_claims()
        await self._completer.announce_ends(self._connection)

    async def _release_lost_claims(self) -> None:
        """Give back claims whose answer was lost: the database holds them, and nobody runs them."""
        del self._lost_claim_checks[0]
        try:
            await self._release_unknown_claims(self._state.registered())
        except psycopg.Error as error:
            log.warning("claims whose answer was lost can't be given back: %s", describe(error))
            again = asyncio.get_running_loop().time() + LOST_CLAIM_AGAIN
            bisect.insort(self._lost_claim_checks, again)

    async def _release_unknown_claims(self, worker: int) -> None:
        """Give back what the database has claimed for the worker, and the worker does not know."""
        rows = await self._connection.call(sql.CLAIMS, worker=worker)
        claims = [*self._executor.running, *self._executor.waiting]
        claims += [claim for claim, _ in self._completer.left]
        known = {(claim.job.id, claim.job.claim) for claim in claims}
        lost = [(id, number) for id, number in rows if (id, number) not in known]
        if lost:
            log.warning("claims whose answer was lost are given back: %d", len(lost))
            released = ",".join(outcomes.released(id, number) for id, number in lost)
            await self._connection.call(sql.FINISH_MANY, outcomes=f"[{released}]")

    # The end

    async def close(self, grace: float) -> None:
        """Report what is left, and deregister."""
        if self._state.id is not None:
            await self._deregister(self._state.id, grace)
        if left := self._completer.left:
            log.error("outcomes that could not be reported: %d", len(left))

    async def _deregister(self, worker: int, grace: float) -> None:
        self._state.id = None
        begun = time.monotonic()
        try:
            self._connection.timeout = self._listener.timeout = 2 * grace
            try:
                await self._leave(worker)
            except ConnectionLost:
                if time.monotonic() - begun >= grace:
                    raise
                await self._leave(worker)  # the server had perhaps ended the session long before
            self._registration.tell_done()
            # Otherwise other sleeping workers would not be woken for a while. A heartbeat may still
            # be using that connection.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * grace):
                    await self._listener.after_sleep(worker)
            await self._completer.announce_ends(self._connection)
        except (ConnectionLost, psycopg.Error) as error:
            log.warning("the worker could not deregister: %s", error)
        except asyncio.CancelledError:
            self._state.id = worker  # still to be deregistered
            raise

    async def _leave(self, worker: int) -> None:
        await self._completer.send_all(self._connection)
        await self._connection.call(sql.DEREGISTER_WORKER, worker=worker)

    async def listen_again(self) -> None:
        """Listen again to what is meant for this worker."""
        delays = GrowingDelay()
        while not self._state.must_stop_at_once.is_set():
            with contextlib.suppress(ConnectionLost, psycopg.Error):
                await self._listener.listen_again()
                return
            await self._state.pause(delays.next())

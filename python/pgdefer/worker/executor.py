"""Starts claimed jobs in slices, times and aborts them, and takes in their outcomes."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from pgdefer._text import logger
from pgdefer.tasks.context import JobAborted
from pgdefer.tasks.registry import Registry
from pgdefer.worker import outcomes
from pgdefer.worker.announcer import Announcer
from pgdefer.worker.claim import Claim, Runner, gather
from pgdefer.worker.completer import Completer
from pgdefer.worker.ending import LOST, STOPPED, TIMED_OUT, outcome_of
from pgdefer.worker.heartbeat import Heartbeat, clock
from pgdefer.worker.prefetch import WAIT
from pgdefer.worker.slots import Slots
from pgdefer.worker.state import WorkerState

__all__ = ["Executor"]

log = logger("pgdefer.worker")

# How many jobs are started before outcomes get their turn.
SLICE = 64
# How long past its timeout a job may go on before its claim is kept, in seconds.
LATE = 2.0
# How long past its timeout, counted from the claim, a job may still start: 10 s past it others may
# end its claim.
TOO_LATE = 5.0
# How long ago the worker may have looked for messages when a job begins, in seconds: while a
# handler blocks the loop, the worker does not hear of a pause, and other jobs wait to begin.
DEAF = 0.05

# How long a claim waits here for the end of an earlier run of its job before it is given back, in
# seconds.
BESIDE = 10.0


class Executor:
    """Keeps the claims. Each method is called in the worker's loop."""

    def __init__(
        self,
        registry: Registry,
        state: WorkerState,
        completer: Completer,
        announcer: Announcer,
    ) -> None:
        self._registry = registry
        self._state = state
        self._completer = completer
        self._announcer = announcer
        self._heartbeat: Heartbeat | None = None
        self._runner_of: Callable[[Claim], Runner] | None = None
        self._hear: Callable[[], None] | None = None
        # When the worker has last looked for messages, and when the last pause was heard.
        self._heard_at = self._paused_at = 0.0
        self.claimed: collections.deque[Claim] = collections.deque()
        # Claims that wait for a slot, by the slots that they are for.
        self._ahead: collections.defaultdict[Slots, collections.deque[Claim]] = (
            collections.defaultdict(collections.deque)
        )
        self._look: asyncio.TimerHandle | None = None
        # When that timer was set.
        self._looked_at = 0.0
        # The context in which jobs start: not that of the job whose end has freed the slot.
        self._context = contextvars.copy_context()
        #: The claims whose jobs run, in the order of their starts.
        self.running: dict[Claim, None] = {}
        # The ids of their jobs; and later claims of these jobs, which wait for those runs to end.
        self._running_jobs: set[int] = set()
        self._beside: set[Claim] = set()
        #: How many jobs have ended here, and how many running ones were given back at a stop.
        self.finished = 0
        self.given_back = 0
        #: How many coroutines were told to end and did not.
        self.unresponsive = 0
        #: Whether jobs are about to start, or have just started: those that end at once will now
        #: end. While it is true, `_start_some` runs in each turn of the loop, unless jobs are held.
        self.is_starting = False
        # Whether the claimed jobs wait for a heartbeat before they start.
        self._is_held = False
        self._makes_batches = False

    def attach(
        self,
        heartbeat: Heartbeat,
        runner_of: Callable[[Claim], Runner],
        hear: Callable[[], None],
        *,
        makes_batches: bool = False,
    ) -> None:
        """Use this heartbeat and these runners; `hear` handles the messages that have come."""
        self._heartbeat = heartbeat
        self._runner_of = runner_of
        self._hear = hear
        self._makes_batches = makes_batches
        self._context = contextvars.copy_context()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is claimed or runs."""
        return not (self.running or self.claimed or self._beside or any(self._ahead.values()))

    @property
    def waiting(self) -> list[Claim]:
        """The claims that have not started."""
        starts = itertools.chain(self.claimed, *self._ahead.values())
        return [*self._beside, *(claim for start in starts for claim in start.members)]

    # Claims that come in

    def gather(self, claims: list[Claim]) -> list[Claim]:
        """Return the claims of an answer to `take`: single jobs, and the first of each batch."""
        if not (self._makes_batches and self._registry.has_batches):
            return claims
        return gather(claims, self._registry.tasks)

    def take(self, claims: Iterable[Claim]) -> None:
        """Take in fetched claims: start them, or give them back if the worker is stopping."""
        for claim in claims:
            self.claimed.append(claim)
            for each in claim.members:
                self._extend_if_late(each)
        if self._state.is_stopping:
            self.give_back_waiting()
        elif self.claimed and not self.is_starting:
            self.is_starting = True
            self._start_some()

    def _extend_if_late(self, claim: Claim) -> None:
        """Let the claim be extended if its job outlives its timeout, counted from the claim."""
        timeout = claim.job.timeout
        if timeout is not None and self._heartbeat is not None:
            moment = claim.asked_at + timeout.total_seconds() + LATE
            self._heartbeat.extend_after[claim] = moment

    def _hear_first(self) -> None:
        """Handle the messages that came while the loop was blocked, before more jobs begin."""
        now = clock()
        if now - self._heard_at > DEAF:
            self._heard_at = now
            assert self._hear is not None
            self._hear()

    def _start_some(self) -> None:
        self._hear_first()
        if self._hold_if_overdue():
            return
        left = SLICE
        while left and self.claimed:
            claim = self.claimed.popleft()
            if self._must_wait(claim):
                self._put_ahead(claim)
            else:
                self._start(claim)
                left -= 1
        for slots, ahead in list(self._ahead.items()):
            while left and ahead and not slots.is_full:
                self._start_ahead(slots, ahead)
                left -= 1
            if ahead:
                slots.note_waiting()
        if left == SLICE:
            self.is_starting = False
        else:
            self._start_soon()

    def _hold_if_overdue(self) -> bool:
        """If a heartbeat is overdue, hold the waiting claims until one is answered.

        Return whether they are held. The process may have been frozen.
        """
        assert self._heartbeat is not None
        if not self._heartbeat.is_overdue or not (waiting := self.waiting):
            return False
        # Other workers may have these jobs by now, and may have ended them.
        log.warning("jobs that wait for a heartbeat before they start: %d", len(waiting))
        self._is_held = True
        self._heartbeat.poke()
        self._look_later(WAIT)
        return True

    def starts(self, slots: Slots) -> Iterator[float]:
        """Yield when the jobs or batches that use these slots have started, in that order."""
        for claim in self.running:
            if claim.slots is slots and claim is claim.members[0]:
                yield claim.started_at

    def start_next(self, slots: Slots) -> bool:
        """Start the next claim that waits for these slots; return whether more may start."""
        self._hear_first()
        ahead = self._ahead[slots]
        if not ahead or self._hold_if_overdue():
            return False
        self._context.run(self._start_ahead, slots, ahead)
        return bool(ahead)

    def _start_ahead(self, slots: Slots, ahead: collections.deque[Claim]) -> None:
        claim = ahead.popleft()
        self._start(claim)
        slots.prefetch.waited(claim.started_at - claim.came_at)

    def _start_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._start_some, context=self._context)

    def _must_wait(self, claim: Claim) -> bool:
        slots = claim.slots
        return slots is not None and (slots.is_full or bool(self._ahead[slots]))

    def _put_ahead(self, claim: Claim) -> None:
        """Let a claim wait for a slot. Jobs with a lock come first: others wait for their end."""
        assert claim.slots is not None
        ahead = self._ahead[claim.slots]
        if claim.job.lock is None:
            ahead.append(claim)
        else:
            ahead.appendleft(claim)
        claim.came_at = clock()
        self._look_later(WAIT)

    def _look_later(self, seconds: float) -> None:
        if self._look is None:
            self._looked_at = clock()
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(seconds, self._give_back_late)

    def _give_back_late(self) -> None:
        """Release the claims that have waited for a slot, or for a heartbeat, for too long."""
        self._look = None
        if self._is_held:
            # No heartbeat is answered: others may use these slots meanwhile.
            self._is_held = self.is_starting = False
            self.give_back_waiting()
        now = clock()
        latest = now - WAIT
        earliest = math.inf
        for slots, ahead in self._ahead.items():
            start_soon = slots.prefetch.take_pace(now - self._looked_at)
            kept: collections.deque[Claim] = collections.deque()
            late: list[Claim] = []
            for place, claim in enumerate(ahead):
                is_kept = place < start_soon or claim.came_at > latest
                (kept if is_kept else late).append(claim)
            if late:
                slots.prefetch.waited_too_long()
                self._ahead[slots] = kept
                self._give_back_unstarted(each for claim in late for each in claim.members)
            earliest = min([earliest, *(claim.came_at for claim in kept)])
        if earliest < math.inf:
            self._look_later(max(earliest - latest, WAIT / 2))

    def _start(self, claim: Claim) -> None:
        """Start a job, or those jobs of a batch that may still start."""
        if claim.batch is not None:
            claim.batch.claims = [each for each in claim.batch.claims if self._let_start(each)]
            if not claim.batch.claims:
                return
            claim.batch.has_started = True
            claim = claim.batch.claims[0]
        elif not self._let_start(claim):
            return
        job = claim.job
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%r starts", job, extra=job._log_fields())
        self._add_running(claim)
        if claim.slots is not None:
            claim.slots.started()
        self.handler_begins(claim)
        claim.task = self._registry.tasks.get(job.task)
        if claim.task is not None and not claim.task.versions.understand(job._stored):
            claim.task = None  # another worker knows its version
        assert self._runner_of is not None
        claim.runner = self._runner_of(claim)
        if claim.batch is not None:
            for other in claim.batch.claims[1:]:
                if log.isEnabledFor(logging.DEBUG):
                    log.debug("%r starts", other.job, extra=other.job._log_fields())
                self._add_running(other)
                other.started_at = claim.started_at
                other.task, other.runner = claim.task, claim.runner
        claim.runner.start(claim)

    def _add_running(self, claim: Claim) -> None:
        self.running[claim] = None
        self._running_jobs.add(claim.job.id)

    def handler_begins(self, claim: Claim) -> None:
        """Count the handler's duration and its timeout from now."""
        claim.started_at = clock()
        if claim.job.timeout is not None and not claim.has_left:
            seconds = claim.job.timeout.total_seconds()
            claim.timer = asyncio.get_running_loop().call_later(seconds, self._time_out, claim)

    def _let_start(self, claim: Claim) -> bool:
        """Return whether a job may start; if not, end it, give it back, or let it wait."""
        job = claim.job
        if job._abort_reason is not None:
            self.end(claim, outcome_of(job, None, JobAborted(job._abort_reason)))
            return False
        if self._is_past_timeout(claim):
            said = "%r was claimed too long ago, and is given back"
            log.warning(said, claim, extra=job._log_fields())
            self._give_back_unstarted([claim])
            return False
        if job.id in self._running_jobs:
            # Of the earlier run, a call has ended the claim and the handler is about to return, or
            # the claim was lost. If given back at once, this claim would come again at once.
            said = "%r waits until its earlier run here has ended"
            log.debug(said, claim, extra=job._log_fields())
            self._beside.add(claim)
            asyncio.get_running_loop().call_later(BESIDE, self._give_back_beside, claim)
            return False
        return True

    def _give_back_beside(self, claim: Claim) -> None:
        if claim in self._beside:
            said = "%r is given back: its earlier run here has not ended"
            log.warning(said, claim, extra=claim.job._log_fields())
            self._beside.discard(claim)
            self._give_back_unstarted([claim])

    def _start_beside(self, job: int) -> None:
        """Start the last claim that has waited for the end of a run of its job.

        The others are given back: their claims are lost, or belong to a batch that has started.
        """
        waiting = [claim for claim in self._beside if claim.job.id == job]
        for claim in waiting:
            self._beside.discard(claim)
            is_last = claim.job.claim == max(other.job.claim for other in waiting)
            if is_last and claim.batch is None:
                self.claimed.appendleft(claim)
            else:
                self._give_back_unstarted([claim])  # of a batch: the others run already
        if self.claimed and not self.is_starting:
            self.is_starting = True
            self._start_soon()

    def _is_past_timeout(self, claim: Claim) -> bool:
        """Whether a claim has waited here for so long that others may have ended it by now."""
        timeout = claim.job.timeout
        return timeout is not None and (
            claim.asked_at + timeout.total_seconds() + TOO_LATE <= clock()
        )

    def let_begin(self, claim: Claim) -> bool:
        """Return whether the handler of a started claim may begin; if not, release the claim."""
        self._hear_first()
        if self.is_too_late(claim):
            self.give_back_unbegun(claim)
            return False
        return True

    def is_too_late(self, claim: Claim) -> bool:
        """Whether the handler of a started claim must not begin any more.

        The process was frozen, so others may have run the job; or there was a pause since, or the
        worker was told to stop. Called just before the handler would begin, also in threads.
        """
        assert self._heartbeat is not None
        return (
            self._state.is_told_to_stop
            or claim.asked_at <= self._paused_at
            or self._heartbeat.is_overdue
            or self._is_past_timeout(claim)
        )

    def give_back_unbegun(self, claim: Claim) -> None:
        """Release a started claim, or its batch, whose handler has not begun."""
        log.info("%r has not begun, and is given back", claim, extra=claim.job._log_fields())
        self._give_back_unstarted(each for each in claim.members if not each.is_released)
        for each in claim.members:
            self._forget_handler(each)

    # Claims that end

    def end(self, claim: Claim, outcome: str | outcomes.Settled) -> None:
        """Take in a job's outcome."""
        self._forget_handler(claim)
        if claim.is_released:
            return
        job = claim.job
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%r has ended", job, extra=job._log_fields())
        claim.duration = clock() - claim.started_at
        if claim.slots is not None and claim in self.running and claim is claim.members[0]:
            claim.slots.prefetch.ended(claim.duration / len(claim.members))
        self._leave(claim)
        self.finished += 1
        if isinstance(outcome, outcomes.Settled):
            self._announcer.settled(claim, outcome)
            self._state.hint()
            return
        self._completer.add(claim, outcome)
        if job._abort_reason == STOPPED:
            released = outcomes.released(job.id, job.claim)
            if outcomes.without_steps(outcome) == released:
                self.given_back += 1
                self._warn_given_back(claim)
        if self._state.is_waiting:
            self._state.hint()

    def _forget_handler(self, claim: Claim) -> None:
        """Forget the handler of a claim, which has ended, and stop its timer."""
        claim.coroutine = None
        if claim.timer is not None:
            claim.timer.cancel()
            claim.timer = None

    def _leave(self, claim: Claim) -> None:
        """Free the job's slot, if no other job of its batch uses that."""
        claim.has_left = True
        slots = claim.slots
        if slots is not None:
            claim.slots = None
            if claim.batch is None or claim.batch.leave():
                batch = claim.batch
                has_started = claim in self.running if batch is None else batch.has_started
                slots.left(has_started=has_started)
                if has_started and self._ahead[slots] and not self.is_starting:
                    self.is_starting = True
                    self._start_soon()
        self._beside.discard(claim)
        if claim in self.running:
            del self.running[claim]
            self._running_jobs.discard(claim.job.id)
            if self._beside:
                self._start_beside(claim.job.id)
        if self._heartbeat is not None:
            self._heartbeat.extend_after.pop(claim, None)

    def give_back(self, claim: Claim) -> None:
        """Release a claim, even if its handler goes on."""
        self.given_back += claim in self.running
        self._release(claim)

    def _release(self, claim: Claim) -> None:
        if not claim.is_released:
            claim.is_released = True
            self._leave(claim)
            self._completer.add(claim, outcomes.released(claim.job.id, claim.job.claim))
            self._state.hint()

    def recall(self) -> None:
        """Release the claims that have not started, or whose handlers wait for a connection."""
        self.give_back_waiting()
        for claim in self.running:
            claim.job._is_recalled = True

    def give_back_waiting(self) -> None:
        """Release the claims that have not started."""
        self._give_back_unstarted(self._take_waiting())

    def _take_waiting(self) -> list[Claim]:
        waiting = self.waiting
        self.claimed.clear()
        self._ahead.clear()
        self._beside.clear()
        return waiting

    def _give_back_unstarted(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            self._state.jobs_left += 1
            self._release(claim)

    def give_back_all(self) -> None:
        """Release all claims."""
        self.give_back_waiting()
        for claim in list(self.running):
            self.unresponsive += claim.coroutine is not None
            self._warn_given_back(claim)
            self.give_back(claim)

    def _warn_given_back(self, claim: Claim) -> None:
        said = "%r did not end in time: giving it back"
        log.warning(said, claim, extra=claim.job._log_fields())

    def note_unresponsive(self, count: int) -> None:
        """Count tasks and threads that go on: those of handlers may have been counted already."""
        self.unresponsive = max(self.unresponsive, count)

    # Aborts

    def abort(self, claim: Claim, reason: str) -> None:
        """Tell a job to end, once."""
        if claim.job._abort_reason is None:
            claim.job._abort_reason = reason
            if claim.runner is not None:
                claim.runner.abort(claim, reason)

    def _time_out(self, claim: Claim) -> None:
        """Tell a job, or its batch, that the timeout has passed."""
        for each in claim.members:
            self.abort(each, TIMED_OUT)
        if claim.runner is not None:
            claim.runner.interrupt(claim)

    def abort_all(self, reason: str) -> None:
        """Tell all running jobs to end."""
        for claim in list(self.running):
            self.abort(claim, reason)

    def abort_some(self, aborts: Sequence[tuple[int, int, str]]) -> None:
        """Tell these jobs to end. The database names each by id, claim and reason."""
        wanted = {(id, number): reason for id, number, reason in aborts}
        for claim in [*self.running, *self.waiting]:
            reason = wanted.get((claim.job.id, claim.job.claim))
            if reason is not None:
                self.abort(claim, reason)

    def on_beat(self) -> None:
        """Start what waited for a heartbeat."""
        if self._is_held:
            self._is_held = False
            self._start_some()

    def on_pause(self) -> None:
        """Release what has not begun: it may be paused."""
        self._paused_at = clock()
        self.recall()

    def on_claim_lost(self, claim: Claim) -> None:
        """Abort a job whose claim ended before it could be extended: it may run elsewhere."""
        if claim in self.running or claim in self.waiting:
            self.abort(claim, LOST)
            if claim.runner is not None:
                claim.runner.interrupt(claim)

    def on_worker_gone(self) -> None:
        """Abort all jobs: other workers may have their claims by now."""
        for claim in self._take_waiting():
            self._state.jobs_left += 1
            self._leave(claim)
        if self._is_held:
            self._is_held = self.is_starting = False
        self.abort_all(LOST)

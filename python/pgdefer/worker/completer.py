"""Keeps outcomes until the database has accepted them."""

from __future__ import annotations

import asyncio
import bisect
import collections
import contextlib
import itertools
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg

from pgdefer._text import logger
from pgdefer.database import sql
from pgdefer.database.connection import Connection, ConnectionLost
from pgdefer.errors import describe, is_transient, sqlstate_of
from pgdefer.worker import outcomes
from pgdefer.worker.announcer import Announcer
from pgdefer.worker.claim import Claim
from pgdefer.worker.ending import nearest, refused
from pgdefer.worker.heartbeat import clock

__all__ = ["FATAL", "Completer", "may_be_taken_later", "outcomes_json"]

log = logger("pgdefer.worker")

# Errors that waiting alone does not mend: missing rights, incompatible versions, nothing installed,
# wrong calls. An operator may mend the causes of all but the last (22023).
FATAL = frozenset({"QJ008", "QJ090", "22023", "42501", "3F000", "42883", "42P01", "28000", "28P01"})
# Errors that are usually temporary: a fault of the server, and a time limit. But if an outcome is
# refused TRIES times with one of them, the outcome is the cause.
DOUBTFUL = frozenset({"XX", "57014"})
TRIES = 20
# Errors of a server that has no room, or can't read or write its files: it refuses other outcomes,
# too, unless the refused one was too large.
FULL = frozenset({"53", "58"})
# The most characters of all outcomes in one call, and of a single outcome: the server closes the
# connection for a message of 1 GB, and jsonb holds no more than 256 MB.
MAX_CALL = 64_000_000
MAX_OUTCOME = 256_000_000

# How long a call waits for a claim that another transaction has locked, if that is to be expected;
# how many such claims are tried again at once, and after how many seconds.
PATIENCE = "500 ms"
LOCKED_AT_ONCE = 2
LOCKED_AGAIN = 10.0

Outcome = tuple[Claim, str]


class Completer:
    """The outcomes that are not written yet, in the order in which they came."""

    def __init__(self, announcer: Announcer) -> None:
        self.unsent: list[Outcome] = []
        #: When the first of them came.
        self.since = 0.0
        #: Whether one of them may not be a success: only `send` can announce the states of those.
        self.has_others = False
        #: Those whose claims are locked by open transactions, such as one that a handler has left.
        #: The others do not wait for them.
        self.locked: collections.deque[Outcome] = collections.deque()
        #: When to send some of these again.
        self.locked_until = 0.0
        #: Those that were refused because their claims had ended: `announce_ends` asks how.
        self.too_late: list[Outcome] = []
        self._announcer = announcer
        # How often an outcome was refused on its own.
        self._refused: collections.Counter[Claim] = collections.Counter()

    @property
    def left(self) -> list[Outcome]:
        """All outcomes that are not written yet."""
        return [*self.unsent, *self.locked]

    def add(self, claim: Claim, outcome: str) -> None:
        """Add the outcome of a claim."""
        if not self.unsent:
            self.since = clock()
        self.unsent.append((claim, outcome))
        if not self.has_others and not outcomes.is_success(outcome):
            self.has_others = True

    def take(self) -> list[Outcome]:
        """Return the outcomes to send now: all, unless they are too long for one call."""
        lengths = [*itertools.accumulate(len(outcome) for _, outcome in self.unsent)]
        count = max(bisect.bisect(lengths, MAX_CALL), 1)
        sending, self.unsent = self.unsent[:count], self.unsent[count:]
        self.has_others = self.has_others and bool(self.unsent)
        return sending

    def put_back(self, sending: Sequence[Outcome]) -> None:
        """Put back outcomes that were sent without an answer.

        They are sent again: the database refuses those that it has already stored.
        """
        self.unsent[:0] = sending
        self.has_others = self.has_others or bool(sending)

    async def send(
        self, connection: Connection, sending: Sequence[Outcome], *, patience: str | None = None
    ) -> None:
        """Send outcomes without fetching jobs."""
        given = {"outcomes": outcomes_json(sending)}
        if patience is None:
            rows = await connection.call(sql.FINISH_MANY, **given)
        else:
            rows = await connection.call(sql.TRY_FINISH_MANY, **given, patience=patience)
        sent = {(claim.job.id, claim.job.claim): (claim, outcome) for claim, outcome in sending}
        for id, number, state, error in rows:
            if error is not None:
                self.on_refused(id, number, error, sending)
            elif (id, number) in sent:
                self._announcer.taken(*sent[id, number], state)

    def announce_successes(self, sent: Sequence[Outcome], rows: Sequence[tuple[Any, ...]]) -> None:
        """Announce the successes that finish_and_fetch has accepted: its rows name the others."""
        if self._announcer.announces_successes:
            refused = {(row[0], row[1]) for row in rows if row[sql.CLAIM_COLUMNS] is not None}
            for claim, _ in sent:
                if (claim.job.id, claim.job.claim) not in refused:
                    self._announcer.settled(claim, outcomes.SUCCEEDED)

    async def send_apart(
        self, connection: Connection, sending: Sequence[Outcome], *, is_last: bool = False
    ) -> None:
        """Send outcomes. If the database refuses the call because of one, send each alone.

        If the server is full, stop at the first outcome that it refuses, which goes last next time;
        with `is_last`, go on.
        """
        unanswered = collections.deque(sending)
        try:
            try:
                await self.send(connection, sending, patience=PATIENCE)
            except psycopg.Error:
                is_full = False
                while unanswered and (is_last or not is_full):
                    is_full = await self._send_one(connection, *unanswered[0])
                    unanswered.popleft()
                self.put_back(unanswered)
        except (ConnectionLost, asyncio.CancelledError):
            self.put_back(unanswered)
            raise

    async def send_all(self, connection: Connection) -> None:
        """Send all outcomes: as `send_apart`, for the last time; then those that were locked."""
        for _ in range(2):  # replacements of refused ones are sent the second time
            left = len(self.unsent)
            while left > 0:
                sending = self.take()
                left -= len(sending)
                await self.send_apart(connection, sending, is_last=True)
        await self.send_locked(connection)

    async def send_locked(self, connection: Connection) -> None:
        """Send the outcomes again whose claims were locked, until some of these still are."""
        still_locked = 0
        for claim, outcome in list(self.locked):
            count = len(self.locked)
            await self._send_one(connection, claim, outcome)
            still_locked += len(self.locked) - count
            self.locked.popleft()
            if still_locked == LOCKED_AT_ONCE:
                break
        self.locked_until = clock() + LOCKED_AGAIN

    async def _send_one(self, connection: Connection, claim: Claim, outcome: str) -> bool:
        """Send an outcome; if the database can't store it, send the closest one that it can.

        Return whether the server is full. This does not go on forever: if no outcome is accepted,
        a short lease ends the claim as crashed.
        """
        job = claim.job
        for text in nearest(job, outcome, connection.encoding):
            try:
                await self.send(connection, [(claim, text)], patience=PATIENCE)
            except psycopg.errors.LockNotAvailable:
                said = "%r can't end: an open transaction has locked its claim; queue.why names it"
                log.warning(said, job, extra=job._log_fields())
                self.locked.append((claim, outcome))
                self.locked_until = clock() + LOCKED_AGAIN
                return False
            except psycopg.Error as error:
                said = "the outcome of %r was refused: %s"
                log.error(said, job, describe(error), extra=job._log_fields())
                if self._may_be_taken_later(claim, error):
                    self.add(claim, outcome)
                    return (sqlstate_of(error) or "")[:2] in FULL
            else:
                del self._refused[claim]
                return False
        del self._refused[claim]
        with contextlib.suppress(psycopg.Error):
            await connection.call(sql.EXTEND, id=job.id, claim=job.claim, lease="1 s")
        return False

    def _may_be_taken_later(self, claim: Claim, error: psycopg.Error) -> bool:
        code = sqlstate_of(error) or ""
        if DOUBTFUL & {code, code[:2]}:
            self._refused[claim] += 1
            return self._refused[claim] < TRIES
        return may_be_taken_later(error)

    def on_refused(self, id: int, number: int, error: str, sent: Sequence[Outcome]) -> None:
        """Drop an outcome whose claim has ended; if it asks for something invalid, fail the job."""
        is_over = error == "QJ002"
        level = logging.INFO if is_over else logging.WARNING
        log.log(level, "the outcome of job %d, claim %d, was refused: %s", id, number, error)
        for claim, outcome in sent:
            if (claim.job.id, claim.job.claim) != (id, number):
                continue
            if is_over:
                self.too_late.append((claim, outcome))
            elif not claim.is_refused:
                claim.is_refused = True
                self.add(claim, refused(claim.job, outcome, error))

    async def announce_ends(self, connection: Connection) -> None:
        """Announce how those claims ended whose outcomes came too late.

        The database may have stored an outcome before, and its answer was lost. Or the handler's
        transaction has committed, and the handler was cancelled before it learned of that.
        """
        while self.too_late:
            claim, outcome = self.too_late[0]
            job = claim.job
            try:
                rows = await connection.call(sql.HOW_ENDED, id=job.id, claim=job.claim)
            except psycopg.Error as error:
                said = "%r ended before it was reported: %s"
                log.warning(said, job, describe(error), extra=job._log_fields())
            else:
                self._announce_end(claim, outcome, *rows[0])
            del self.too_late[0]

    def _announce_end(self, claim: Claim, outcome: str, ended: str | None, state: str) -> None:
        """Announce the end of a claim: `ended` is as queue.attempt_outcome returns it."""
        if ended is None and state == "succeeded":
            self._announcer.settled(claim, outcomes.SUCCEEDED)
        elif ended == outcomes.kind(json.loads(outcome)):
            self._announcer.taken(claim, outcome, state)
        else:
            said = "the outcome of %r was dropped: its claim has ended as %s, and the job is %s"
            log.warning(said, claim.job, ended or "lost", state, extra=claim.job._log_fields())


def may_be_taken_later(error: psycopg.Error) -> bool:
    """Whether waiting, or an operator, may mend what refused the call."""
    return is_transient(error) or sqlstate_of(error) in FATAL - {"22023"}


def outcomes_json(sending: Iterable[Outcome]) -> str:
    """Return the array that queue.finish_many takes. Raises psycopg.Error if it is too long."""
    texts = [text for _, text in sending]
    if sum(map(len, texts)) > MAX_OUTCOME:
        raise psycopg.errors.ProgramLimitExceeded(
            f"it has more than {MAX_OUTCOME:,} characters: let the handler store such a result "
            "elsewhere, and return where"
        )
    return f"[{','.join(texts)}]"

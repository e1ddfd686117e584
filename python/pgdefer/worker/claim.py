"""The worker's records of claims and batches, and the common interface of all runners of claims.

Tests: unit/test_executor.py, integration/test_batch.py.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pgdefer.tasks.batch import BatchJob
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.handling import RETRY_POLICY_ONLY, FailurePolicy
from pgdefer.tasks.interruptible import Interruptible
from pgdefer.tasks.task import Task
from pgdefer.worker.outcomes import Settled
from pgdefer.worker.slots import Slots

__all__ = ["Batch", "Claim", "Keeper", "Runner", "gather"]


class Claim:
    """A claimed job, from when it was fetched until its outcome is known.

    `job` is what its handler sees.
    """

    __slots__ = (
        "asked_at",
        "batch",
        "call",
        "came_at",
        "coroutine",
        "duration",
        "has_left",
        "is_refused",
        "is_released",
        "job",
        "runner",
        "slots",
        "started_at",
        "task",
        "timer",
    )

    def __init__(self, job: JobContext, slots: Slots | None, asked_at: float) -> None:
        self.job = job
        #: The slots, of which the claim uses one, alone or with its batch.
        self.slots = slots
        #: The batch in which it runs, if its task takes those.
        self.batch: Batch | None = None
        #: When its fetch was sent, by the worker's clock.
        self.asked_at = asked_at
        #: When it came, if it has to wait for a slot.
        self.came_at = asked_at
        #: When its handler was started, by that clock, and how many seconds it ran.
        self.started_at = asked_at
        self.duration = 0.0
        #: Whether it was given back, and whether the database has refused an outcome of it.
        self.is_released = False
        self.is_refused = False
        #: Whether it no longer uses a slot: it has ended, or belongs to another worker.
        self.has_left = False
        #: Set when it starts; None if the app has no such task.
        self.task: Task[..., Any] | None = None
        self.runner: Runner | None = None
        self.coroutine: asyncio.Task[None] | None = None
        self.call: Interruptible[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return repr(self.job)

    @property
    def members(self) -> Sequence[Claim]:
        """The claims that one call of the handler runs."""
        return (self,) if self.batch is None else self.batch.claims

    @property
    def failure_policy(self) -> FailurePolicy:
        """The policy of its task; without a task, the retry policy decides alone."""
        return RETRY_POLICY_ONLY if self.task is None else self.task.failure_policy


class Batch:
    """Claims that one call of a handler runs, at most `size`; they use one slot until all end.

    The first one stands for them where they wait, start and are timed.
    """

    __slots__ = ("_left", "claims", "has_started", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.claims: list[Claim] = []
        #: Whether one of them has started: the slot then counts as running until all have left.
        self.has_started = False
        # How many of them still use the slot.
        self._left = 0

    def add(self, claim: Claim) -> None:
        """Add a claim, whose job gets its `args` later."""
        job: BatchJob[Any] = BatchJob(claim.job.client, claim.job._row)
        claim.job, claim.batch = job, self
        self.claims.append(claim)
        self._left += 1

    def leave(self) -> bool:
        """Record that one of them has ended; return whether that was the last one."""
        self._left -= 1
        return not self._left


def gather(claims: Iterable[Claim], tasks: Mapping[str, Task[..., Any]]) -> list[Claim]:
    """Return the claims to start: those of single jobs, and the first one of each batch.

    The jobs of a batch have one task and one timeout, so that a timeout ends the call for all of
    them. Jobs of a version that this worker does not understand form batches of their own, which
    are given back.
    """
    starts: list[Claim] = []
    last: dict[tuple[Task[..., Any], dt.timedelta | None, bool], Batch] = {}
    for claim in claims:
        task = tasks.get(claim.job.task)
        if task is None or task.execution.batch is None:
            starts.append(claim)
            continue
        key = (task, claim.job.timeout, task.versions.understand(claim.job._stored))
        batch = last.get(key)
        if batch is None or len(batch.claims) == task.execution.batch:
            batch = last[key] = Batch(task.execution.batch)
            starts.append(claim)
        batch.add(claim)
    return starts


class Keeper(Protocol):
    """What runners tell about their claims."""

    def handler_begins(self, claim: Claim) -> None:
        """Count the handler's duration and its timeout from now, in the worker's loop."""

    def end(self, claim: Claim, outcome: str | Settled) -> None:
        """Take in the outcome of a handler, in the worker's loop."""

    def let_begin(self, claim: Claim) -> bool:
        """Return whether the handler may begin; if not, release the claim. In the worker's loop."""

    def is_too_late(self, claim: Claim) -> bool:
        """Whether the handler must not begin any more. Called just before it would, in threads."""

    def give_back_unbegun(self, claim: Claim) -> None:
        """Release a claim, or its batch, whose handler must not begin, in the worker's loop."""


class Runner(Protocol):
    """Runs claims of one kind. Each method is called in the worker's loop."""

    def start(self, claim: Claim) -> None:
        """Start the handler; tell the keeper when it has ended."""

    def abort(self, claim: Claim, reason: str) -> None:
        """Tell the handler to end. `JobContext.should_abort` is true already."""

    def interrupt(self, claim: Claim) -> None:
        """End the handler now, if it can be forced: its timeout has passed."""

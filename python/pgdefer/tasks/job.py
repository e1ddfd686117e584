"""A job by its id: waiting for its result, reading it, changing it.

Tests: integration/test_managing.py, integration/test_results.py.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, TypeVar

from pgdefer.client.client import Client
from pgdefer.tasks.job_calls import JobCalls
from pgdefer.tasks.job_calls_async import AsyncJobCalls

__all__ = ["Job"]

R_co = TypeVar("R_co", covariant=True)


@dataclasses.dataclass(frozen=True)
class Job(JobCalls[R_co], AsyncJobCalls[R_co]):
    """A deferred job, or one that `App.job` names. Jobs with the same id are equal.

    `int(job)` is its id. The object stores nothing else: each method asks the database.

    Each method but `result` takes a `connection`, as `defer` does, and is then part of the caller's
    transaction; otherwise it has its own. Each raises JobNotFound if there is no such job, or if
    its transaction has not committed.

    Methods that change the job raise InvalidState if its state does not allow that, or if the job
    can't be changed now: the caller's own transaction has deferred it, or another is changing it.
    They raise WrongIsolation in a transaction that is not READ COMMITTED. Until the transaction
    ends, workers admit no new jobs, and such calls on other connections wait: keep it short.
    """

    # What EncodeError says.
    _pgdefer_instead: ClassVar[str] = "Pass its id: job.id."

    id: int
    client: Client = dataclasses.field(repr=False, compare=False)

    def __int__(self) -> int:
        return self.id

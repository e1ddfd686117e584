"""Turns the end of a handler into an outcome.

Tests: unit/test_executor.py, integration/test_failures.py, integration/test_worker_outcomes.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

from pgdefer._text import escaped, full_type_name, logger, traceback_of, type_name
from pgdefer.errors import EncodeError, PgDeferError, TransactionLost, refused_outcome
from pgdefer.tasks.context import JobAborted, JobContext, JobTimeout, RetryLater
from pgdefer.tasks.handling import FailurePolicy
from pgdefer.tasks.raised import members
from pgdefer.worker import memory, outcomes

__all__ = [
    "LOST",
    "STOPPED",
    "TIMED_OUT",
    "failed",
    "is_late",
    "nearest",
    "outcome_of",
    "refused",
    "result_json",
    "stops_with",
    "success",
    "timed_out",
    "was_told_to_end",
]

log = logger("pgdefer.worker")

# Reasons for which a worker aborts jobs, in addition to those of the database.
LOST = "the claim was lost"
STOPPED = "the worker stops"
TIMED_OUT = "timed out"
# The most characters of why a result can't be stored.
MAX_REASON = 500


def stops_with(worker: asyncio.Task[Any] | None, job: JobContext) -> None:
    """Note that the worker stops, if both its task and this coroutine's were cancelled.

    asyncio.run cancels all tasks when its main coroutine has ended. If only this coroutine's task
    was cancelled, the handler has failed.
    """
    if worker is None or not worker.cancelling() or job._abort_reason is not None:
        return
    own = asyncio.current_task()
    if own is not None and own.cancelling():
        job._abort_reason = STOPPED


def was_told_to_end(job: JobContext, error: BaseException) -> bool:
    """Whether the handler has raised this error because it was told to end."""
    is_end = isinstance(error, asyncio.CancelledError | JobAborted | JobTimeout)
    return is_end and job._abort_reason is not None


def is_late(job: JobContext) -> bool:
    """Whether the handler has outlived its timeout, and was not told to end before that."""
    if job._abort_reason is None and job._late_at is not None:
        return time.monotonic() >= job._late_at
    return job._abort_reason == TIMED_OUT


def success(job: JobContext, policy: FailurePolicy, result: object) -> str:
    """Return the outcome of a handler that returned."""
    return outcomes.with_steps(_success(job, policy, result), job.steps.take_kept())


def _success(job: JobContext, policy: FailurePolicy, result: object) -> str:
    if is_late(job):
        return timed_out(job, policy, None)
    if isinstance(result, RetryLater):
        return _yielded(job, policy, result)
    return outcomes.succeeded(job.id, job.claim, result_json(job, result))


def result_json(job: JobContext, result: object) -> str | None:
    """Return the JSON of a result, or of a note that it can't be stored."""
    if result is None:
        return None
    try:
        return job.client.codec.dumps(result)
    except JobTimeout:
        raise
    except BaseException as error:
        # The job's effects remain. Only a caller that asks for the result notices that it is lost.
        kind, why = full_type_name(result), None
        if type(error) is EncodeError and error.hint is None:
            why = escaped(error.message)[:MAX_REASON]
        said = "%r succeeded, but its result, a %s, can't be stored (%s)"
        log.warning(said, job, kind, why or type_name(error), extra=job._log_fields())
        return outcomes.unencodable(kind, why)


def _yielded(job: JobContext, policy: FailurePolicy, asked: RetryLater) -> str:
    try:
        return outcomes.retry_later(job.id, job.claim, asked)
    except Exception as error:
        return failed(job, policy, error)


def outcome_of(job: JobContext, policy: FailurePolicy | None, error: BaseException) -> str:
    """Return the outcome of a handler that raised."""
    return outcomes.with_steps(_raised(job, policy, error), job.steps.take_kept())


def _raised(job: JobContext, policy: FailurePolicy | None, error: BaseException) -> str:
    for one in members(error):
        if isinstance(one, TransactionLost):
            job._error = one
            return outcomes.crashed(job.id, job.claim, one)
    if is_late(job):
        return timed_out(job, policy, error)
    if isinstance(error, RetryLater) and policy is not None:
        return _yielded(job, policy, error)
    if isinstance(error, asyncio.CancelledError | JobAborted | JobTimeout):
        if job._abort_reason in (STOPPED, LOST):
            # A claim that was believed lost may be valid still: then the job runs again.
            return outcomes.released(job.id, job.claim)
        if job._abort_reason is not None:
            log.info("%r was told to abort: %s", job, job._abort_reason, extra=job._log_fields())
            cause = JobAborted(job._abort_reason).with_traceback(traceback_of(error))
            return outcomes.aborted(job.id, job.claim, cause)
        if isinstance(error, JobAborted):
            log.info("%r gave up: %s", job, error, extra=job._log_fields())
            return outcomes.aborted(job.id, job.claim, error)
    return failed(job, policy, error)


def timed_out(job: JobContext, policy: FailurePolicy | None, error: BaseException | None) -> str:
    """Return the outcome of a handler that ended after its timeout, however it ended."""
    late = TimeoutError(f"not done within {job.timeout}")
    if isinstance(error, asyncio.CancelledError | JobAborted | JobTimeout):
        late = late.with_traceback(traceback_of(error))
    else:
        late.__cause__ = error
    return failed(job, policy, late, "timed_out")


def refused(job: JobContext, outcome: str, code: str) -> str:
    """Return the failure in place of an outcome whose needs the database has refused."""
    job._error = refused_outcome(json.loads(outcome).get("needs") or [], code)
    return outcomes.failed(job.id, job.claim, job._error, {"retryable": False})


def failed(
    job: JobContext,
    policy: FailurePolicy | None,
    error: BaseException,
    outcome: str | None = None,
) -> str:
    """Return the outcome of a failure: the error, and the task's decision about such errors."""
    job._error = error
    options: dict[str, Any] = {"retryable": False}
    if policy is not None:
        try:
            options = policy.decision(error, job)
            json.dumps(options)
        except JobTimeout:
            raise
        except BaseException:
            said = "%r: what to do about its failure could not be decided"
            log.exception(said, job, extra=job._log_fields())
            options = {}
    if isinstance(error, MemoryError) and memory.cap.was_hit:
        options.setdefault("reason", "memory")
    if outcome is not None:
        options["outcome"] = outcome
    return outcomes.failed(job.id, job.claim, error, options)


def nearest(job: JobContext, outcome: str, encoding: str) -> Iterator[str]:
    """Yield an outcome, then ever simpler ones to send in its place if the database refuses it."""
    yield outcome
    undecided = outcomes.without_decision(outcome)
    if undecided is not None:
        outcome, decision = undecided
        said = "%r fails without its decision: %s"
        log.error(said, job, decision[:1000], extra=job._log_fields())
        yield outcome
    bare = outcomes.without_steps(outcome)
    if bare != outcome:
        yield bare
        outcome = bare
    note = outcomes.without_result(outcome, job.id, job.claim)
    if note is not None:
        yield note
    else:
        for each in (encoding, "ASCII"):
            yield outcomes.storable_in(outcome, each)
    unstorable = PgDeferError("the outcome can't be stored")
    yield outcomes.failed(job.id, job.claim, unstorable)

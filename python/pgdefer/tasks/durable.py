# Generated from durable_async.py: change that, and run `make generate`.
"""The methods of a durable job's handler that wait or report: sleeps, children, streams."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any, TypeVar

from pgdefer.database import sql
from pgdefer.errors import DecodeError
from pgdefer.options import checked_interval, checked_option
from pgdefer.tasks.prepared_job import PreparedJob, check_prepared
from pgdefer.tasks.raised import JobSuspended
from pgdefer.tasks.stepping import StepCalls, until
from pgdefer.tasks.steps import (
    Child,
    check_name,
    check_stored_name,
    checked_progress,
    ids_of,
    results_of,
)
from pgdefer.tasks.submit import submit_many

__all__ = ["DurableCalls"]

R = TypeVar("R")


class DurableCalls(StepCalls):
    """The calls of a job that continues after its last finished step.

    Each step has a name that is unique in its job. If a run uses a name again, as in a loop, the
    second use is another step than the first. So the order in which a name is used must stay the
    same from run to run.
    """

    __slots__ = ()

    # Waiting

    def sleep(self, name: str, until: dt.datetime | dt.timedelta) -> None:
        """Sleep until a time, or for a duration by the database's clock. The next run continues.

        Meanwhile the job occupies no slot, worker or connection.
        """
        if not isinstance(until, dt.datetime | dt.timedelta):
            raise TypeError(f"until must be a datetime or a timedelta, not {until!r}")
        is_delay = isinstance(until, dt.timedelta)
        value = checked_option("until", max(until, dt.timedelta(0)) if is_delay else until)
        when = {"at": None, "delay": value} if is_delay else {"at": value, "delay": None}
        with self._step(name, None) as (key, _):
            if key is None:
                return
            parameters = {**self._keyed(key), **when}
            with self._ending():
                ((outcome,),) = self._call(sql.SLEEP, parameters)
                self.steps.suspended(outcome, "scheduled")
                raise JobSuspended

    def wait_for(
        self,
        name: str,
        *,
        signal: str | None = None,
        event: str | None = None,
        timeout: dt.timedelta | None = None,
    ) -> Any:
        """Wait for a signal to this job, or for an event. The next run continues with its payload.

        It continues with None if `timeout` passes first. With neither a signal nor an event, it
        waits for a signal that has the step's name.
        """
        for what, text in (("signal", signal), ("event", event)):
            if text is not None:
                check_stored_name(what, text)
        length = checked_interval("timeout", timeout)
        with self._step(name, None) as (key, value):
            if key is None:
                return value
            parameters = {
                **self._keyed(key),
                "signal": name if signal is None and event is None else signal,
                "event": event,
                "timeout": length,
            }
            with self._ending():
                ((outcome,),) = self._call(sql.WAIT, parameters)
                self.steps.suspended(outcome, "waiting")
                raise JobSuspended

    # Children

    def call(self, call: PreparedJob[R], *, name: str | None = None) -> R:
        """Defer a job, once, and wait for its result, with which the next run continues.

        `call` is what `task.prepare(...)` returned. Raises JobFailed or JobCancelled if the job
        has not succeeded. The step's name is `name`, by default that of the task.
        """
        check_prepared([call])
        step = call.task if name is None else name
        result: R
        (result,) = self._gather([call], step, return_errors=False, count=1)
        return result

    def gather(
        self,
        calls: Iterable[PreparedJob[Any]],
        *,
        name: str = "gather",
        return_errors: bool = False,
    ) -> list[Any]:
        """Defer jobs, once, and wait for all results, with which the next run continues.

        Returns the results in the order of the calls. Raises JobFailed or JobCancelled for the
        first job that has not succeeded, and DecodeError if a result can't be decoded; with
        `return_errors` the list contains these errors instead. Meanwhile the waiting job occupies
        no slot.
        """
        return self._gather(calls, name, return_errors=return_errors)

    def _gather(
        self,
        calls: Iterable[PreparedJob[Any]],
        name: str,
        *,
        return_errors: bool,
        count: int | None = None,
    ) -> list[Any]:
        """Defer jobs and wait for them. A finished step must have `count` jobs, unless None."""
        check_name("name, with ' ended',", f"{name} ended")
        # The wait gets the number of the step that deferred: concurrent waits begin in any order.
        taken = self.steps.take(name)
        ended = f"{name} ended{taken.removeprefix(name)}"
        with self._step(name, None, taken) as (key, value):
            ids = (
                ids_of(taken, value, count)
                if key is None
                else self._defer(key, check_prepared(calls))
            )
        self._await_jobs(ended, ids)
        while (rows := self._ended(ids)) is None:
            # An operator has retried one. Not every run comes here, so no other step may have this
            # name: its number would depend on that.
            self._await_jobs(f"job {ids[0]} ended again", ids)
        results = []
        for id, _, state, stored, error in rows:
            result: Any
            try:
                result = self.client.codec.decode(stored)
            except DecodeError as undecoded:
                if not return_errors:
                    raise
                result = undecoded
            results.append((id, state, result, error))
        return results_of(results, return_errors=return_errors)

    def _await_jobs(self, name: str, ids: list[int]) -> None:
        """Wait for jobs, unless the step of this name is finished."""
        with self._step(name, None) as (key, _):
            if key is not None and ids:
                parameters = {**self._keyed(key), "jobs": ids}
                with self._ending():
                    ((outcome,),) = self._call(sql.AWAIT_JOBS, parameters)
                    self.steps.suspended(outcome, "waiting")
                    raise JobSuspended

    def _ended(self, ids: list[int]) -> list[Child] | None:
        """Return the rows of children, or None unless all have ended. Reads only if it must.

        One call reads the children of all steps, and concurrent steps wait for it, so a run of many
        steps need not read many times.
        """
        rows = self.steps.ended_children(ids)
        if rows is None:
            until(self.steps.running.has_read)
            rows = self.steps.ended_children(ids)
        if rows is None:
            with self.steps.running.reading():
                found = self._call(sql.NEEDS, {"id": self.id})
                self.steps.read_children(ids, found)
            rows = self.steps.ended_children(ids)
        return rows

    def _defer(self, key: str, calls: list[PreparedJob[Any]]) -> list[int]:
        """Defer jobs, and store their ids as a step, in one transaction."""
        with self._storing(callers=False) as (take, connection):
            jobs = submit_many(self.client, calls, connection)
            ids = [job.id for job in jobs]
            self._finish_in(connection, take, key, ids)
        return ids

    # Reporting

    def emit(self, stream: str, value: Any) -> int:
        """Append a value to a stream of the job, for `Job.stream`. Return the value's number."""
        check_stored_name("stream", stream)
        text = self.client.codec.dumps(value)
        parameters = {"id": self.id, "claim": self.claim, "stream": stream, "value": text}
        ((number,),) = self._call(sql.EMIT, parameters)
        return int(number)

    def progress(self, percent: float | None, message: str | None = None) -> None:
        """Set the progress that queue.jobs shows: 0 to 100, or None for none.

        A message of None keeps the last one. Raises TypeError or ValueError for other percentages.
        """
        rounded = checked_progress(percent, message)
        parameters = {"id": self.id, "claim": self.claim, "percent": rounded, "message": message}
        self._call(sql.SET_PROGRESS, parameters)

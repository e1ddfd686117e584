"""The calls that read and change a job.

Tests: integration/test_managing.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Generic, TypeVar

from pgdefer.client.client import Client
from pgdefer.codec import parsed
from pgdefer.database import sql
from pgdefer.database.callers import OWN, AnyAsyncConnection
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.errors import InvalidParameter, JobNotFound
from pgdefer.options import ENDED, checked_interval, checked_mapping, checked_option, checked_time
from pgdefer.tasks.answers import outcome_of, value_of
from pgdefer.tasks.infos import JobDetails, with_json
from pgdefer.tasks.steps import check_stored_name

__all__ = ["AsyncJobCalls"]

# How many children one call cancels.
MOST_CHILDREN = 1_000

R_co = TypeVar("R_co", covariant=True)


class AsyncJobCalls(Generic[R_co]):
    """The calls of a Job, whose docstring describes what they have in common."""

    id: int
    client: Client

    # Asking

    async def result_async(self, timeout: float | dt.timedelta | None = None) -> R_co:  # noqa: ASYNC109
        """Wait until the job has succeeded, and return its result: as `App.result`."""
        result: R_co = await self.client.result_async(self.id, timeout)
        return result

    async def state_async(self, *, connection: AnyAsyncConnection = OWN) -> str:
        """Return its state, as in the view queue.jobs."""
        return value_of(await self.client.call_async(sql.STATE, {"id": self.id}, connection))

    async def why_async(self, *, connection: AnyAsyncConnection = OWN) -> str:
        """Return the reason why it is not running, or how it ended."""
        return value_of(await self.client.call_async(sql.WHY, {"id": self.id}, connection))

    async def info_async(self, *, connection: AnyAsyncConnection = OWN) -> JobDetails:
        """Return its columns of queue.jobs, with its args and result decoded.

        The args are those that are stored: they lack the defaults of the task's parameters. Raises
        DecodeError if a value can't be decoded.
        """
        rows = await self.client.call_async(sql.JOB_DETAILS, {"id": self.id}, connection)
        if not rows:
            raise JobNotFound(f"there is no job {self.id}")
        info, decode_async = with_json(JobDetails, rows[0]), self.client.codec.decode_async
        args, result = await decode_async(info.args), await decode_async(info.result)
        return dataclasses.replace(info, args=args, result=result)

    async def stream_async(self, stream: str, *, after: int = 0) -> AsyncIterator[Any]:
        """Yield the values that the job emits to a stream, from the first, until it has finished.

        Polls for more meanwhile. With `after`, yields only values with greater numbers.
        """
        waits = GrowingDelay(first=0.02, last=1.0)
        while True:
            state = await self.state_async()
            parameters = {"id": self.id, "stream": stream, "after": after}
            rows = await self.client.call_async(sql.READ_STREAM, parameters)
            for number, value in rows:
                after = number
                yield await self.client.codec.decode_async(parsed(value))
            if rows:
                waits.reset()
            elif state in ENDED:
                return
            else:
                await asyncio.sleep(waits.next())

    # Changing

    async def signal_async(
        self, name: str, payload: Any = None, *, connection: AnyAsyncConnection = OWN
    ) -> None:
        """Send it a signal, for which its handler waits now or later. Each wait takes one.

        Raises TypeError or InvalidParameter for a name that can't be stored.
        """
        check_stored_name("name", name)
        text = self.client.codec.dumps({} if payload is None else payload)
        parameters = {"id": self.id, "name": name, "payload": text}
        await self.client.call_async(sql.SIGNAL, parameters, connection)

    async def cancel_async(
        self,
        *,
        abort: bool = False,
        children: bool = False,
        connection: AnyAsyncConnection = OWN,
    ) -> str:
        """Cancel it, if it has not started, and return `cancelled`.

        If it runs, `abort` tells its worker to stop it, and `running` is returned: the job
        becomes cancelled unless it succeeds first. Raises InvalidState if it has finished, or
        runs and `abort` is not set. With `children`, it then calls `cancel_children`.
        """
        parameters = {"id": self.id, "abort": abort}
        state = value_of(await self.client.call_async(sql.CANCEL, parameters, connection))
        if children:
            await self.cancel_children_async(abort=abort, connection=connection)
        return state

    async def cancel_children_async(
        self, *, abort: bool = False, connection: AnyAsyncConnection = OWN
    ) -> list[int]:
        """Cancel the jobs that it has deferred and waits for, and theirs; return their ids.

        With `abort`, those that run are told to stop; without it they are left alone.
        """
        parameters = {"id": self.id, "abort": abort}
        found: list[int] = []
        rows = None
        while rows is None or len(rows) == MOST_CHILDREN:
            rows = await self.client.call_async(sql.CANCEL_CHILDREN, parameters, connection)
            found += [row[0] for row in rows if row[2] is None]
        return found

    async def retry_async(
        self,
        *,
        at: dt.datetime | None = None,
        delay: dt.timedelta | None = None,
        priority: int | None = None,
        queue: str | None = None,
        lock: str | None = None,
        force: bool = False,
        from_step: str | None = None,
        connection: AnyAsyncConnection = OWN,
    ) -> str:
        """Run it again if it has finished, or now if it waits for a retry; return its new state.

        With `at` or `delay` it runs later. `priority`, `queue` and `lock` change the job first.
        `lock` is not a template; `lock=""` removes the lock; among the jobs of a new lock, the job
        is placed by its id. Its counters are reset. With `force`, a running job loses its claim,
        and an `expires_at` that has passed is ignored. A durable job keeps its finished steps; with
        `from_step`, only those that it finished before that one.

        Raises InvalidState if there is nothing to retry, or, without `force`, if it runs or has
        expired; AlreadyQueued if it has never started and another job holds its queueing_lock;
        StepChanged if it has not finished the step `from_step`.
        """
        if at is not None and delay is not None:
            raise InvalidParameter("at and delay exclude each other", hint="Give one of the two.")
        given = (
            ("retry_at", checked_time("at", at)),
            ("retry_in", checked_interval("delay", delay)),
            ("priority", None if priority is None else checked_option("priority", priority)),
            ("queue", queue),
            ("lock", lock),
        )
        changes = {key: each for key, each in given if each is not None}
        parameters = {"ids": [self.id], "force": force, "from_step": from_step}
        parameters["changes"] = json.dumps(changes) if changes else None
        return outcome_of(await self.client.call_async(sql.RETRY, parameters, connection))

    async def fork_async(self, from_step: str, *, connection: AnyAsyncConnection = OWN) -> int:
        """Defer a copy that runs again from a finished step on; return its id.

        The copy keeps the steps that were finished before that one.
        """
        parameters = {"id": self.id, "from_step": from_step}
        ((id_,),) = await self.client.call_async(sql.FORK, parameters, connection)
        return int(id_)

    async def copy_async(
        self, queue: str | None = None, *, connection: AnyAsyncConnection = OWN
    ) -> int:
        """Defer a new job with the same task, args and options; return its id.

        `queue` None means the same queue. The copy gets no queueing lock, idempotency key or group.
        """
        parameters = {"id": self.id, "queue": queue}
        ((id_,),) = await self.client.call_async(sql.COPY, parameters, connection)
        return int(id_)

    async def done_async(self, *, connection: AnyAsyncConnection = OWN) -> str:
        """End it as succeeded without running it; return its new state.

        A running job loses its claim. A failed or cancelled one counts as succeeded from then on.
        Raises InvalidState if it has succeeded.
        """
        return outcome_of(await self.client.call_async(sql.DONE, {"ids": [self.id]}, connection))

    async def fail_async(self, message: str, *, connection: AnyAsyncConnection = OWN) -> str:
        """End it as failed, for good; return its new state. A running job loses its claim.

        Raises InvalidState if it has finished.
        """
        parameters = {"ids": [self.id], "message": message}
        return outcome_of(await self.client.call_async(sql.FAIL_JOBS, parameters, connection))

    async def reschedule_async(
        self, at: dt.datetime | None = None, *, connection: AnyAsyncConnection = OWN
    ) -> str:
        """Change the time from which it may run (None: now); return its new state.

        Raises InvalidState if it runs or has finished, ValueError for a time without a zone.
        """
        parameters = {"id": self.id, "at": checked_time("at", at)}
        return value_of(await self.client.call_async(sql.RESCHEDULE, parameters, connection))

    async def hold_async(self, *, connection: AnyAsyncConnection = OWN) -> str:
        """Put it on hold until `unhold`, and return `held`. It keeps its place at its lock.

        Raises InvalidState if it runs or has finished.
        """
        return value_of(await self.client.call_async(sql.HOLD, {"id": self.id}, connection))

    async def unhold_async(self, *, connection: AnyAsyncConnection = OWN) -> str:
        """End its hold, and return its new state. Raises InvalidState if it is not held."""
        return value_of(await self.client.call_async(sql.UNHOLD, {"id": self.id}, connection))

    async def set_priority_async(
        self, priority: int, *, connection: AnyAsyncConnection = OWN
    ) -> str:
        """Change its priority; if it runs or has finished, that of its next run. Returns its state.

        Raises TypeError if `priority` is not an int, ValueError if it exceeds 32 bits.
        """
        parameters = {"ids": [self.id], "priority": checked_option("priority", priority)}
        return outcome_of(await self.client.call_async(sql.SET_PRIORITY, parameters, connection))

    async def set_deadline_async(
        self, at: dt.datetime | None, *, connection: AnyAsyncConnection = OWN
    ) -> str:
        """Change its deadline; if it runs or has finished, that of its next run. Returns its state.

        None removes it. Raises ValueError for a time without a zone.
        """
        parameters = {"ids": [self.id], "at": checked_time("at", at)}
        return outcome_of(await self.client.call_async(sql.SET_DEADLINE, parameters, connection))

    async def set_args_async(
        self, args: Mapping[str, Any], *, connection: AnyAsyncConnection = OWN
    ) -> str:
        """Replace all its arguments; return its state.

        They are not checked against the task. A failed or cancelled job uses them for its retry.
        Its lock and keys stay. Raises InvalidState if it runs or has succeeded.
        """
        text = self.client.codec.dumps_args(checked_mapping("args", args))
        parameters = {"id": self.id, "args": text}
        return value_of(await self.client.call_async(sql.SET_ARGS, parameters, connection))

    async def delete_async(
        self, *, force: bool = False, connection: AnyAsyncConnection = OWN
    ) -> None:
        """Remove it and every trace of it.

        Raises InvalidState without `force` if it runs, or if unfinished jobs need it. With `force`
        a running job loses its claim, and the jobs that need it count it as failed unless it had
        succeeded.
        """
        parameters = {"ids": [self.id], "force": force}
        outcome_of(await self.client.call_async(sql.DELETE, parameters, connection))

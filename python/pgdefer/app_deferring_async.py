"""An App's calls that defer jobs, and wait for their results.

Tests: integration/test_defer.py.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from pgdefer.database import sql
from pgdefer.database.callers import OWN, AnyAsyncConnection
from pgdefer.options import DeferOptions, HasId, checked_interval, job_id
from pgdefer.tasks.claim_calls_async import needs_async
from pgdefer.tasks.job import Job
from pgdefer.tasks.need import Need
from pgdefer.tasks.open_group import OpenGroup
from pgdefer.tasks.prepared import prepare
from pgdefer.tasks.prepared_job import PreparedJob, check_prepared
from pgdefer.tasks.registry import Registry
from pgdefer.tasks.submit_async import submit_async, submit_many_async

__all__ = ["AsyncDeferring"]


class AsyncDeferring(Registry):
    """Deferring jobs and publishing events, on the app's connections or on the caller's."""

    # Deferring

    async def defer_async(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        connection: AnyAsyncConnection = OWN,
        **options: Unpack[DeferOptions],
    ) -> Job[Any]:
        """Defer a job of a task that need not be known here; its arguments are not checked."""
        call = prepare(self.client, task, args, options)
        return await submit_async(self.client, call, connection)

    async def defer_many_async(
        self, calls: Iterable[PreparedJob[Any]], *, connection: AnyAsyncConnection = OWN
    ) -> list[Job[Any]]:
        """Defer many jobs, of any tasks, all or none. Returns them in the order of the calls."""
        return await submit_many_async(self.client, check_prepared(calls), connection)

    async def chain_async(
        self, calls: Iterable[PreparedJob[Any]], *, connection: AnyAsyncConnection = OWN
    ) -> list[Job[Any]]:
        """Defer jobs, each of which needs the one before it. Returns them in this order."""
        return await submit_many_async(
            self.client, check_prepared(calls), connection, sql.DEFER_CHAIN
        )

    async def publish_async(
        self,
        event: str,
        payload: Any = None,
        *,
        retain: dt.timedelta | None = None,
        connection: AnyAsyncConnection = OWN,
    ) -> bool:
        """Publish an event, for handlers that wait for it now and those that will while it is kept.

        It is kept for `retain`, 30 days by default. Returns True, or False if an event of this name
        exists: that one then stays as it is.
        """
        text = self.client.codec.dumps({} if payload is None else payload)
        kept = checked_interval("retain", retain)
        parameters = {"event": event, "payload": text, "retain": kept}
        ((is_first,),) = await self.client.call_async(sql.PUBLISH, parameters, connection)
        return bool(is_first)

    async def open_group_async(
        self,
        name: str,
        *,
        on_end: PreparedJob[Any] | None = None,
        on_success: PreparedJob[Any] | None = None,
        on_failure: PreparedJob[Any] | None = None,
        connection: AnyAsyncConnection = OWN,
    ) -> OpenGroup:
        """Open a group, which jobs join by `group=name` until it is closed.

        Each callback is deferred once: `on_end` when the group is closed and all its jobs have
        ended, `on_success` when all of them have succeeded, `on_failure` as soon as one has failed
        or was cancelled. If the group is open already, it stays as it is. Raises InvalidParameter
        if it is closed.
        """
        calls = {"on_end": on_end, "on_success": on_success, "on_failure": on_failure}
        given = check_prepared(call for call in calls.values() if call is not None)
        parameters = {
            key: None if call is None else call.to_json() for key, call in calls.items()
        } | {"name": name}
        tasks = [call.task for call in given]
        rows = await self.client.call_async(sql.OPEN_GROUP, parameters, connection, tasks=tasks)
        return OpenGroup(self.client, name, bool(rows[0][0]), connection)

    # Asking

    async def result_async(
        self,
        job: int | HasId,
        timeout: float | dt.timedelta | None = None,  # noqa: ASYNC109
    ) -> Any:
        """Wait until a job has succeeded, for at most `timeout` seconds, and return its result.

        Raises JobFailed or JobCancelled if the job ended so, TimeoutError after `timeout`,
        DecodeError if the result can't be decoded, and JobNotFound if there is no such job, or if
        the transaction that defers it has not committed. `Job.result` does the same.
        """
        return await self.client.result_async(job_id(job), timeout)

    async def needs_async(self, job: int | HasId) -> list[Need]:
        """Return the jobs that a job needs, in the order of their ids, with their present states.

        Raises JobNotFound, and DecodeError if a result can't be decoded.
        """
        return await needs_async(self.client, job_id(job))

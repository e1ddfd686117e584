# Generated from app_deferring_async.py: change that, and run `make generate`.
"""An App's calls that defer jobs, and wait for their results.

Tests: integration/test_defer.py.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from pgdefer.database import sql
from pgdefer.database.callers import OWN, AnyConnection
from pgdefer.options import DeferOptions, HasId, checked_interval, job_id
from pgdefer.tasks.claim_calls import needs
from pgdefer.tasks.job import Job
from pgdefer.tasks.need import Need
from pgdefer.tasks.open_group import OpenGroup
from pgdefer.tasks.prepared import prepare
from pgdefer.tasks.prepared_job import PreparedJob, check_prepared
from pgdefer.tasks.registry import Registry
from pgdefer.tasks.submit import submit, submit_many

__all__ = ["Deferring"]


class Deferring(Registry):
    """Deferring jobs and publishing events, on the app's connections or on the caller's."""

    # Deferring

    def defer(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        connection: AnyConnection = OWN,
        **options: Unpack[DeferOptions],
    ) -> Job[Any]:
        """Defer a job of a task that need not be known here; its arguments are not checked."""
        call = prepare(self.client, task, args, options)
        return submit(self.client, call, connection)

    def defer_many(
        self, calls: Iterable[PreparedJob[Any]], *, connection: AnyConnection = OWN
    ) -> list[Job[Any]]:
        """Defer many jobs, of any tasks, all or none. Returns them in the order of the calls."""
        return submit_many(self.client, check_prepared(calls), connection)

    def chain(
        self, calls: Iterable[PreparedJob[Any]], *, connection: AnyConnection = OWN
    ) -> list[Job[Any]]:
        """Defer jobs, each of which needs the one before it. Returns them in this order."""
        return submit_many(self.client, check_prepared(calls), connection, sql.DEFER_CHAIN)

    def publish(
        self,
        event: str,
        payload: Any = None,
        *,
        retain: dt.timedelta | None = None,
        connection: AnyConnection = OWN,
    ) -> bool:
        """Publish an event, for handlers that wait for it now and those that will while it is kept.

        It is kept for `retain`, 30 days by default. Returns True, or False if an event of this name
        exists: that one then stays as it is.
        """
        text = self.client.codec.dumps({} if payload is None else payload)
        kept = checked_interval("retain", retain)
        parameters = {"event": event, "payload": text, "retain": kept}
        ((is_first,),) = self.client.call(sql.PUBLISH, parameters, connection)
        return bool(is_first)

    def open_group(
        self,
        name: str,
        *,
        on_end: PreparedJob[Any] | None = None,
        on_success: PreparedJob[Any] | None = None,
        on_failure: PreparedJob[Any] | None = None,
        connection: AnyConnection = OWN,
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
        rows = self.client.call(sql.OPEN_GROUP, parameters, connection, tasks=tasks)
        return OpenGroup(self.client, name, bool(rows[0][0]), connection)

    # Asking

    def result(
        self,
        job: int | HasId,
        timeout: float | dt.timedelta | None = None,
    ) -> Any:
        """Wait until a job has succeeded, for at most `timeout` seconds, and return its result.

        Raises JobFailed or JobCancelled if the job ended so, TimeoutError after `timeout`,
        DecodeError if the result can't be decoded, and JobNotFound if there is no such job, or if
        the transaction that defers it has not committed. `Job.result` does the same.
        """
        return self.client.result(job_id(job), timeout)

    def needs(self, job: int | HasId) -> list[Need]:
        """Return the jobs that a job needs, in the order of their ids, with their present states.

        Raises JobNotFound, and DecodeError if a result can't be decoded.
        """
        return needs(self.client, job_id(job))

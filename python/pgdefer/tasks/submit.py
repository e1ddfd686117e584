# Generated from submit_async.py: change that, and run `make generate`.
"""Deferring prepared jobs: every `defer` ends here.

Tests: integration/test_defer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pgdefer.client.client import Client
from pgdefer.database import sql
from pgdefer.database.callers import CallersConnection
from pgdefer.options import defer_parameters
from pgdefer.tasks.deferral import deferring
from pgdefer.tasks.job import Job
from pgdefer.tasks.prepared_job import PreparedJob, jobs_json

__all__ = [
    "submit",
    "submit_group",
    "submit_many",
]

R = TypeVar("R")


def submit(client: Client, call: PreparedJob[R], connection: CallersConnection) -> Job[R]:
    """Defer a job, and return it."""
    with deferring(client, [call]) as deferral:
        parameters = defer_parameters(call.task, call.args, call.options)
        statement = sql.DEFER
        if parameters is None:
            statement = sql.DEFER_WITHOUT_OPTIONS
            parameters = {"task": call.task, "args": call.args}
        rows = client.call(statement, parameters, connection, tasks=[call.task])
        job: Job[R] = Job(rows[0][0], client)
        if deferral is not None:
            deferral.jobs.append(job)
    return job


def submit_many(
    client: Client,
    calls: Sequence[PreparedJob[Any]],
    connection: CallersConnection,
    statement: sql.Statement = sql.DEFER_MANY,
) -> list[Job[Any]]:
    """Defer many jobs, all or none; return them in order.

    With sql.DEFER_CHAIN, each needs the one before it.
    """
    if not calls:
        return []
    tasks = [call.task for call in calls]
    with deferring(client, calls) as deferral:
        parameters = {"jobs": jobs_json(calls)}
        rows = client.call(statement, parameters, connection, tasks=tasks)
        jobs: list[Job[Any]] = [Job(row[0], client) for row in rows]
        if deferral is not None:
            deferral.jobs.extend(jobs)
    return jobs


def submit_group(
    client: Client,
    calls: Sequence[PreparedJob[Any]],
    then: PreparedJob[R],
    connection: CallersConnection,
) -> tuple[Job[R], list[Job[Any]]]:
    """Defer jobs, and one more that needs them all; return that one, then the others."""
    tasks = [call.task for call in [*calls, then]]
    with deferring(client, [*calls, then]) as deferral:
        parameters = {"jobs": jobs_json(calls), "then": then.to_json()}
        rows = client.call(sql.DEFER_GROUP, parameters, connection, tasks=tasks)
        ((id, ids),) = rows
        last: Job[R] = Job(id, client)
        jobs: list[Job[Any]] = [Job(one, client) for one in ids]
        if deferral is not None:
            deferral.jobs.extend([*jobs, last])
    return last, jobs

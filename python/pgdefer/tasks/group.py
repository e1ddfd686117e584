"""Groups: jobs deferred together, and one that follows them all.

Tests: integration/test_groups.py, integration/test_results.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pgdefer.client.client import Client
from pgdefer.database.callers import CallersConnection, check_given
from pgdefer.tasks.job import Job
from pgdefer.tasks.prepared_job import PreparedJob, check_prepared
from pgdefer.tasks.submit import submit_group
from pgdefer.tasks.submit_async import submit_group_async

__all__ = ["Group"]

R = TypeVar("R")


class Group:
    """Jobs that are not deferred yet: `App.group` makes the group, `then` defers it."""

    def __init__(
        self,
        client: Client,
        calls: Iterable[PreparedJob[Any]],
        connection: CallersConnection,
    ) -> None:
        check_given(connection)
        self._client = client
        self._calls = check_prepared(calls)
        self._connection = connection
        #: The jobs, in the order of the calls, once they have been deferred.
        self.jobs: list[Job[Any]] = []

    def then(self, call: PreparedJob[R]) -> Job[R]:
        """Defer the jobs, and one more that needs them all, in addition to its own needs.

        Returns that one.
        """
        (then,) = check_prepared([call])
        job, self.jobs = submit_group(self._client, self._calls, then, self._connection)
        return job

    async def then_async(self, call: PreparedJob[R]) -> Job[R]:
        """Defer the jobs, and one more that needs them all, in addition to its own needs.

        Returns that one.
        """
        (then,) = check_prepared([call])
        job, self.jobs = await submit_group_async(self._client, self._calls, then, self._connection)
        return job

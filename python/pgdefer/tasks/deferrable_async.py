"""Deferring jobs of a task, configured or not.

Tests: integration/test_defer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from pgdefer.tasks.job import Job
from pgdefer.tasks.prepared import Preparer
from pgdefer.tasks.prepared_job import PreparedJob
from pgdefer.tasks.submit_async import submit_async, submit_many_async

__all__ = ["AsyncDeferrable"]

P = ParamSpec("P")
R = TypeVar("R")


class AsyncDeferrable(Preparer[P, R]):
    """Defers jobs of a task, each with the options that were configured."""

    async def defer_async(self, /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Defer a job that calls the task with these arguments.

        It is deferred in a transaction of its own, unless `configure` was given a connection.

        Raises TypeError for arguments that the task does not take, EncodeError for arguments that
        can't be stored, and AlreadyQueued if its queueing_lock is taken.
        """
        call = self.prepare(*args, **kwargs)
        return await submit_async(self.client, call, self._connection)

    async def defer_many_async(
        self, calls: Iterable[PreparedJob[Any] | Mapping[str, Any]]
    ) -> list[Job[R]]:
        """Defer many jobs, all or none. Returns them in the order of the calls.

        Each call is what `prepare` returned, or a dict of keyword arguments.
        """
        prepared = list(self._prepare_all(calls))
        return await submit_many_async(self.client, prepared, self._connection)

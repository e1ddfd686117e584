"""Groups: jobs deferred together, and one that follows them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from ._execute import AnyAsyncConnection, AnyConnection
from ._job import Job
from ._task import Prepared, checked

if TYPE_CHECKING:
    from ._app import App

__all__ = ["Group"]

R = TypeVar("R")


class Group:
    """Jobs that are yet to be deferred: `App.group` makes it, `then` or `defer` defers them."""

    def __init__(
        self,
        app: App,
        calls: Iterable[Prepared[Any]],
        connection: AnyConnection | AnyAsyncConnection | None,
    ) -> None:
        self._app = app
        self._calls = checked(calls)
        self._connection = connection
        #: The jobs, in the order given, once they have been deferred.
        self.jobs: list[Job[Any]] = []

    def then(self, call: Prepared[R]) -> Job[R]:
        """Defer the jobs, and one that needs them all beside what it needs itself; return that."""
        (then,) = checked([call])
        job, self.jobs = self._app.submit_group(self._calls, then, self._connection)
        return job

    async def then_async(self, call: Prepared[R]) -> Job[R]:
        """As `then`, for asyncio."""
        (then,) = checked([call])
        job, self.jobs = await self._app.submit_group_async(self._calls, then, self._connection)
        return job

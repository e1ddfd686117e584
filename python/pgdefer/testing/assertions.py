"""What a test has deferred, and assertions about it.

Tests: integration/test_testing.py.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pgdefer.app import App
from pgdefer.tasks.registry import DjangoTask, task_of
from pgdefer.tasks.task import Task, task_name
from pgdefer.testing.connections import at_once
from pgdefer.testing.jobs import Deferred, DeferredJob, J, arguments, found

__all__ = ["Assertions", "checked_app"]

T = TypeVar("T")


def checked_app(app: App) -> App:
    """Return the App of a test's queue. Raises TypeError for anything else."""
    if not isinstance(app, App):
        raise TypeError(f"app must be an App, not {app!r}")
    return app


class Assertions(Generic[J]):
    """Asks which jobs were deferred, and checks it."""

    app: App

    async def _deferred_jobs(self) -> list[J]:
        """Return the jobs deferred in this test."""
        raise NotImplementedError

    def _at_once(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that waits for nothing, and return its value."""
        return at_once(coroutine)

    def deferred(
        self, task: Task[..., Any] | DjangoTask | str | None = None, /, *args: Any, **kwargs: Any
    ) -> list[J]:
        """Return the jobs deferred in this test, by id, including those that have ended.

        With a task, only its jobs; with arguments, only jobs that have these, and perhaps others.
        """
        return self._at_once(self.deferred_async(task, *args, **kwargs))

    async def deferred_async(
        self, task: Task[..., Any] | DjangoTask | str | None = None, /, *args: Any, **kwargs: Any
    ) -> list[J]:
        """Return the jobs deferred in this test: as `deferred`."""
        jobs = await self._deferred_jobs()
        if task is None:
            return jobs
        known = self._known(task)
        return found(jobs, known, arguments(known, args, kwargs))

    def assert_deferred(
        self, task: Task[..., Any] | DjangoTask | str, /, *args: Any, **kwargs: Any
    ) -> J:
        """Check that a task was deferred with these arguments, and perhaps others.

        Returns the last such job. For the number of jobs use `len(deferred(task, ...))`.
        """
        return self._at_once(self.assert_deferred_async(task, *args, **kwargs))

    async def assert_deferred_async(
        self, task: Task[..., Any] | DjangoTask | str, /, *args: Any, **kwargs: Any
    ) -> J:
        """Check that a task was deferred: as `assert_deferred`."""
        jobs = await self._deferred_jobs()
        known = self._known(task)
        expected = arguments(known, args, kwargs)
        matching = found(jobs, known, expected)
        if not matching:
            wanted = _call_text(task_name(known), expected)
            raise AssertionError(f"{wanted} was not deferred, but\n{_listed(jobs)}")
        return matching[-1]

    def assert_not_deferred(
        self, task: Task[..., Any] | DjangoTask | str | None = None, /, *args: Any, **kwargs: Any
    ) -> None:
        """Check that nothing was deferred: no job, none of a task, or none with these arguments."""
        self._at_once(self.assert_not_deferred_async(task, *args, **kwargs))

    async def assert_not_deferred_async(
        self, task: Task[..., Any] | DjangoTask | str | None = None, /, *args: Any, **kwargs: Any
    ) -> None:
        """Check that nothing was deferred: as `assert_not_deferred`."""
        jobs = await self.deferred_async(task, *args, **kwargs)
        if jobs:
            raise AssertionError(f"deferred:\n{_listed(jobs)}")

    def _known(self, task: Task[..., Any] | DjangoTask | str) -> Task[..., Any] | str:
        """Return a task, or its name."""
        if isinstance(task, str):
            return task
        known = task_of(self.app, task)
        if known is None:
            raise TypeError(f"a task, or its name, is needed, not {task!r}")
        return known


def _call_text(task: str, args: Mapping[str, Any]) -> str:
    return f"{task}({', '.join(f'{name}={value!r}' for name, value in args.items())})"


def _listed(jobs: Sequence[Deferred]) -> str:
    lines = [
        f"  {job.id}: {_call_text(job.task, job.args)}"
        + (f", {job.state}" if isinstance(job, DeferredJob) else "")
        for job in jobs
    ]
    return "\n".join(lines) or "  (nothing)"

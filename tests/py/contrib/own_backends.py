"""The backend as Django's own tests need it: they look into Django's test backends."""

from __future__ import annotations

import threading
from typing import Any

from django.db import connections
from django.tasks import TaskResult

from pgdefer.contrib.django import app
from pgdefer.contrib.django.backend import PgDeferBackend

__all__ = ["Listing", "Running"]


class Listing(PgDeferBackend):
    """Has a list of its results, as DummyBackend has: each is read from the queue."""

    def __init__(self, alias: str, params: Any) -> None:
        super().__init__(alias, params)
        self._ids: list[str] = []

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> TaskResult:
        """Remember the job's id."""
        result = super().enqueue(task, args, kwargs)
        self._ids.append(result.id)
        return result

    @property
    def results(self) -> list[TaskResult]:
        """What was enqueued since the last `clear`."""
        return [self.get_result(id) for id in self._ids]

    def clear(self) -> None:
        """Delete the jobs."""
        while self._ids:
            app.job(int(self._ids.pop())).delete()


class Running(PgDeferBackend):
    """Returns what has ended, as ImmediateBackend does: a worker runs each job at once."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> TaskResult:
        """Run the job."""
        result = super().enqueue(task, args, kwargs)
        if not connections[app.client.alias].in_atomic_block:
            # In a thread, as this one may be the one that runs what coroutines hand to Django.
            worker = threading.Thread(target=app.run_worker, kwargs={"drain": True})
            worker.start()
            worker.join()
        result.refresh()
        return result

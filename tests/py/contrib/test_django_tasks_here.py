"""Django's tasks and results, where the queue's own are taken."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("django.tasks")

from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction
from django.tasks import TaskResultStatus, task
from django.tasks.exceptions import InvalidTask
from django.test import override_settings
from django.utils import timezone

from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Job
from pgdefer.testing import MemoryQueue, TestQueue

pytestmark = pytest.mark.client


@task
def add(a: int, b: int = 1) -> int:
    return a + b


@task(queue_name="mail")
def send(to: str, *rest: Any) -> list[Any]:
    return [to, rest]


def test_results_are_jobs(app: DjangoApp, drain: Callable[..., None]) -> None:
    first = add.enqueue(2)
    then = app.defer(add.module_path, {"a": 3}, needs=[first])
    assert Job.objects.get(id=then.id).needs == [int(first.id)]
    last = add.using(needs=[add.get_result(first.id)]).enqueue(4)
    drain()
    assert (app.job(first).result(0), then.result(0), app.job(last).result(0)) == (3, 4, 5)


def test_tests_know_tasks_of_django(app: DjangoApp) -> None:
    for queue in (TestQueue(app, connection), MemoryQueue(app)):
        with transaction.atomic(), queue:
            add.enqueue(1, b=2)
            send.using(queue_name="other").enqueue("Ann", 3)
            assert queue.assert_deferred(add, 1).args == {"a": 1, "b": 2}
            queue.assert_not_deferred(add, 2)
            assert len(queue.deferred(send.using(priority=1), "Ann", 3)) == 1
            with pytest.raises(AssertionError, match=r"add\(a=9\) was not deferred"):
                queue.assert_deferred(add, 9)
            other = SimpleNamespace(module_path="elsewhere")
            with pytest.raises(TypeError, match="'elsewhere' does not belong to this queue"):
                queue.assert_deferred(other)
            with pytest.raises(TypeError, match="a task, or its name, is needed, not 7"):
                queue.assert_deferred(7)  # type: ignore[arg-type]
            transaction.set_rollback(True)


def test_a_task_of_django_recurs(app: DjangoApp, drain: Callable[..., None]) -> None:
    schedules = dict(app.schedules)
    assert app.recurring("0 6 * * *", name="sums", args={"a": 4})(add) is add
    try:
        with pytest.raises(TypeError, match="the schedule of the task"):
            app.recurring("0 7 * * *")(add)  # a is missing
        with pytest.raises(TypeError, match="PgDeferBackend"):
            app.recurring("0 7 * * *")(SimpleNamespace(module_path="elsewhere"))
        drain()
        call_command("pgdefer", "schedule", "run", "sums")
        drain()
        assert [job.result for job in Job.objects.filter(task=add.module_path)] == [5]
    finally:
        app.schedules.clear()
        app.schedules.update(schedules)


def test_a_task_of_another_backend_is_refused(shop: str) -> None:
    other = {"BACKEND": "django.tasks.backends.dummy.DummyBackend"}
    with override_settings(TASKS={**settings.TASKS, "other": other}):
        elsewhere = task(backend="other")(add.func)
        # In a worker's process it is a task of the other backend, so the job would never run.
        with pytest.raises(InvalidTask, match=r"declare it by @task\(backend='default'\)"):
            elsewhere.using(backend="default")
        assert add.using(backend="other").enqueue(1).status is TaskResultStatus.READY


def test_a_task_runs_after_an_interval(shop: str) -> None:
    hour = dt.timedelta(hours=1)
    never = add.using(run_after=timezone.now() + dt.timedelta(days=9))
    soon = add.using(run_after=dt.timedelta(minutes=1))
    for later in (
        add.using(run_after=hour),
        never.using(run_after=hour),
        soon.using(run_after=hour),
        soon.using(run_after=timezone.now() + hour),
    ):
        result = later.enqueue(1)
        job = Job.objects.get(id=int(result.id))
        after = job.scheduled_at - job.created_at
        assert hour * 0.9 < after < hour * 2

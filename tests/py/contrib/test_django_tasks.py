"""The backend for TASKS, in Django 6 and later."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("django.tasks")

from asgiref.sync import async_to_sync, sync_to_async
from django.core.management import call_command
from django.db import connection, transaction
from django.tasks import TaskContext, TaskResultStatus, task, task_backends
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist, TaskResultMismatch
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.utils import timezone
from shop.models import Order

from pgdefer import AlreadyQueued, EncodeError, Retry, RetryLater
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Job, Task

pytestmark = pytest.mark.client


@task
def add(a: int, b: int = 1) -> int:
    return a + b


@task(priority=5, queue_name="mail", retry=2, lock="to:{to}", deadline=dt.timedelta(hours=1))
def send(to: str, *rest: Any, **more: Any) -> list[Any]:
    return [to, rest, more]


@task(queueing_lock="once", on_conflict="replace", delay=dt.timedelta(days=1), held=True)
def once() -> None:
    """With defaults that do not apply to what moves in."""


@task(takes_context=True, retry={"max_attempts": 3, "base": "0"})
def fail_twice(context: TaskContext, text: str) -> list[Any]:
    if context.attempt < 3:
        raise KeyError(text)
    errors = context.task_result.errors
    return [context.attempt, [error.exception_class.__name__ for error in errors]]


@task
async def write_async(customer: str) -> str:
    return (await Order.objects.acreate(customer=customer, total=1)).customer


@task(transactional=True, retry=Retry(1))
def write_and_fail(row: Order) -> None:
    Order.objects.create(customer="Bob", total=1)
    add.enqueue(1)
    raise ValueError(row.customer)


@task
def yield_once() -> None:
    raise RetryLater("not yet", needs=[int(add.enqueue(2).id)])


def test_all_flags(shop: str) -> None:
    backend = task_backends["default"]
    assert backend.supports_defer
    assert backend.supports_async_task
    assert backend.supports_get_result
    assert backend.supports_priority


def test_a_task_is_enqueued_and_run(shop: str, drain: Callable[..., None]) -> None:
    result = add.enqueue(2, b=3)
    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [2], {"b": 3})
    assert Job.objects.get().args == {"a": 2, "b": 3}
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value
    drain()
    result.refresh()
    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, 5)
    again = add.get_result(result.id)
    assert (again.args, again.kwargs, again.attempts) == ([2], {"b": 3}, 1)
    assert again.enqueued_at < again.started_at == again.last_attempted_at < again.finished_at
    with pytest.raises(TaskResultMismatch):
        send.get_result(result.id)
    assert add.get_result(int(result.id)).id == result.id
    for id in ("7777", "abc", "-1", str(2**70), f" {result.id}", f"0_{result.id}", "\u0661", None):
        with pytest.raises(TaskResultDoesNotExist):
            add.get_result(id)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@task(retry=Retry(2, backoff="constant", base=dt.timedelta(0)))
def answer(kind: str) -> Any:
    Order.objects.create(customer=kind, total=1)
    return {"keys": {(1, 2): 3}, "deep": nested(5000)}[kind]


@task(retry=Retry(2, backoff="constant", base=dt.timedelta(0)))
async def answer_async(kind: str) -> Any:
    return await sync_to_async(answer.func)(kind)


@pytest.mark.parametrize("one", [answer, answer_async])
def test_odd_results_are_no_failures(one: Any, shop: str, drain: Callable[..., None]) -> None:
    given = [one.enqueue(kind) for kind in ("keys", "deep")]
    drain()
    for result in given:
        result.refresh()
        assert (result.status, result.attempts) == (TaskResultStatus.SUCCESSFUL, 1)
    assert given[0].return_value == {(1, 2): 3}
    assert given[1].return_value is None
    assert Order.objects.count() == 2


@task
def same(value: Any) -> Any:
    return value


@pytest.mark.parametrize("value", [b"text", b"\xff", bytearray(b"text")])
def test_bytes_stay_bytes(value: Any, shop: str, drain: Callable[..., None]) -> None:
    result = same.enqueue(value)
    drain()
    result.refresh()
    assert [result.args, result.return_value] == [[value], value]
    assert type(result.return_value) is type(value)


def test_odd_arguments(shop: str) -> None:
    with pytest.raises((EncodeError, RecursionError), match=r"nest|recursion"):
        add.enqueue(nested(100_000))
    assert not Job.objects.exists()
    assert add.enqueue({(1, 2): 3}).args == [{(1, 2): 3}]


def test_a_receivers_error_runs_nothing_again(shop: str, drain: Callable[..., None]) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("receiver")

    task_finished.connect(fail)
    try:
        result = answer.enqueue("keys")
        drain()
    finally:
        task_finished.disconnect(fail)
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.SUCCESSFUL, 1)
    assert Order.objects.count() == 1


@task
def remove(row: Order) -> str:
    row.delete()
    return "removed"


def test_a_result_outlives_the_row_of_its_argument(shop: str, drain: Callable[..., None]) -> None:
    result = remove.enqueue(Order.objects.create(customer="Ann", total=1))
    drain()
    found = remove.get_result(result.id)
    assert (found.status, found.return_value) == (TaskResultStatus.SUCCESSFUL, "removed")
    assert found.kwargs.keys() == {"row"}
    with connection.cursor() as cursor:  # as another client may do
        cursor.execute(
            'select queue.defer(%s, \'{"a": 1}\', options => \'{"headers": {"positional": "x"}}\')',
            [add.module_path],
        )
        ((id,),) = cursor.fetchall()
    assert add.get_result(str(id)).kwargs == {"a": 1}


def test_manual_transactions(shop: str) -> None:
    row = Order.objects.create(customer="Ann", total=1)
    result = remove.enqueue(row)
    transaction.set_autocommit(False)
    try:
        Order.objects.create(customer="Bob", total=2)
        assert remove.get_result(result.id).args == [row]
        later = answer.enqueue("keys")  # the first call here, which registers the task
        transaction.rollback()
        Order.objects.create(customer="Cid", total=3)
        kept = answer.enqueue("keys")
        assert remove.get_result(result.id).args == [row]
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert list(Order.objects.order_by("id").values_list("customer", flat=True)) == ["Ann", "Cid"]
    assert {job.id for job in Job.objects.all()} == {int(result.id), int(kept.id)}
    assert later.id != kept.id


def test_reading_a_result_keeps_the_callers_connection(shop: str) -> None:
    row = Order.objects.create(customer="Ann", total=1)
    result = remove.enqueue(row)
    with connection.cursor() as cursor:
        cursor.execute("create temporary table mine (n int)")
    assert remove.get_result(result.id).args == [row]
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from mine")
        assert cursor.fetchall() == [(0,)]


def test_atomic_decides(shop: str) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        add.enqueue(1)
        raise ZeroDivisionError
    assert not Job.objects.exists()


def test_the_queues_options(shop: str, app: DjangoApp) -> None:
    assert Task.objects.count() == 0
    result = send.using(priority=7, concurrency_key="k", concurrency_limit=1).enqueue("Ann", 1, x=2)
    job = Job.objects.get(id=int(result.id))
    found = (job.priority, job.queue, job.lock, job.concurrency_key)
    assert found == (7, "mail", "to:Ann", "k")
    assert abs(job.deadline - job.created_at - dt.timedelta(hours=1)) < dt.timedelta(minutes=5)
    assert (result.args, result.kwargs) == (["Ann", 1], {"x": 2})
    assert send.get_result(result.id).args == ["Ann", 1]
    assert send.get_result(result.id).kwargs == {"x": 2}
    later = add.using(run_after=timezone.now() + dt.timedelta(hours=1)).enqueue(1)
    assert Job.objects.get(id=int(later.id)).state == "scheduled"
    only = add.using(queueing_lock="only")
    only.enqueue(1)
    with pytest.raises(AlreadyQueued):
        only.enqueue(2)
    with pytest.raises(TypeError, match="no option colour"):
        add.using(colour="red")
    with pytest.raises(TypeError, match="decorator"):
        add.using(run_in="process")
    with pytest.raises(InvalidTask):
        add.using(priority=101)


def test_what_a_task_does_not_take(shop: str) -> None:
    with pytest.raises(TypeError, match="missing"):
        add.enqueue()
    with pytest.raises(TypeError, match="stored"):
        add.enqueue(object())


def test_errors_attempts_and_context(shop: str, drain: Callable[..., None]) -> None:
    result = fail_twice.enqueue("why")
    drain()
    result.refresh()
    assert result.return_value == [3, ["KeyError", "KeyError"]]
    assert result.attempts == 3
    assert [error.exception_class for error in result.errors] == [KeyError, KeyError]
    assert "KeyError: 'why'" in result.errors[0].traceback


def test_a_transactional_task(shop: str, drain: Callable[..., None]) -> None:
    row = Order.objects.create(customer="Ann", total=1)
    result = write_and_fail.enqueue(row)
    drain()
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert result.errors[0].exception_class is ValueError
    assert [order.customer for order in Order.objects.all()] == ["Ann"]
    assert Job.objects.count() == 1


def test_async(shop: str, drain: Callable[..., None]) -> None:
    async def view() -> str:
        return (await write_async.aenqueue("Ann")).id

    id = async_to_sync(view)()
    drain()
    result = async_to_sync(write_async.aget_result)(id)
    assert result.return_value == Order.objects.get().customer == "Ann"


def test_signals(shop: str, drain: Callable[..., None]) -> None:
    seen: list[tuple[str, str, str]] = []

    def receive(name: str) -> Callable[..., None]:
        def receiver(sender: Any, task_result: Any, **_: Any) -> None:
            assert sender is type(task_backends["default"])
            seen.append((name, task_result.task.name, task_result.status.name))

        return receiver

    signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    receivers = {name: receive(name) for name in signals}
    for name, signal in signals.items():
        signal.connect(receivers[name])
    try:
        add.enqueue(1)
        drain(concurrency=1)
        write_and_fail.enqueue(Order.objects.create(customer="Ann", total=1))
        drain(concurrency=1)
        write_async.enqueue("Ann")
        drain(concurrency=1)
    finally:
        for name, signal in signals.items():
            signal.disconnect(receivers[name])
    assert seen == [
        ("enqueued", "add", "READY"),
        ("started", "add", "RUNNING"),
        ("finished", "add", "SUCCESSFUL"),
        ("enqueued", "write_and_fail", "READY"),
        ("started", "write_and_fail", "RUNNING"),
        ("enqueued", "add", "READY"),
        ("finished", "write_and_fail", "FAILED"),
        ("enqueued", "write_async", "READY"),
        ("started", "write_async", "RUNNING"),
        ("finished", "write_async", "SUCCESSFUL"),
    ]


def test_a_yield_is_not_the_end(shop: str, app: DjangoApp) -> None:
    result = yield_once.enqueue()
    app.run_worker(max_jobs=1)
    result.refresh()
    assert result.status == TaskResultStatus.READY
    assert result.errors == []


@pytest.mark.parametrize("origin", ["django-tasks-db", "steady-queue"])
def test_moving_in_without_tables(app: DjangoApp, capsys: Any, origin: str) -> None:
    with pytest.raises(SystemExit):
        call_command("pgdefer", "move-in", origin)
    assert f"the tables of {origin} are not here: relation" in capsys.readouterr().err


def test_moving_in(app: DjangoApp, drain: Callable[..., None], capsys: Any) -> None:
    """Waiting tasks of django-tasks-db, from a table as its migrations make it."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            create table django_tasks_database_dbtaskresult (
              id uuid primary key default gen_random_uuid(), status varchar(10) not null,
              enqueued_at timestamptz not null, started_at timestamptz, finished_at timestamptz,
              args_kwargs jsonb not null, priority integer not null, task_path text not null,
              worker_ids jsonb not null default '[]', queue_name varchar(32) not null,
              backend_name varchar(32) not null default 'default', run_after timestamptz not null,
              return_value jsonb, exception_class_path text not null default '',
              traceback text not null default '');
            insert into django_tasks_database_dbtaskresult
              (status, enqueued_at, args_kwargs, priority, task_path, queue_name, run_after)
            select t.status, now() + t.n * interval '1 s', t.args::jsonb, t.priority,
              %s || '.' || t.task, t.queue, t.after
            from (values
              (1, 'READY', '{"args": [3], "kwargs": {"b": 4}}', 7, 'add', 'default',
                '9999-01-01 00:00+00'),
              (2, 'READY', '{"args": ["Ann", 1], "kwargs": {"x": null}}', 0, 'send', 'mail',
                now() + interval '1 day'),
              (3, 'READY', '{"args": [1], "kwargs": {}}', 0, 'add', 'default', now()),
              (4, 'RUNNING', '{"args": [1], "kwargs": {}}', 0, 'add', 'default', now()),
              (5, 'READY', '{"args": [], "kwargs": {}}', 0, 'once', 'default',
                '9999-01-01 00:00+00'),
              (6, 'READY', '{"args": [], "kwargs": {}}', 0, 'once', 'default', now())
            ) t (n, status, args, priority, task, queue, after)
        """,
            [__name__],
        )
    counts = {"moved": 5, "locked": 0, "scheduled": 1, "behind": 0, "running": 1}
    for option, found in (("--dry-run", 0), ("--json", 5), ("--json", 5)):
        call_command("pgdefer", "move-in", "django-tasks-db", "--json", option)
        assert json.loads(capsys.readouterr().out) == counts
        assert Job.objects.count() == found
        if option == "--json":
            counts |= {"moved": 0, "scheduled": 0}
    first, second, third, *others = Job.objects.order_by("id")
    assert (first.args, first.priority, first.queue) == ({"a": 3, "b": 4}, 7, "default")
    assert (second.state, second.lock, second.queue) == ("scheduled", "to:Ann", "mail")
    drain()
    assert add.get_result(str(first.id)).return_value == 7
    assert add.get_result(str(third.id)).args == [1]
    statuses = [once.get_result(str(job.id)).status for job in others]
    assert statuses == [TaskResultStatus.SUCCESSFUL] * 2
    with connection.cursor() as cursor:
        cursor.execute(
            "select status, traceback from django_tasks_database_dbtaskresult order by enqueued_at"
        )
        left = cursor.fetchall()
        assert left[0] == ("FAILED", f"moved to pgdefer as job {first.id}")
        assert [status for status, _ in left] == ["FAILED"] * 3 + ["RUNNING"] + ["FAILED"] * 2
        cursor.execute(
            "update django_tasks_database_dbtaskresult set status = 'READY', task_path = 'os.path'"
        )
    with pytest.raises(SystemExit):
        call_command("pgdefer", "move-in", "django-tasks-db")
    assert "is no task of this queue" in capsys.readouterr().err
    assert Job.objects.count() == 5
    for args in ('{"args": [], "kwargs": {}}', '{"args": [1, 2, 3], "kwargs": {}}', "[]"):
        with connection.cursor() as cursor:
            cursor.execute(
                "update django_tasks_database_dbtaskresult set task_path = %s, args_kwargs = %s",
                [add.module_path, args],
            )
        with pytest.raises(SystemExit):
            call_command("pgdefer", "move-in", "django-tasks-db")
        assert f"pgdefer: '{add.module_path}' of " in capsys.readouterr().err
    assert Job.objects.count() == 5

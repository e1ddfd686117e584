"""Durable jobs of Django tasks: steps and waits in atomic(), values, and steps' transactions."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, transaction
from shop.models import Order

from pgdefer import JobContext, Retry, StepFailed, current_job
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Attempt, Job

from .conftest import customers, order

pytestmark = [pytest.mark.client, pytest.mark.usefixtures("own_tasks")]

SHORT = dt.timedelta(milliseconds=50)


def until_all_have_ended(app: DjangoApp) -> None:
    """Let a worker run the jobs, also after their sleeps."""
    for _ in range(100):
        app.run_worker(drain=True)
        if not Job.objects.exclude(state__in=["succeeded", "failed", "cancelled"]).exists():
            return
        time.sleep(0.05)
    raise AssertionError([(job.task, job.state, job.reason) for job in Job.objects.all()])


def sleep(app: DjangoApp, job: JobContext) -> None:
    del app
    job.sleep("z", SHORT)


def wait_for(app: DjangoApp, job: JobContext) -> None:
    del app
    job.wait_for("go", timeout=SHORT)


def call(app: DjangoApp, job: JobContext) -> None:
    assert job.call(app.tasks["child"].prepare(2)) == 2


def try_again(app: DjangoApp, job: JobContext) -> None:
    del app

    def fail_once() -> int:
        tried.append(job.id)
        if tried.count(job.id) == 1:
            raise ValueError("once")
        return tried.count(job.id)

    assert job.step("try", fail_once, retry=Retry(3, base=SHORT)) == 2


tried: list[int] = []


@pytest.mark.parametrize("how", [sleep, wait_for, call, try_again])
@pytest.mark.parametrize("kind", ["transactional", "atomic", "coroutine"])
def test_a_wait_in_atomic_ends_the_run(
    app: DjangoApp, how: Callable[[DjangoApp, JobContext], None], kind: str
) -> None:
    tried.clear()

    def write_and_wait() -> None:
        order(current_job().lock or "")
        app.defer("child", {"n": 1})
        how(app, current_job())

    @app.task(name="child")
    def child(n: int) -> int:
        return n

    options: Any = {"transactional": True} if kind == "transactional" else {}

    @app.task(name="wait", lock="L", **options)
    def wait(n: int) -> int:
        if kind == "transactional":
            write_and_wait()
        else:
            with transaction.atomic():
                write_and_wait()
        return n

    @app.task(name="wait_async", lock="L")
    async def wait_async(n: int) -> int:
        def inner() -> None:
            with transaction.atomic():
                write_and_wait()

        await sync_to_async(inner)()
        return n

    task: Any = wait_async if kind == "coroutine" else wait
    jobs = [task.defer(n) for n in range(2)]
    until_all_have_ended(app)
    assert [job.result(0) for job in jobs] == [0, 1]
    assert customers() == ["L", "L"]
    assert not Attempt.objects.filter(outcome="crashed").exists()


SHOWN = """
    select percent::int, message, (select count(*) from queue.read_stream(id, 's'))
    from queue.jobs where id = %s
"""


def test_steps_of_an_atomic_handler_are_kept(app: DjangoApp, shop: str) -> None:
    ran: list[str] = []
    seen: list[Any] = []

    @app.task(name="once", transactional=True, retry=Retry(3, base=dt.timedelta(0)))
    def once() -> str:
        job = current_job()
        value = job.step("once", lambda: ran.append("once") or len(ran))
        job.step("fingerprint", ran.append, "fingerprint", fingerprint="a")
        if job.attempt == 1:
            job.progress(50, "half")
            job.emit("s", 1)
            with psycopg.connect(shop) as other:
                seen.append(other.execute(SHOWN, [job.id]).fetchone())
            raise ValueError("first")
        return f"{value} {len(ran)}"

    job = once.defer()
    app.run_worker(drain=True)
    assert job.result(0) == "1 2"
    assert seen == [(50, "half", 1)]


def test_values_come_back_as_they_were(app: DjangoApp) -> None:
    long, deep = "x" * 70_000, {"k": [1, 2], "w": SHORT}

    @app.task(name="child")
    def child(n: int) -> Any:
        return [n, str(n), {"n": n}, None, SHORT][n]

    @app.task(name="durable", retry=Retry(1))
    def durable() -> Any:
        job = current_job()
        values = [job.step("long", lambda: long), job.step("deep", lambda: deep)]
        values += [job.step("text", lambda: "1"), job.step("none", lambda: None)]
        values += [job.wait_for("go"), job.gather([child.prepare(n) for n in range(5)])]
        job.sleep("z", SHORT)
        job.emit("s", values[1:])
        return values

    @app.task(name="durable_async", retry=Retry(1))
    async def durable_async() -> Any:
        job = current_job()
        values = [await job.step_async("long", lambda: long)]
        values += [await job.step_async("deep", lambda: deep)]
        values += [await job.step_async("text", lambda: "1")]
        values += [await job.step_async("none", lambda: None), await job.wait_for_async("go")]
        values += [await job.gather_async([child.prepare(n) for n in range(5)])]
        await job.sleep_async("z", SHORT)
        await job.emit_async("s", values[1:])
        return values

    jobs = [durable.defer(), durable_async.defer()]
    app.run_worker(drain=True)
    for job in jobs:
        job.signal("go", deep)
    until_all_have_ended(app)
    rest = [deep, "1", None, deep, [0, "1", {"n": 2}, None, SHORT]]
    for job in jobs:
        assert job.result(0) == [long, *rest]
        assert list(job.stream("s")) == [rest]


async def read(stream: Any) -> list[Any]:
    return [value async for value in stream]


def test_json_of_lists(app: DjangoApp) -> None:
    @app.recurring("0 7 * * *", name="daily", args={"n": [1]})
    @app.task(name="count")
    def count(n: list[int]) -> None:
        job = current_job()
        for value in (1, "text", {"n": n}, None):
            job.emit("s", value)
        job.emit("s", [type(app.list_workers()[0].info).__name__])
        job.emit("s", [dict(one.args) for one in app.list_schedules() if one.name == "daily"])

    job = count.defer([2])
    app.run_worker(drain=True)
    expected = [1, "text", {"n": [2]}, None, ["dict"], [{"n": [1]}]]
    assert list(job.stream("s")) == expected
    assert asyncio.run(read(job.stream_async("s"))) == expected
    app.create_queue("mail", paused=True)
    ((until,),) = {(one.paused_until,) for one in app.list_queues() if one.name == "mail"}
    assert until.year == 9999  # PostgreSQL's infinity
    with transaction.atomic():
        assert app.list_jobs()[0].id == job.id


def test_the_orm_is_in_a_steps_transaction(app: DjangoApp) -> None:
    @app.task(name="writes", retry=Retry(1))
    def writes() -> list[bool]:
        job = current_job()
        with contextlib.suppress(ValueError), job.transaction("fails"):
            order("rolled back")
            raise ValueError
        with job.transaction("writes") as own:
            if own is not None:
                order("written")
                own.execute("update shop_order set total = 2")
                app.defer("child", queue="other")
        again = own is None
        with contextlib.suppress(IntegrityError), job.transaction("breaks"):
            Order.objects.create(pk=order("lost").pk, customer="", total=1)
        assert customers() == ["written"]
        job.sleep("z", SHORT)
        with pytest.raises(StepFailed), job.transaction("tries", retry=Retry(1)) as own:
            if own is not None:
                order("lost, too")
                raise ValueError
        return [again, own is None]

    job = writes.defer()
    for _ in range(100):
        app.run_worker(["default"], drain=True)
        if job.state() != "scheduled":
            break
        time.sleep(0.05)
    assert job.result(0) == [True, False]
    assert list(Order.objects.values_list("customer", "total")) == [("written", 2)]
    assert Job.objects.filter(queue="other").count() == 1


def test_a_steps_transaction_in_atomic_is_refused(app: DjangoApp) -> None:
    @app.task(name="nested", transactional=True, retry=Retry(1))
    def nested() -> None:
        with current_job().transaction("t"):
            order()

    nested.defer()
    app.run_worker(drain=True)
    assert "begin it outside of atomic()" in str(Attempt.objects.get().error)
    assert customers() == []

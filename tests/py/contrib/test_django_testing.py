"""The queue in Django's TestCase: every handler uses the test's connection."""

from __future__ import annotations

import contextlib
import datetime as dt
import unittest
from collections.abc import Iterator
from typing import Any, ClassVar

import psycopg
import pytest
from django.db import IntegrityError, connection, connections
from django.test import TestCase
from shop.models import Letter, Order
from shop.tasks import charge

from pgdefer import Retry, current_job
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.tasks.batch import BatchJob
from pgdefer.testing import QueueTestCase, TestQueue

from .conftest import order

pytestmark = pytest.mark.client


@pytest.fixture(autouse=True)
def _tasks(app: DjangoApp) -> Iterator[None]:
    """Tasks of both kinds; forgotten after the test."""
    tasks, defaults = dict(app.tasks), dict(app.client.defaults)

    @app.task(name="pay")
    def pay(row: Order) -> str:
        Order.objects.filter(pk=row.pk).update(state="paid")
        return Order.objects.get(pk=row.pk).state

    @app.task(name="pay_async")
    async def pay_async(row: Order) -> str:
        await Order.objects.filter(pk=row.pk).aupdate(state="paid")
        await app.defer_async("pay", {"row": row})
        return (await Order.objects.aget(pk=row.pk)).state

    @app.task(name="add_all", batch=10)
    def add_all(jobs: list[BatchJob[Any]]) -> list[int]:
        return [Order.objects.count() for _ in jobs]

    @app.task(name="add_all_async", batch=10)
    async def add_all_async(jobs: list[BatchJob[Any]]) -> list[int]:
        return [await Order.objects.acount() for _ in jobs]

    @app.task(name="add_twice", retry=Retry(1))
    def add_twice(caught: bool) -> int:
        job = current_job()
        with contextlib.suppress(IntegrityError if caught else ()), job.transaction("t"):
            Order.objects.create(pk=order().pk, customer="Bob", total=1)
        return Order.objects.count()

    @app.task(name="add_twice_async", retry=Retry(1))
    async def add_twice_async(caught: bool) -> int:
        job = current_job()
        with contextlib.suppress(IntegrityError if caught else ()):
            async with job.transaction_async("t"):
                row = await Order.objects.acreate(customer="Ann", total=7)
                await Order.objects.acreate(pk=row.pk, customer="Bob", total=1)
        return await Order.objects.acount()

    @app.task(name="nap", transactional=True)
    def nap() -> int:
        job = current_job()
        order()
        value = job.step("count", Order.objects.count)
        job.sleep("nap", dt.timedelta(hours=1))
        return value

    yield
    app.tasks.clear()
    app.tasks.update(tasks)
    app.client.defaults.clear()
    app.client.defaults.update(defaults)


class InTestCase(QueueTestCase, TestCase):
    """Handlers of both kinds, in tests of both kinds."""

    __test__ = False  # test_both_kinds runs it
    app: ClassVar[Any] = None

    def queue_connection(self) -> Any:
        return connection

    def test_run(self) -> None:
        row = order()
        job = self.app.defer("pay_async", {"row": row})
        self.queue.run()
        assert job.result(0) == "paid"
        assert [ran.task for ran in self.queue.deferred()] == ["pay_async", "pay"]

    def test_run_batches(self) -> None:
        order()
        names = ("add_all", "add_all_async")
        jobs = [self.app.defer(name, {"n": n}) for name in names for n in range(2)]
        self.queue.run()
        assert [job.result(0) for job in jobs] == [1] * 4

    def test_at_once(self) -> None:
        with self.queue.immediate():
            assert self.app.defer("pay_async", {"row": order()}).result(0) == "paid"

    def test_a_transactional_task_sleeps(self) -> None:
        job = self.app.defer("nap")
        order("Bob")
        assert [one.state for one in self.queue.run()] == ["scheduled"]
        assert Order.objects.count() == 1
        self.queue.travel(hours=1)
        self.queue.run()
        assert job.result(0) == 2
        assert Order.objects.count() == 2

    async def test_a_transactional_task_sleeps_async(self) -> None:
        job = await self.app.defer_async("nap")
        assert [one.state for one in await self.queue.run_async()] == ["scheduled"]
        await self.queue.travel_async(hours=1)
        await self.queue.run_async()
        assert await job.result_async(0) == 1

    def test_a_failed_write(self) -> None:
        for caught in (False, True):
            for name in ("add_twice", "add_twice_async"):
                self.app.defer(name, {"caught": caught})
        ran = self.queue.run(raise_errors=False)
        assert [type(one.error) for one in ran] == [IntegrityError] * 2 + [type(None)] * 2
        assert [one.result for one in ran] == [None, None, 0, 0]
        assert not Order.objects.exists()

    async def test_a_failed_write_async(self) -> None:
        for caught in (False, True):
            for name in ("add_twice", "add_twice_async"):
                await self.app.defer_async(name, {"caught": caught})
        ran = await self.queue.run_async(raise_errors=False)
        assert [type(one.error) for one in ran] == [IntegrityError] * 2 + [type(None)] * 2
        assert not await Order.objects.aexists()

    async def test_run_async(self) -> None:
        row = await Order.objects.acreate(customer="Ann", total=7)
        jobs = [await self.app.defer_async(name, {"row": row}) for name in ("pay", "pay_async")]
        last = await charge.defer_async(row, "Ann")
        await self.queue.run_async()
        assert [await job.result_async(0) for job in jobs] == ["paid", "paid"]
        assert await last.result_async(0) == 7
        assert (await Letter.objects.aget()).text == "Thank you, Ann: 7 EUR."
        await self.queue.assert_deferred_async(charge, row)

    async def test_run_batches_async(self) -> None:
        await Order.objects.acreate(customer="Ann", total=7)
        names = ("add_all", "add_all_async")
        jobs = [await self.app.defer_async(name, {"n": n}) for name in names for n in range(2)]
        await self.queue.run_async()
        assert [await job.result_async(0) for job in jobs] == [1] * 4

    async def test_run_in_an_async_test(self) -> None:
        await self.app.defer_async("pay_async", {"row": 1}, retry=Retry(5))
        with pytest.raises(RuntimeError, match="await run_async"):
            self.queue.run()
        self.queue.assert_deferred("pay_async", row=1)


def test_both_kinds(app: DjangoApp, shop: str) -> None:
    InTestCase.app = app
    loaded = unittest.defaultTestLoader.loadTestsFromTestCase(InTestCase)
    result = unittest.TestResult()
    loaded.run(result)
    assert not result.errors + result.failures, (result.errors + result.failures)[0][1]
    assert result.testsRun == 10
    assert not Order.objects.exists()
    with psycopg.connect(shop) as other:
        assert other.execute("select count(*) from queue.jobs").fetchone() == (0,)


def test_a_transactional_task_on_another_connection(app: DjangoApp, shop: str) -> None:
    with psycopg.connect(shop) as other, TestQueue(app, other) as queue:
        app.defer("shop.tasks.charge", {"order": order(), "customer": "Ann"})
        with pytest.raises(RuntimeError, match=r"give the queue django\.db\.connection"):
            queue.run()
        other.rollback()


async def test_another_thread_has_another_connection(app: DjangoApp, shop: str) -> None:
    here = connections["default"]
    with psycopg.connect(shop) as other:
        here.connection = other
        with TestQueue(app, here) as queue, pytest.raises(RuntimeError, match="another connection"):
            await app.defer_async("pay", {"row": 1})
            await queue.run_async()
        other.rollback()
        here.connection = None

"""Jobs in Django's transactions: nested, in test cases, with a pool, behind pgbouncer."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction
from django.test import SimpleTestCase, TestCase, TransactionTestCase
from psycopg.conninfo import conninfo_to_dict
from shop.models import Letter, Order
from shop.tasks import charge, stamp

from bouncer import PROGRAM, bouncing
from pgdefer import Retry
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Job
from pgdefer.testing import CommittedTestQueue, MemoryQueue, QueueTestCase

from .conftest import order

pytestmark = pytest.mark.client


def tasks() -> list[str]:
    return [job.task for job in Job.objects.order_by("id")]


# Django 6.1 calls it savepoint_create.
begin_savepoint = getattr(transaction, "savepoint_create", transaction.savepoint)


def defer_in_every_way(app: DjangoApp) -> None:
    """Defer in nested blocks, of which some are rolled back; the names say which."""
    with transaction.atomic():
        app.defer("outer")
        with transaction.atomic():
            app.defer("inner")
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                app.defer("lost")
                with transaction.atomic():
                    app.defer("lost, too")
                raise ZeroDivisionError
            with transaction.atomic(savepoint=False):
                app.defer("without savepoint")
        point = begin_savepoint()
        app.defer("rolled back by hand")
        transaction.savepoint_rollback(point)
        point = begin_savepoint()
        app.defer("released by hand")
        transaction.savepoint_commit(point)
        transaction.on_commit(partial(app.defer, "after"))
    with transaction.atomic(durable=True):
        app.defer("durable")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        app.defer("lost with all")
        raise ZeroDivisionError


KEPT = ["outer", "inner", "without savepoint", "released by hand"]


def test_nested_and_durable_blocks(shop: str, app: DjangoApp) -> None:
    defer_in_every_way(app)
    assert tasks() == [*KEPT, "after", "durable"]
    with (
        pytest.raises(RuntimeError, match="durable"),
        transaction.atomic(),
        transaction.atomic(durable=True),
    ):
        pass
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        app.defer("marked", queueing_lock="only")
        transaction.set_rollback(True)
        raise ZeroDivisionError
    assert app.defer("not marked", queueing_lock="only").state() == "ready"


class InTestCase(QueueTestCase, TestCase):
    """As a project would write it: all of it is rolled back."""

    __test__ = False  # test_djangos_test_cases runs it
    app: ClassVar[Any] = None

    def queue_connection(self) -> Any:
        return connection

    def test_blocks(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            defer_in_every_way(self.app)
        assert tasks() == [*KEPT, "durable", "after"]

    def test_handlers(self) -> None:
        job = charge.defer(order(), "Ann")
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            charge.defer(order(), "nobody")
            raise ZeroDivisionError
        self.queue.assert_deferred(charge)
        self.queue.run()
        assert job.result(0) == 7
        assert Order.objects.get().state == "charged"
        assert Letter.objects.get().text == "Thank you, Ann: 7 EUR."

    def test_a_handler_that_fails(self) -> None:
        failed = stamp.defer("no order")
        self.queue.run(raise_errors=False)
        assert failed.state() in ("scheduled", "failed")
        assert Letter.objects.count() == 0
        order()
        stamp.defer("one")
        self.queue.run()
        assert Letter.objects.get().text == "one"

    def test_at_once(self) -> None:
        with self.queue.immediate():
            job = charge.defer(order(), "Ann")
            assert job.result(0) == 7
            assert async_to_sync(charge.defer_async)(order(), "Bob").result(0) == 7
            with transaction.atomic():
                assert charge.defer_with(connection, order(), "Cid").result(0) == 7
        assert Letter.objects.count() == 3

    def test_without_the_database(self) -> None:
        with MemoryQueue(self.app) as queue:
            self.app.defer("recorded")
        assert [job.task for job in queue.deferred()] == ["recorded"]
        assert tasks() == []


class InPlainTestCase(TestCase):
    """Jobs are deferred, and none runs."""

    __test__ = False  # test_djangos_test_cases runs it
    app: ClassVar[Any] = None

    def test_only_the_projects_functions_wait_for_the_commit(self) -> None:
        with self.captureOnCommitCallbacks() as waiting:
            charge.defer(order(), "Ann")
            transaction.on_commit(order)
        assert waiting == [order]

    def test_deferred_by_on_commit(self) -> None:
        with self.captureOnCommitCallbacks(execute=True) as waiting, transaction.atomic():
            transaction.on_commit(partial(charge.defer, order(), "Ann"))
        assert len(waiting) == 1
        assert tasks() == [charge.name]


class InSimpleTestCase(SimpleTestCase):
    """There is no database, which Django checks."""

    __test__ = False  # test_djangos_test_cases runs it
    app: ClassVar[Any] = None

    def test_recorded(self) -> None:
        with MemoryQueue(self.app) as queue:
            assert stamp.defer("Ann").id == 1
            assert async_to_sync(stamp.defer_async)("Bob").id == 2
            assert stamp.defer_with(connection, "Cid").id == 3
        assert [job.args for job in queue.deferred(stamp)][1:] == [{"text": "Bob"}, {"text": "Cid"}]

    def test_batches(self) -> None:
        with MemoryQueue(self.app) as queue:
            self.app.defer_many([stamp.prepare("Ann"), stamp.prepare("Bob")])
        assert len(queue.deferred(stamp)) == 2


class InTransactionTestCase(TransactionTestCase):
    """Jobs are committed, and a worker runs them."""

    __test__ = False  # test_djangos_test_cases runs it
    app: ClassVar[Any] = None

    def test_blocks(self) -> None:
        with CommittedTestQueue(self.app) as queue:
            defer_in_every_way(self.app)
            assert tasks() == [*KEPT, "after", "durable"]
            assert len(queue.deferred()) == 6
        assert tasks() == []

    def test_handlers(self) -> None:
        with CommittedTestQueue(self.app) as queue:
            job = charge.defer(order(), "Ann")
            queue.run()
            assert job.result(60) == 7
            assert Letter.objects.count() == 1


@pytest.mark.parametrize(
    "case", [InTestCase, InPlainTestCase, InSimpleTestCase, InTransactionTestCase]
)
def test_djangos_test_cases(shop: str, app: DjangoApp, case: type[unittest.TestCase]) -> None:
    case.app = app  # type: ignore[attr-defined]
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert [text for _, text in (*result.errors, *result.failures)] == []
    assert result.testsRun >= 2
    assert not Job.objects.exists()
    assert not Order.objects.exists()


@contextlib.contextmanager
def reconnected(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[None]:
    """Have Django connect with other settings."""
    connections["default"].close()
    with monkeypatch.context() as patch:
        for key, value in changes.items():
            patch.setitem(connections.settings["default"], key, value)
        del connections["default"]
        try:
            yield
        finally:
            connections.close_all()
            connections["default"].close_pool()  # type: ignore[attr-defined]
    del connections["default"]


def run_orders(app: DjangoApp) -> None:
    """Defer in every way, and let a worker run an order's jobs."""
    defer_in_every_way(app)
    assert tasks() == [*KEPT, "after", "durable"]
    for id in Job.objects.values_list("id", flat=True):
        app.job(id).delete()
    jobs = [charge.defer(order(name), name) for name in ("Ann", "Bob", "Cid")]
    app.run_worker(drain=True, concurrency=3)
    assert [job.result(60) for job in jobs] == [7, 7, 7]
    assert set(Order.objects.values_list("state", flat=True)) == {"charged"}
    assert Letter.objects.count() == 3


def test_psycopgs_pool(shop: str, app: DjangoApp, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"pool": {"min_size": 1, "max_size": 8, "timeout": 60}}
    with reconnected(monkeypatch, OPTIONS=options, CONN_MAX_AGE=0):
        run_orders(app)
        pool = connections["default"].pool  # type: ignore[attr-defined]
        # None of the worker's threads has kept one.
        connections.close_all()
        stats = pool.get_stats()
        assert stats["pool_available"] == stats["pool_size"]
        assert stats.get("requests_errors", 0) == 0


def test_without_autocommit(
    app: DjangoApp,
    own_tasks: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    @app.task(name="by hand", retry=Retry(1))
    def by_hand(closes: bool) -> None:
        order("by hand")
        transaction.commit()
        if closes:
            connection.connection.close()  # type: ignore[union-attr]

    @app.task(name="in a block", retry=Retry(1), transactional=True)
    def in_a_block(one: Order, fails: bool) -> None:
        one.state = "charged"
        one.save()
        if fails:
            raise ZeroDivisionError

    with reconnected(monkeypatch, AUTOCOMMIT=False, CONN_MAX_AGE=None):
        jobs = [by_hand.defer(closes) for closes in (True, False)]
        jobs += [in_a_block.defer(order(name), name == "Cid") for name in ("Ann", "Bob", "Cid")]
        jobs += [by_hand.defer(False)]
        transaction.commit()
        app.run_worker(drain=True, concurrency=1)
        assert [job.state() for job in jobs] == [*["succeeded"] * 4, "failed", "succeeded"]
        assert Order.objects.filter(customer="by hand").count() == 3
        assert Order.objects.filter(state="charged").count() == 2
        transaction.rollback()
    assert not [record for record in caplog.records if "left" in record.message]


@pytest.mark.skipif(PROGRAM is None, reason="there is no pgbouncer here")
def test_pgbouncer_in_transaction_mode(
    shop: str, app: DjangoApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.source, "pgbouncer", True)
    with bouncing(shop) as bouncer:
        info = conninfo_to_dict(bouncer.dsn)
        through = {"HOST": info["host"], "PORT": info["port"], "USER": info["user"]}
        with reconnected(monkeypatch, DISABLE_SERVER_SIDE_CURSORS=True, **through):
            run_orders(app)

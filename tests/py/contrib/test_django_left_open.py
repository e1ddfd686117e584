"""What a handler leaves on Django's connections: a job that loses its writes fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from shop.models import Order

from pgdefer import JobContext, Retry, RetryLater
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Job
from pgdefer.tasks.batch import BatchJob

from .conftest import customers, order

pytestmark = [pytest.mark.client, pytest.mark.usefixtures("own_tasks")]

LOST = (
    "PgDeferError: the handler left a transaction open on the database 'default': "
    "it is rolled back, and may have written"
)


def ends() -> list[tuple[str, str | None]]:
    return list(Job.objects.order_by("id").values_list("state", "error"))


def no_autocommit() -> None:
    transaction.set_autocommit(False)


def open_block() -> None:
    transaction.atomic().__enter__()


def broken_block() -> None:
    transaction.atomic().__enter__()
    with contextlib.suppress(Exception), connection.cursor() as cursor:
        cursor.execute("select 1/0")


def closed_block() -> None:
    open_block()
    order("closed")
    connection.close()


def begin() -> None:
    with connection.cursor() as cursor:
        cursor.execute("begin")


WAYS = [no_autocommit, open_block, broken_block, closed_block, begin]


@pytest.fixture(autouse=True, params=["closing", "persistent", "pool"])
def kept(
    request: pytest.FixtureRequest, shop: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """How Django keeps connections."""
    settings = connections.settings["default"]
    if request.param == "persistent":
        monkeypatch.setitem(settings, "CONN_MAX_AGE", None)
    if request.param == "pool":
        monkeypatch.setitem(settings, "OPTIONS", {"pool": {"min_size": 1, "max_size": 20}})
    yield request.param
    connections.close_all()
    connection.close_pool()  # type: ignore[attr-defined]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
def test_the_next_jobs_find_a_good_connection(
    app: DjangoApp,
    drain: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    leave: Callable[[], None],
) -> None:
    @app.task(name="leaves", retry=Retry(1))
    def leaves() -> None:
        leave()
        if leave not in (broken_block, closed_block):
            Order.objects.count()
        raise ValueError("as it is")

    @app.task(name="writes", retry=Retry(1))
    def writes() -> None:
        order("plain")

    @app.task(name="writes_once", retry=Retry(1), transactional=True)
    def writes_once() -> None:
        order("transactional")

    first = leaves.defer()
    writes.defer()
    writes_once.defer()
    with caplog.at_level(logging.WARNING, "pgdefer.worker"):
        drain(concurrency=1)
    assert ends() == [("failed", "ValueError: as it is"), ("succeeded", None), ("succeeded", None)]
    assert customers() == ["plain", "transactional"]
    text = "the connection to the database 'default' is closed, as it was left "
    (said,) = [record for record in caplog.records if text in record.getMessage()]
    assert (said.id, said.task) == (first.id, "leaves")  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["return", "later"])
@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
def test_a_job_whose_writes_are_lost_has_failed(
    app: DjangoApp, drain: Callable[..., None], leave: Callable[[], None], how: str
) -> None:
    @app.task(name="leaves", retry=Retry(1))
    def leaves() -> None:
        leave()
        if leave not in (broken_block, closed_block):
            order("lost")
        if how == "later":
            raise RetryLater

    leaves.defer()
    drain(concurrency=1)
    assert ends() == [("failed", LOST)]
    assert customers() == []


def test_locked_rows_may_have_been_written(app: DjangoApp, drain: Callable[..., None]) -> None:
    @app.task(name="locks", retry=Retry(1))
    def locks() -> None:
        order("kept")
        transaction.set_autocommit(False)
        Order.objects.select_for_update().get()

    locks.defer()
    drain(concurrency=1)
    assert ends() == [("failed", LOST)]
    assert customers() == ["kept"]


def test_a_job_that_has_lost_nothing_has_succeeded(
    app: DjangoApp, drain: Callable[..., None]
) -> None:
    @app.task(name="reads", retry=Retry(1))
    def reads() -> None:
        order("before")
        transaction.set_autocommit(False)
        Order.objects.count()

    @app.task(name="commits", retry=Retry(1))
    def commits() -> None:
        transaction.set_autocommit(False)
        order("committed")
        transaction.commit()

    reads.defer()
    commits.defer()
    reads.defer()
    drain(concurrency=1)
    assert ends() == [("succeeded", None)] * 3
    assert customers() == ["before", "before", "committed"]


def test_without_autocommit_a_read_leaves_nothing(
    app: DjangoApp,
    drain: Callable[..., None],
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sessions = []

    @app.task(name="reads", retry=Retry(1))
    def reads() -> None:
        assert not connection.get_autocommit()
        Order.objects.count()
        sessions.append(connection.connection.info.backend_pid)

    @app.task(name="commits", retry=Retry(1))
    def commits() -> None:
        order("committed")
        transaction.commit()

    @app.task(name="raises", retry=Retry(1))
    def raises() -> None:
        order("lost")
        raise ValueError("as it is")

    @app.task(name="writes", retry=Retry(1))
    def writes() -> None:
        order("lost")

    for task in (reads, commits, raises, writes, reads):
        task.defer()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "pgdefer.worker"):
        patch.setitem(connections.settings["default"], "AUTOCOMMIT", False)
        drain(concurrency=1)
    succeeded = ("succeeded", None)
    failed = ("failed", "ValueError: as it is")
    assert ends() == [succeeded, succeeded, failed, ("failed", LOST), succeeded]
    assert customers() == ["committed"]
    assert "is closed, as it was left" not in caplog.text
    if kept != "pool":
        assert len(set(sessions)) == (1 if kept == "persistent" else 2)


def test_a_coroutine_fails_too(app: DjangoApp, drain: Callable[..., None]) -> None:
    @app.task(name="leaves", retry=Retry(1))
    async def leaves() -> None:
        await sync_to_async(open_block)()
        await Order.objects.acreate(customer="lost", total=1)

    @app.task(name="writes", retry=Retry(1))
    async def writes() -> None:
        await Order.objects.acreate(customer="kept", total=1)

    leaves.defer()
    writes.defer()
    drain(concurrency=1)
    assert ends() == [("failed", LOST), ("succeeded", None)]
    assert customers() == ["kept"]


@pytest.mark.parametrize("is_async", [False, True])
def test_all_jobs_of_a_batch_fail(
    app: DjangoApp, drain: Callable[..., None], is_async: bool
) -> None:
    batch_task: Any = app.task

    def leave() -> None:
        open_block()
        order("lost")

    if is_async:

        @batch_task(name="batch", retry=Retry(1), batch=10)  # type: ignore[untyped-decorator]
        async def batch_async(jobs: list[BatchJob[Any]]) -> None:
            del jobs
            await sync_to_async(leave)()

    else:

        @batch_task(name="batch", retry=Retry(1), batch=10)  # type: ignore[untyped-decorator]
        def batch(jobs: list[BatchJob[Any]]) -> None:
            del jobs
            leave()

    for _ in range(3):
        app.defer("batch")
    drain(concurrency=10)
    assert ends() == [("failed", LOST)] * 3
    assert customers() == []


def test_a_batch_waits_once_for_its_thread(app: DjangoApp, drain: Callable[..., None]) -> None:
    batch_task: Any = app.task
    may_end = threading.Event()
    left = []

    @batch_task(name="batch", retry=Retry(1), batch=10)  # type: ignore[untyped-decorator]
    async def batch(jobs: list[BatchJob[Any]]) -> None:
        left.append(asyncio.ensure_future(sync_to_async(may_end.wait)(60)))
        await asyncio.sleep(0)

    for _ in range(10):
        app.defer("batch")
    try:
        drain(concurrency=10)
    finally:
        may_end.set()
    assert ends() == [("succeeded", None)] * 10
    assert len(left) == 1
    (job, *_) = Job.objects.all()
    assert (job.finished_at - job.started_at).total_seconds() < 5


def test_a_block_of_a_middleware_is_not_the_handlers(
    app: DjangoApp, drain: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    batch_task: Any = app.task

    @contextlib.contextmanager
    def around(_job: JobContext) -> Iterator[None]:
        with transaction.atomic():
            yield

    @batch_task(name="batch", retry=Retry(1), batch=10, middleware=[around])  # type: ignore[untyped-decorator]
    def batch(jobs: list[BatchJob[Any]]) -> None:
        order(f"of {len(jobs)}")

    for _ in range(3):
        app.defer("batch")
    with caplog.at_level(logging.WARNING, "pgdefer.worker"):
        drain(concurrency=10)
    assert ends() == [("succeeded", None)] * 3
    assert customers() == ["of 3"]
    assert not [record for record in caplog.records if "connection" in record.getMessage()]


@contextlib.asynccontextmanager
async def around_async(_job: JobContext) -> AsyncIterator[None]:
    block = transaction.atomic()
    await sync_to_async(block.__enter__)()
    yield
    await sync_to_async(block.__exit__)(None, None, None)


@contextlib.asynccontextmanager
async def around_first(job: JobContext) -> AsyncIterator[None]:
    """Leave a block open around one job, in which the others have none."""
    if isinstance(job, BatchJob) and job.args["number"] == 0:
        await sync_to_async(open_block)()
        await Order.objects.acreate(customer="lost", total=1)
    yield


@pytest.mark.parametrize("around", [around_async, around_first], ids=lambda way: way.__name__)
def test_a_block_of_a_middleware_is_not_the_coroutines(
    app: DjangoApp, drain: Callable[..., None], around: Any
) -> None:
    batch_task: Any = app.task

    @batch_task(name="batch", retry=Retry(1), batch=10, middleware=[around])  # type: ignore[untyped-decorator]
    async def batch(jobs: list[BatchJob[Any]]) -> None:
        if around is around_async:
            await Order.objects.acreate(customer=f"of {len(jobs)}", total=1)

    for number in range(3):
        app.defer("batch", {"number": number})
    drain(concurrency=10)
    succeeded = ("succeeded", None)
    first = ("failed", LOST) if around is around_first else succeeded
    assert ends() == [first, succeeded, succeeded]
    assert customers() == (["of 3"] if around is around_async else [])


def test_a_transactional_handler_may_leave_no_block(
    app: DjangoApp, drain: Callable[..., None]
) -> None:
    @app.task(name="leaves", retry=Retry(1), transactional=True)
    def leaves() -> None:
        open_block()
        order("lost")

    @app.task(name="writes_once", retry=Retry(1), transactional=True)
    def writes_once() -> None:
        order("kept")

    leaves.defer()
    writes_once.defer()
    drain(concurrency=1)
    assert ends() == [
        ("failed", "PgDeferError: the handler has left a block of atomic() open"),
        ("succeeded", None),
    ]
    assert customers() == ["kept"]


def test_a_stream_leaves_the_transaction_of_its_thread_alone(app: DjangoApp) -> None:
    app.defer("t")
    with app.stream_jobs(drain=True) as jobs, transaction.atomic():
        order("before")
        for job in jobs:
            with job:
                order("within")
    assert customers() == ["before", "within"]
    assert [state for state, _ in ends()] == ["succeeded"]


def test_an_asynchronous_stream(app: DjangoApp) -> None:
    async def consume() -> None:
        async with app.stream_jobs(drain=True) as jobs:
            async for job in jobs:
                with job:
                    await sync_to_async(order)("within")

    app.defer("t")
    asyncio.run(consume())
    assert customers() == ["within"]

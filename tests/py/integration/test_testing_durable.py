"""pgdefer.testing runs durable jobs: they wait and continue within the test's transaction."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import psycopg
import pytest

from pgdefer import App, Retry, current_job
from pgdefer.testing import TestQueue

pytestmark = pytest.mark.client


class Shop:
    """Tasks with steps and waits; `calls` has the steps that have run."""

    def __init__(self, dsn: str) -> None:
        self.app = app = App(dsn, name="shop")
        self.calls: list[str] = []

        @app.task(name="refund")
        def refund(amount: int) -> str:
            job = current_job()
            job.step("weigh", self.calls.append, "weigh")
            answer = job.wait_for("approval", timeout=dt.timedelta(days=7))
            return f"{amount}, says {answer['by']}"

        @app.task(name="refund_async")
        async def refund_async(amount: int) -> str:
            job = current_job()
            await job.step_async("weigh", self.calls.append, "weigh")
            answer = await job.wait_for_async("approval")
            return f"{amount}, says {answer['by']}"

        @app.task(name="asks")
        def asks() -> str:
            return current_job().step("bank", self.bank, retry=Retry(3))

        self.refund, self.refund_async, self.asks = refund, refund_async, asks

    def bank(self) -> str:
        self.calls.append("bank")
        if len(self.calls) < 3:
            raise ConnectionError("the bank does not answer")
        return "paid"


@pytest.fixture
def shop(dsn: str) -> Iterator[Shop]:
    shop = Shop(dsn)
    yield shop
    shop.app.close()


@pytest.fixture
def queue(shop: Shop, dsn: str) -> Iterator[TestQueue]:
    with psycopg.connect(dsn) as connection:
        with TestQueue(shop.app, connection) as queue:
            yield queue
        connection.rollback()


def test_a_job_waits_for_a_signal(shop: Shop, queue: TestQueue) -> None:
    job = shop.refund.defer(50)
    assert [(ran.state, ran.error) for ran in queue.run()] == [("waiting", None)]
    assert queue.run() == []
    shop.app.job(job).signal("approval", {"by": "Ann"})
    assert [ran.result for ran in queue.run()] == ["50, says Ann"]
    assert shop.calls == ["weigh"]


async def test_a_coroutine_waits_for_a_signal(shop: Shop, queue: TestQueue) -> None:
    job = await shop.refund_async.defer_async(50)
    assert [ran.state for ran in await queue.run_async()] == ["waiting"]
    await shop.app.job(job).signal_async("approval", {"by": "Ann"})
    assert [ran.result for ran in await queue.run_async()] == ["50, says Ann"]
    assert shop.calls == ["weigh"]


def test_a_coroutine_in_a_loop_of_its_own(shop: Shop, queue: TestQueue) -> None:
    job = shop.refund_async.defer(50)
    assert [ran.state for ran in queue.run()] == ["waiting"]
    shop.app.job(job).signal("approval", {"by": "Ann"})
    assert [ran.result for ran in queue.run()] == ["50, says Ann"]


def test_a_step_is_tried_again(shop: Shop, queue: TestQueue) -> None:
    shop.asks.defer()
    assert queue.run()[-1].result == "paid"
    assert shop.calls == ["bank"] * 3

"""Sentry's transactions of runs, as its SDK would send them."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.integrations.logging import LoggingIntegration

from pgdefer import App, Retry, current_job
from pgdefer.contrib import sentry

pytestmark = pytest.mark.client


Sent = tuple[list[Any], list[Any]]


@pytest.fixture
def init() -> Iterator[Callable[..., Sent]]:
    """Start the SDK; return the lists of transactions and of other events that it sends."""

    def start(**options: Any) -> Sent:
        transactions: list[Any] = []
        events: list[Any] = []
        sentry_sdk.init(
            "http://key@127.0.0.1:1/1",
            before_send=lambda event, _: events.append(event),
            before_send_transaction=lambda event, _: transactions.append(event),
            default_integrations=False,
            integrations=[LoggingIntegration()],
            shutdown_timeout=0,
            **options,
        )
        return transactions, events

    yield start
    sentry_sdk.get_client().close(timeout=0)
    sentry_sdk.get_global_scope().set_client(None)


def test_a_run_is_a_transaction_in_the_trace_of_its_job(
    app: App, init: Callable[..., Sent]
) -> None:
    transactions, _ = init(traces_sample_rate=1.0)
    sentry.instrument(app)

    @app.task(name="adds", queue="sums")
    def adds() -> None:
        with sentry_sdk.start_span(op="db", name="select"):
            pass

    @app.task(name="adds_async", queue="sums")
    async def adds_async() -> None:
        with sentry_sdk.start_span(op="db", name="select"):
            pass

    with sentry_sdk.start_transaction(name="request") as request:
        jobs = [adds.defer(), adds_async.defer()]
    app.run_worker(drain=True)
    runs = {one["transaction"]: one for one in transactions if one["transaction"] != "request"}
    assert set(runs) == {"adds", "adds_async"}
    for run in runs.values():
        trace = run["contexts"]["trace"]
        assert trace["trace_id"] == request.trace_id
        assert trace["parent_span_id"] == request.span_id
        assert (trace["op"], trace["status"]) == ("queue.process", "ok")
        assert run["transaction_info"] == {"source": "task"}
        assert [span["op"] for span in run["spans"]] == ["db"]
    data = runs["adds"]["contexts"]["trace"]["data"]
    assert data["messaging.message.id"] == str(jobs[0].id)
    assert data["messaging.destination.name"] == "sums"
    assert data["messaging.message.retry.count"] == 0
    assert 0 <= data["messaging.message.receive.latency"] < 600_000
    assert runs["adds"]["contexts"]["pgdefer"]["id"] == jobs[0].id


def test_headers_that_continue_no_trace_fail_no_run(app: App, init: Callable[..., Sent]) -> None:
    """Any producer may write them."""
    transactions, events = init(traces_sample_rate=1.0)
    sentry.instrument(app)

    @app.task(name="works")
    def works(*, fails: bool) -> None:
        if fails:
            raise ValueError

    parent = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1"
    for headers in (
        {"sentry-task-enqueued-time": 10**400},
        {"sentry-trace": parent, "baggage": "sentry-sample_rate=1e400"},
    ):
        for fails in (False, True):
            works.configure(headers=headers).defer(fails=fails)
    app.run_worker(drain=True)
    ends = [one["contexts"]["trace"]["status"] for one in transactions]
    assert sorted(ends) == ["internal_error", "internal_error", "ok", "ok"]
    assert [event["exception"]["values"][0]["type"] for event in events] == ["ValueError"] * 2


def test_failures_and_sleeps(app: App, init: Callable[..., Sent]) -> None:
    transactions, events = init(traces_sample_rate=1.0)
    sentry.instrument(app)

    @app.task(name="flaky", retry=Retry(2, backoff="constant", base=dt.timedelta(0)))
    def flaky() -> None:
        raise ValueError

    @app.task(name="sleeps")
    def sleeps() -> None:
        current_job().sleep("nap", dt.timedelta(milliseconds=1))

    flaky.defer()
    sleeps.defer()
    app.run_worker(drain=True)
    ends: dict[str, list[Any]] = {"flaky": [], "sleeps": []}
    for one in transactions:
        trace = one["contexts"]["trace"]
        retries = trace["data"]["messaging.message.retry.count"]
        ends[one["transaction"]].append((retries, trace["status"]))
    assert ends["flaky"] == [(0, "internal_error"), (1, "internal_error")]
    assert {status for _, status in ends["sleeps"]} == {"ok"}
    assert len(ends["sleeps"]) == 2
    (event,) = events
    traces = {
        one["contexts"]["trace"]["trace_id"]
        for one in transactions
        if one["transaction"] == "flaky"
    }
    assert traces == {event["contexts"]["trace"]["trace_id"]}


def test_without_tracing_nothing_is_added(app: App, init: Callable[..., Sent]) -> None:
    transactions, _ = init()
    sentry.instrument(app)

    @app.task(name="adds")
    def adds() -> dict[str, Any]:
        return dict(current_job().headers)

    job = adds.defer()
    app.run_worker(drain=True)
    assert job.result(60) == {}
    assert transactions == []


def test_what_django_logs_of_a_run_is_not_reported(app: App, init: Callable[..., Sent]) -> None:
    _, events = init()
    sentry.instrument(app)

    @app.task(name="fails", retry=Retry(1))
    def fails() -> None:
        try:
            raise ValueError
        except ValueError:
            logging.getLogger("django.tasks").exception("as its backends do")
            raise

    fails.defer()
    app.run_worker(drain=True)
    logging.getLogger("django.tasks").error("of another backend")
    assert [event.get("logger") for event in events] == [None, "django.tasks"]

"""OpenTelemetry, Prometheus, Sentry and probes, each read by its own package."""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import prometheus_client
import psycopg
import pytest
import sentry_sdk
from opentelemetry import trace
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.integrations.logging import LoggingIntegration

from pgdefer import App, JobContext, PgDeferError, RetryLater, Worker, current_job
from pgdefer.contrib import otel, prometheus, sentry
from pgdefer.worker.probes import Probes

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client


async def test_spans_and_metrics(app: App, jobs: Jobs) -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(app, tracer_provider=tracers, meter_provider=meters)
    tracer = tracers.get_tracer("test")

    @app.task(name="child", queue="q")
    def child() -> None: ...

    @app.task(name="flaky", retry=2)
    async def flaky() -> None:
        if not exporter.get_finished_spans() or all(
            span.name != "process flaky" for span in exporter.get_finished_spans()
        ):
            raise ValueError("no")
        await child.defer_async()

    with tracer.start_as_current_span("request") as request:
        job = await flaky.defer_async()
    async with running(app):
        await jobs.end(job.id)
        await jobs.end()
    spans = exporter.get_finished_spans()
    by_name: dict[str, list[Any]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    (created,) = by_name["create flaky"]
    first, second = sorted(by_name["process flaky"], key=lambda span: span.start_time)
    (child_run,) = by_name["process child"]
    trace_id = request.get_span_context().trace_id
    assert created.context.trace_id == first.context.trace_id == trace_id
    assert first.parent.span_id == created.context.span_id
    assert second.parent is None
    assert second.links[0].context.span_id == created.context.span_id
    assert child_run.context.trace_id == second.context.trace_id
    assert first.status.status_code.name == "ERROR"
    assert second.attributes["messaging.message.id"] == str(job.id)
    assert second.attributes["pgdefer.attempt"] == 2
    assert child_run.attributes["messaging.destination.name"] == "q"
    (sent,) = by_name["defer flaky"]
    assert sent.attributes["messaging.message.id"] == str(job.id)
    data: Any = reader.get_metrics_data()
    names = {
        metric.name: metric.data.data_points
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert sum(point.value for point in names["messaging.client.sent.messages"]) == 2
    assert sum(point.value for point in names["messaging.client.consumed.messages"]) == 3
    errors = [point.attributes.get("error.type") for point in names["messaging.process.duration"]]
    assert sorted(map(str, errors)) == ["None", "None", "ValueError"]
    # In seconds: the SDK's own boundaries would put all runs of up to 5 s into one bucket.
    bounds = {tuple(point.explicit_bounds) for point in names["messaging.process.duration"]}
    assert {some[:3] for some in bounds} == {(0.005, 0.01, 0.025)}
    tracers.shutdown()
    meters.shutdown()


class MuteError(ValueError):
    """An error whose text can't be made."""

    def __str__(self) -> str:
        raise LookupError


async def test_an_error_without_a_text_is_still_the_jobs(app: App, jobs: Jobs) -> None:
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(app, tracer_provider=tracers, meter_provider=NoOpMeterProvider())

    @app.task(name="mute", retry=2, give_up_on=MuteError)
    async def mute() -> None:
        raise MuteError

    async with running(app):
        await jobs.end((await mute.defer_async()).id)
    assert [row["error"].partition(":")[0] for row in jobs.attempts()] == ["MuteError"]
    (span,) = [one for one in exporter.get_finished_spans() if one.name == "process mute"]
    (event,) = span.events
    assert event.attributes is not None
    text = "(its text could not be made: LookupError)"
    assert event.attributes["exception.message"] == text
    assert span.status.description == f"MuteError: {text}"


async def test_sample(app: App, jobs: Jobs) -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(app, tracer_provider=tracers, meter_provider=meters, sample=0)
    tracer = tracers.get_tracer("test")
    seen: list[trace.SpanContext] = []
    again: list[trace.SpanContext] = []

    @app.task(name="looks")
    async def looks() -> None:
        seen.append(trace.get_current_span().get_span_context())
        with tracer.start_as_current_span("within"):
            await asyncio.sleep(0)
        in_thread = await asyncio.to_thread(trace.get_current_span)
        again.append(in_thread.get_span_context())

    def names() -> list[str]:
        found = sorted(span.name for span in exporter.get_finished_spans())
        exporter.clear()
        return found

    async with running(app):
        await looks.defer_async()
        await looks.defer_async()
        await jobs.end()
        assert names() == []
        assert all(context.is_valid and not context.trace_flags.sampled for context in seen)
        assert len({context.trace_id for context in seen}) == 2
        assert {id(context) for context in again} == {id(context) for context in seen}
        with trace.use_span(trace.NonRecordingSpan(seen[0])):
            await looks.defer_async()
        await jobs.end()
        assert names() == []
        with tracer.start_as_current_span("request") as request:
            await looks.defer_async()
        await jobs.end()
        traced = ["create looks", "defer looks", "process looks", "request", "within"]
        assert names() == traced
        assert seen[-1].trace_id == request.get_span_context().trace_id
    data: Any = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    counts = {
        metric.name: sum(
            getattr(each, "value", 0) or each.count for each in metric.data.data_points
        )
        for metric in scope.metrics
    }
    assert counts == dict.fromkeys(counts, 4)
    assert len(counts) == 3
    with pytest.raises(ValueError, match=r"sample must be from 0 to 1, not 1\.5"):
        otel.instrument(app, sample=1.5)
    tracers.shutdown()
    meters.shutdown()


async def test_sample_draws_each(app: App, jobs: Jobs) -> None:
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(app, tracer_provider=tracers, meter_provider=NoOpMeterProvider(), sample=0.5)

    @app.task(name="noop")
    async def noop() -> None: ...

    await noop.defer_many_async([*(noop.prepare() for _ in range(30)), *[{}] * 30])
    created = [span for span in exporter.get_finished_spans() if span.name == "create noop"]
    assert 0 < len(created) < 60
    async with running(app):
        await jobs.end()
    runs = [span for span in exporter.get_finished_spans() if span.name == "process noop"]
    assert len(created) < len(runs) < 60
    parents = [run.parent.span_id for run in runs if run.parent is not None]
    own = [span.context.span_id for span in created if span.context is not None]
    assert sorted(parents) == sorted(own)
    tracers.shutdown()


async def get(worker: Worker, path: str) -> tuple[int, str]:
    assert worker.probes is not None
    url = f"http://127.0.0.1:{worker.probes.port}{path}"

    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=300) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


@pytest.mark.parametrize("package", [otel, prometheus, sentry])
def test_an_app_is_instrumented_once(package: Any) -> None:
    options = {}
    if package is prometheus:
        options = {"registry": prometheus_client.CollectorRegistry(), "queues": True}
    app = App("postgresql://nowhere.invalid/x")
    package.instrument(app, **options)
    before = app.client.middleware
    if package is prometheus:
        with pytest.raises(ValueError, match="the queues of an App: pass another one"):
            prometheus.instrument(App("postgresql://nowhere.invalid/x"), **options)
        options["queues"] = False
    with pytest.raises(RuntimeError, match="instruments this App already"):
        package.instrument(app, **options)
    assert app.client.middleware == before
    package.instrument(App("postgresql://nowhere.invalid/x"), **options)


async def test_probes_and_prometheus(app: App, jobs: Jobs) -> None:
    registry = prometheus_client.CollectorRegistry()
    prometheus.instrument(app, registry=registry, queues=True)

    @app.task(name="good")
    async def good() -> None: ...

    @app.task(name="bad", retry=2)
    def bad() -> None:
        raise ValueError

    async with running(app, ["default"], http="127.0.0.1:0") as worker:
        await until(lambda: worker.id)
        assert await get(worker, "/readyz") == (200, "ok\n")
        assert await get(worker, "/healthz") == (200, "ok\n")
        assert (await get(worker, "/else"))[0] == 404
        await good.defer_async()
        await bad.defer_async()
        app.defer("waits", queue="other")
        await jobs.end(1, 2)
        wanted = 'pgdefer_failures_total{queue="default",state="failed",task="bad"} 1.0'

        async def shown() -> str:
            status, text = await get(worker, "/metrics")
            assert status == 200
            return text

        memory = f'pgdefer_worker_memory_bytes{{name="{worker.name}",worker="{worker.id}"}} '
        while not (wanted in (text := await shown()) and memory in text):
            pass  # the hook that counts is called after the answer, and heartbeats come beside it
        text = await shown()
        assert 'pgdefer_jobs{queue="other",state="ready",task="waits"} 1.0' in text
        assert 'pgdefer_jobs{queue="other",state="upstream_failed",task="waits"} 0.0' in text
        head = "pgdefer_run_seconds_count"
        assert f'{head}{{outcome="succeeded",queue="default",task="good"}} 1.0' in text
        assert f'{head}{{outcome="failed",queue="default",task="bad"}} 2.0' in text
        worker.state.stopping.set()
        assert (await get(worker, "/readyz"))[0] == 503
        worker.state.stopping.clear()
    with pytest.raises(
        ValueError, match=r"http must be HOST:PORT, such as 127.0.0.1:9000, not '9'"
    ):
        Worker(app, http="9")


async def test_metrics_that_fail(
    app: App, conn: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    registry = prometheus_client.CollectorRegistry()
    prometheus.instrument(app, registry=registry, queues=True)

    async with running(app, http="127.0.0.1:0") as worker:
        await until(lambda: worker.id)
        conn.execute("alter function queue.stats rename to no_stats")
        status, text = await get(worker, "/metrics")
        assert status == 200
        assert "pgdefer_failures" in text
        assert "the metrics lack figures from the database: function queue.stats" in caplog.text

        def fail() -> Any:
            raise ZeroDivisionError("no\nmetrics")

        app.metrics = fail
        assert (await get(worker, "/metrics"))[0] == 500
        assert "/metrics could not be answered: ZeroDivisionError: no metrics" in caplog.text
        assert "Traceback" not in caplog.text


async def test_metrics_while_a_table_is_locked(
    app: App, conn: psycopg.Connection[Any], connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registry = prometheus_client.CollectorRegistry()
    prometheus.instrument(app, registry=registry, queues=True)
    said = "the metrics lack figures from the database: "
    late = f"{said}canceling statement due to statement timeout"
    waiting = """
        select count(*) from pg_stat_activity
        where wait_event_type = 'Lock' and query like '%queue.stats()%'
    """
    async with running(app, http="127.0.0.1:0") as worker:
        await until(lambda: worker.id)
        with connect(autocommit=False) as holder:
            holder.execute("lock table queue.job_override in access exclusive mode")
            scrapes = [asyncio.create_task(get(worker, "/metrics")) for _ in range(8)]
            most = 0
            while not all(scrape.done() for scrape in scrapes):
                ((count,),) = conn.execute(waiting).fetchall()
                most = max(most, count)
                await asyncio.sleep(0.01)
            for scrape in scrapes:
                status, text = scrape.result()
                assert status == 200
                assert "pgdefer_failures" in text
                assert "pgdefer_jobs" not in text
            assert most == 1, "they share the answer"
            caplog.clear()
            await get(worker, "/metrics")
            assert caplog.text.count(said) == caplog.text.count(late) == 1
        assert "pgdefer_worker_memory_bytes" in (await get(worker, "/metrics"))[1]


async def test_metrics_without_a_connection(
    dsn: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "TIMEOUT", 0.1)
    registry = prometheus_client.CollectorRegistry()
    app = App(dsn, max_connections=1)
    prometheus.instrument(app, registry=registry, queues=True)
    assert app.metrics is not None
    with app.client.own_pool.connection():
        text = (await asyncio.to_thread(app.metrics))[1].decode()
    assert "pgdefer_failures" in text
    assert "the metrics lack figures from the database: no answer within 0.1 s" in caplog.text
    monkeypatch.setattr(prometheus, "TIMEOUT", 300.0)
    assert "pgdefer_worker_memory_bytes" in (await asyncio.to_thread(app.metrics))[1].decode()
    app.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "nohost.invalid"])
def test_an_address_that_can_not_be_served(host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"{host}:{taken.getsockname()[1]}"
        with pytest.raises(PgDeferError, match=f"http {address}: [A-Z]"):
            Probes(address, lambda _path: (200, "", b""))


async def test_without_metrics(app: App) -> None:
    async with running(app, http="127.0.0.1:0") as worker:
        await until(lambda: worker.id)
        assert (await get(worker, "/metrics"))[0] == 404


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """What Sentry's SDK would send."""
    sent: list[Any] = []

    def note(event: Any, _: Any) -> None:
        sent.append(event)

    sentry_sdk.init(
        "http://key@127.0.0.1:1/1",
        before_send=note,
        default_integrations=False,
        integrations=[LoggingIntegration()],
        shutdown_timeout=0,
    )
    yield sent
    sentry_sdk.get_client().close(timeout=0)
    sentry_sdk.get_global_scope().set_client(None)


async def test_sentry(app: App, jobs: Jobs, events: list[Any]) -> None:
    sentry.instrument(app)

    @app.task(name="bad", retry=2)
    async def bad() -> None:
        raise ValueError("no")

    @app.task(name="says", queue="q")
    def says() -> None:
        sentry_sdk.capture_message("hello")

    @app.task(name="pays", sensitive=["card.number"])
    def pays(card: dict[str, str]) -> None:
        digits = card["number"]
        try:
            raise ValueError("no card")
        except ValueError:
            sentry_sdk.capture_exception()
        raise LookupError(str(len(digits)))

    async with running(app):
        job = await bad.defer_async()
        await says.defer_async()
        await jobs.end()
        await until(lambda: len(events) == 2)
        await pays.defer_async({"number": "4111-secret"})
        await jobs.end()
        await until(lambda: len(events) == 4)
    paid = [events.pop(), events.pop()]
    assert {one["exception"]["values"][-1]["type"] for one in paid} == {
        "ValueError",
        "LookupError",
    }
    assert "4111-secret" not in str(paid)
    assert "'vars'" in str(events)
    by_task = {event["tags"]["pgdefer.task"]: event for event in events}
    assert by_task["bad"]["contexts"]["pgdefer"] == {
        "id": job.id,
        "task": "bad",
        "queue": "default",
        "attempt": 2,
    }
    assert by_task["bad"]["exception"]["values"][0]["type"] == "ValueError"
    assert by_task["says"]["tags"]["pgdefer.queue"] == "q"
    assert by_task["says"]["message"] == "hello"


async def test_sentry_gets_no_sensitive_args_of_a_decision_that_fails(
    app: App, jobs: Jobs, events: list[Any]
) -> None:
    sentry.instrument(app)
    secret = "4" * 16  # not as it is in this source, which events show

    def decide(error: Exception, job: JobContext) -> Any:
        raise ZeroDivisionError

    @app.task(name="pays", sensitive=["card"], decide=decide)
    def pays(card: str) -> None:
        raise ValueError(str(len(card)))

    async with running(app):
        await pays.defer_async(secret)
        await jobs.end()
        await until(lambda: events)
    assert secret not in str(events)


def define_tasks_with_many_runs(app: App, begun: asyncio.Event) -> None:
    @app.task(name="sleeps")
    def sleeps() -> None:
        current_job().sleep("nap", dt.timedelta(milliseconds=1))

    @app.task(name="yields")
    async def yields() -> Any:
        return RetryLater("not yet") if current_job().attempt == 1 else None

    @app.task(name="stopped")
    async def stopped() -> None:
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()

    @app.task(name="flaky", retry=2)
    async def flaky() -> None:
        if current_job().attempt == 1:
            raise ValueError

    @app.task(name="bad")
    async def bad() -> None:
        raise ValueError


async def test_sentry_monitors_jobs_whatever_their_runs(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, events: list[Any]
) -> None:
    sent: list[tuple[str, str, str]] = []

    def note(monitor: str, check_in_id: str = "", status: str = "") -> None:
        sent.append((monitor, check_in_id, status))

    monkeypatch.setattr(sentry, "capture_checkin", note)
    sentry.instrument(app, crons=True)
    begun = asyncio.Event()
    define_tasks_with_many_runs(app, begun)
    tasks = ("sleeps", "yields", "stopped", "flaky", "bad")
    for task in tasks:
        await app.defer_async(task, {"scheduled_for": "2030-01-31T09:00:00+00:00"})
    await app.defer_async("sleeps")
    async with running(app) as worker:
        await begun.wait()
        worker.stop_at_once()
    async with running(app):
        await jobs.end()
        await until(lambda: "error" in {status for _, _, status in sent})
    for task in tasks:
        statuses = [status for monitor, _, status in sent if monitor == task]
        *opened, end = statuses
        assert end == ("error" if task == "bad" else "ok")
        assert set(opened) == {"in_progress"}
        assert task == "bad" or len(opened) > 1
    assert len({id for _, id, _ in sent}) == len(tasks)


def test_sentry_tells_databases_of_one_name_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first nightly jobs of two tenants have the same id, task and time."""
    ids: list[str] = []
    monkeypatch.setattr(sentry, "capture_checkin", lambda _, id, status: ids.append(id))
    for host in ("one", "two", "one"):
        job: Any = types.SimpleNamespace(
            dsn=f"host={host} dbname=shop", id=1, scheduled_for="2030-01-31", task="nightly"
        )
        sentry._check_in(job, "ok")
    assert ids[0] == ids[2] != ids[1]

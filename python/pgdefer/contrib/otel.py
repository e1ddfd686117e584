"""OpenTelemetry: spans and metrics of deferring and running, by its messaging conventions.

Call `instrument(app)` after `App(...)`; the extra is `pgdefer[otel]`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from pgdefer.app import App
from pgdefer.contrib._attach import attach
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.prepared import Deferral

__all__ = ["instrument"]

SYSTEM = "pgdefer"
DEFAULT_QUEUE = "default"


class _Telemetry:
    def __init__(self, app: App, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._app = app
        self._tracer = tracer
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Jobs that were deferred."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Jobs whose handler has begun."
        )
        self._duration = meter.create_histogram(
            "messaging.process.duration", "s", "How long handlers ran."
        )

    def _queue_of(self, task: str) -> str:
        defaults = self._app.client.defaults.get(task)
        return str(defaults.arguments.get("queue") or DEFAULT_QUEUE) if defaults else DEFAULT_QUEUE

    def headers(self, task: str) -> Mapping[str, Any]:
        """Create the span of a job, and return the headers that link its runs to it."""
        carrier: dict[str, str] = {}
        attributes = {
            "messaging.system": SYSTEM,
            "messaging.operation.type": "create",
            "messaging.operation.name": "create",
            "messaging.destination.name": self._queue_of(task),
            "pgdefer.task": task,
        }
        with self._tracer.start_as_current_span(
            f"create {task}", kind=SpanKind.PRODUCER, attributes=attributes
        ):
            propagate.inject(carrier)
        return carrier

    @contextlib.contextmanager
    def sending(self, deferral: Deferral) -> Iterator[None]:
        """Create the span of a call that defers."""
        calls = deferral.calls
        name = calls[0].task if calls else "nothing"
        attributes: dict[str, Any] = {
            "messaging.system": SYSTEM,
            "messaging.operation.type": "send",
            "messaging.operation.name": "defer",
        }
        if len(calls) != 1:
            attributes["messaging.batch.message_count"] = len(calls)
        with self._tracer.start_as_current_span(
            f"defer {name}", kind=SpanKind.CLIENT, attributes=attributes
        ) as span:
            yield
            if len(deferral.jobs) == 1:
                span.set_attribute("messaging.message.id", str(deferral.jobs[0].id))
        for call in calls:
            queue = str(call.options.arguments.get("queue") or self._queue_of(call.task))
            self._sent.add(
                1,
                {
                    "messaging.system": SYSTEM,
                    "messaging.operation.name": "defer",
                    "messaging.destination.name": queue,
                },
            )

    @contextlib.contextmanager
    def running(self, job: JobContext) -> Iterator[None]:
        """Create the span of a run: a child of the job's span; of a retry, a new linked trace."""
        carrier = {key: value for key, value in job.headers.items() if isinstance(value, str)}
        found = propagate.extract(carrier, otel_context.Context())
        origin = trace.get_current_span(found).get_span_context()
        links = [Link(origin)] if job.attempt > 1 and origin.is_valid else []
        labels = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "process",
            "messaging.destination.name": job.queue,
        }
        attributes: dict[str, Any] = {
            **labels,
            "messaging.operation.type": "process",
            "messaging.message.id": str(job.id),
            "pgdefer.task": job.task,
            "pgdefer.attempt": job.attempt,
        }
        labels["pgdefer.task"] = job.task
        self._consumed.add(1, labels)
        start = time.perf_counter()
        try:
            with self._tracer.start_as_current_span(
                f"process {job.task}",
                context=otel_context.Context() if links else found,
                kind=SpanKind.CONSUMER,
                attributes=attributes,
                links=links,
            ) as span:
                try:
                    yield
                except BaseException as error:
                    labels["error.type"] = type(error).__qualname__
                    span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
                    raise
        finally:
            self._duration.record(time.perf_counter() - start, labels)


def instrument(
    app: App,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Trace and measure an App's calls and handlers, with these providers or the global ones."""
    telemetry = _Telemetry(
        app,
        trace.get_tracer("pgdefer", tracer_provider=tracer_provider),
        metrics.get_meter("pgdefer", meter_provider=meter_provider),
    )
    attach(
        app,
        middleware=telemetry.running,
        defer_middleware=telemetry.sending,
        headers=telemetry.headers,
    )

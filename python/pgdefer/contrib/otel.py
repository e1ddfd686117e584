"""OpenTelemetry: spans and metrics of deferring and running, by its messaging conventions.

Call `instrument(app)` after `App(...)`; the extra is `pgdefer[otel]`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
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
        # Read when metrics are collected, which costs each job less than a call of the counter.
        self._lock = threading.Lock()
        self._begun: dict[tuple[tuple[str, str], ...], int] = {}
        meter.create_observable_counter(
            "messaging.client.consumed.messages",
            [self._consumed],
            "{message}",
            "Jobs whose handler has begun.",
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

    def running(self, job: JobContext) -> AbstractContextManager[None]:
        """Create the span of a run: a child of the job's span; of a retry, a new linked trace."""
        return _Run(self, job)

    def begin(self, job: JobContext, labels: Mapping[str, str]) -> tuple[trace.Span, Context]:
        """Begin the span of a run; return it, and the context in which the handler runs."""
        key = tuple(labels.items())
        with self._lock:
            self._begun[key] = self._begun.get(key, 0) + 1
        context, links = Context(), []
        if carrier := {k: v for k, v in job.headers.items() if isinstance(v, str)}:
            context = propagate.extract(carrier, context)
            origin = trace.get_current_span(context).get_span_context()
            if job.attempt > 1 and origin.is_valid:
                context, links = Context(), [Link(origin)]
        span = self._tracer.start_span(
            f"process {job.task}",
            context=context,
            kind=SpanKind.CONSUMER,
            attributes={
                **labels,
                "messaging.operation.type": "process",
                "messaging.message.id": str(job.id),
                "pgdefer.attempt": job.attempt,
            },
            links=links,
        )
        return span, trace.set_span_in_context(span, context)

    def record(self, seconds: float, labels: Mapping[str, str]) -> None:
        """Measure a run that has ended."""
        self._duration.record(seconds, labels)

    def _consumed(self, _: metrics.CallbackOptions) -> list[metrics.Observation]:
        """Return how many handlers have begun, when metrics are collected."""
        return [metrics.Observation(count, dict(key)) for key, count in list(self._begun.items())]


class _Run:
    """Surrounds a handler: a class, because generators take longer, and this is for each job."""

    __slots__ = ("_job", "_labels", "_span", "_start", "_telemetry", "_token")

    def __init__(self, telemetry: _Telemetry, job: JobContext) -> None:
        self._telemetry = telemetry
        self._job = job

    def __enter__(self) -> None:
        job = self._job
        self._labels = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "process",
            "messaging.destination.name": job.queue,
            "pgdefer.task": job.task,
        }
        self._start = time.perf_counter()
        self._span, context = self._telemetry.begin(job, self._labels)
        self._token = otel_context.attach(context)

    def __exit__(self, _: object, error: BaseException | None, _trace: object) -> None:
        otel_context.detach(self._token)
        if error is not None:
            kind = type(error)
            self._labels["error.type"] = kind.__qualname__
            text = kind.__qualname__
            if isinstance(error, Exception):
                self._span.record_exception(error)
                text = f"{kind.__name__}: {error}"
            self._span.set_status(Status(StatusCode.ERROR, text))
        self._span.end()
        self._telemetry.record(time.perf_counter() - self._start, self._labels)


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

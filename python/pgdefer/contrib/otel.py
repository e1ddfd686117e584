"""OpenTelemetry: spans and metrics of deferring and running, by its messaging conventions.

Call `instrument(app)` after `App(...)`; the extra is `pgdefer[otel]`.

Tests: integration/test_telemetry.py.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode

from pgdefer.app import App
from pgdefer.contrib._attach import attach, claim
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.deferral import Deferral
from pgdefer.tasks.error_report import error_details, error_text
from pgdefer.tasks.raised import suspension

__all__ = ["instrument"]

SYSTEM = "pgdefer"
DEFAULT_QUEUE = "default"
NO_PARENT = Context()
# In seconds, as the conventions advise. The SDK's own are for milliseconds.
BOUNDARIES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


class _Undrawn(NonRecordingSpan):
    """The span of a run that is in no trace, so that what its handler traces is not sampled either.

    Its ids are made only when they are asked for: making them takes longer than all the rest.
    """

    def __init__(self) -> None:
        pass

    def get_span_context(self) -> SpanContext:
        """Return its context, which is the same for all threads."""
        found: SpanContext | None = vars(self).get("_context")
        if found is None:
            made = SpanContext(random.getrandbits(128), random.getrandbits(64), is_remote=False)
            found = vars(self).setdefault("_context", made)
        return found

    def __repr__(self) -> str:
        return f"NonRecordingSpan({self.get_span_context()!r})"


class _Runs:
    """What the runs of a task from a queue have in common, made once."""

    __slots__ = ("attributes", "begun", "labels", "name")

    def __init__(self, task: str, queue: str) -> None:
        self.name = f"process {task}"
        self.labels: dict[str, Any] = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "process",
            "messaging.destination.name": queue,
            "pgdefer.task": task,
        }
        self.attributes = {**self.labels, "messaging.operation.type": "process"}
        self.begun = 0


class _Telemetry:
    def __init__(self, app: App, tracer: trace.Tracer, meter: metrics.Meter, sample: float) -> None:
        self._app = app
        self._tracer = tracer
        self._sample = sample
        self.is_measuring = not isinstance(meter, metrics.NoOpMeter)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Jobs that were deferred."
        )
        # Read when metrics are collected, which costs each job less than a call of the counter.
        self._lock = threading.Lock()
        self._runs: dict[tuple[str, str], _Runs] = {}
        meter.create_observable_counter(
            "messaging.client.consumed.messages",
            [self._consumed],
            "{message}",
            "Jobs whose handler has begun.",
        )
        self._duration = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "How long handlers ran.",
            explicit_bucket_boundaries_advisory=BOUNDARIES,
        )

    def _queue_of(self, task: str) -> str:
        defaults = self._app.client.defaults.get(task)
        return str(defaults.arguments.get("queue") or DEFAULT_QUEUE) if defaults else DEFAULT_QUEUE

    def _is_drawn(self) -> bool:
        """Whether to begin a trace."""
        return self._sample >= 1 or random.random() < self._sample  # noqa: S311

    def _is_traced(self) -> bool:
        """Whether a call that defers gets spans. Within a trace, the trace decides."""
        if self._sample >= 1:
            return True
        around = trace.get_current_span().get_span_context()
        return around.trace_flags.sampled if around.is_valid else self._is_drawn()

    def headers(self, task: str) -> Mapping[str, Any]:
        """Create the span of a job, and return the headers that link its runs to it."""
        if not self._is_traced():
            return {}
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
        with self._send_span(deferral) if self._is_traced() else contextlib.nullcontext():
            yield
        counts = collections.Counter(
            str(call.options.arguments.get("queue") or self._queue_of(call.task))
            for call in deferral.calls
        )
        for queue, count in counts.items():
            labels = {
                "messaging.system": SYSTEM,
                "messaging.operation.name": "defer",
                "messaging.destination.name": queue,
            }
            self._sent.add(count, labels)

    @contextlib.contextmanager
    def _send_span(self, deferral: Deferral) -> Iterator[None]:
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

    def running(self, job: JobContext) -> AbstractContextManager[None]:
        """Create the span of a run: a child of the job's span; of a retry, a new linked trace."""
        return _Run(self, job)

    def _runs_of(self, job: JobContext) -> _Runs:
        key = (job.task, job.queue)
        return self._runs.get(key) or self._runs.setdefault(key, _Runs(*key))

    def count(self, job: JobContext) -> _Runs:
        """Count a run, and return what it has in common with others."""
        found = self._runs_of(job)
        with self._lock:
            found.begun += 1
        return found

    def begin(self, job: JobContext) -> tuple[trace.Span, Context]:
        """Begin the span of a run; return it, and the context in which the handler runs."""
        context, links, has_origin = NO_PARENT, None, False
        # Most jobs have none if nothing traces the calls that defer.
        if headers := job.headers:
            carrier = {key: value for key, value in headers.items() if isinstance(value, str)}
            context = propagate.extract(carrier, context)
            origin = trace.get_current_span(context).get_span_context()
            has_origin = origin.is_valid
            if has_origin and job.attempt > 1:
                context, links = NO_PARENT, [Link(origin)]
        if has_origin or self._is_drawn():
            runs = self._runs_of(job)
            # The sampler gets all attributes, as the conventions ask.
            attributes = {
                **runs.attributes,
                "messaging.message.id": str(job.id),
                "pgdefer.attempt": job.attempt,
            }
            span = self._tracer.start_span(runs.name, context, SpanKind.CONSUMER, attributes, links)
        else:
            span = _Undrawn()
        return span, trace.set_span_in_context(span, context)

    def record(self, seconds: float, labels: Mapping[str, str]) -> None:
        """Measure a run that has ended."""
        self._duration.record(seconds, labels)

    def _consumed(self, _: metrics.CallbackOptions) -> list[metrics.Observation]:
        """Return how many handlers have begun, when metrics are collected."""
        return [metrics.Observation(runs.begun, runs.labels) for runs in list(self._runs.values())]


class _Run:
    """Surrounds a handler. A class, because this runs for each job, and a generator is slower."""

    __slots__ = ("_job", "_runs", "_span", "_start", "_telemetry", "_token")

    def __init__(self, telemetry: _Telemetry, job: JobContext) -> None:
        self._telemetry = telemetry
        self._job = job

    def __enter__(self) -> None:
        telemetry = self._telemetry
        self._span, context = telemetry.begin(self._job)
        self._token = otel_context.attach(context)
        if telemetry.is_measuring:
            self._runs = telemetry.count(self._job)
            self._start = time.perf_counter()

    def __exit__(self, _: object, error: BaseException | None, _trace: object) -> None:
        telemetry = self._telemetry
        ended = time.perf_counter() if telemetry.is_measuring else 0
        otel_context.detach(self._token)
        if (
            suspended := suspension(error, self._job.steps)
        ) and self._job.steps.ended_as is not None:
            error = suspended.__cause__  # of a step that has failed; sleeps and waits have none
        try:
            if error is not None and self._span.is_recording():
                self._fail(error)
        finally:
            self._span.end()
        if telemetry.is_measuring:
            labels = self._runs.labels
            if error is not None:
                labels = {**labels, "error.type": type(error).__qualname__}
            telemetry.record(ended - self._start, labels)

    def _fail(self, error: BaseException) -> None:
        text = type(error).__qualname__
        if isinstance(error, Exception):
            # record_exception would raise whatever `str(error)` raises.
            details: dict[str, Any] = error_details(error)
            attributes = {
                "exception.type": details["type"],
                "exception.message": details["message"],
                "exception.stacktrace": details["traceback"],
            }
            self._span.add_event("exception", attributes)
            text = error_text(error)
        self._span.set_status(Status(StatusCode.ERROR, text))


def instrument(
    app: App,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    sample: float = 1,
) -> None:
    """Trace and measure an App's calls and handlers, with these providers or the global ones.

    With `sample` below 1, only that share of the calls and runs outside of a trace begin one. This
    costs the others less than a sampler of the SDK does; then leave that sampler at its default.
    Raises ValueError if `sample` is not from 0 to 1, RuntimeError in a second call for an App.
    """
    if not 0 <= sample <= 1:
        raise ValueError(f"sample must be from 0 to 1, not {sample!r}")
    claim(app, "otel")
    telemetry = _Telemetry(
        app,
        trace.get_tracer("pgdefer", tracer_provider=tracer_provider),
        metrics.get_meter("pgdefer", meter_provider=meter_provider),
        sample,
    )
    attach(
        app,
        middleware=telemetry.running,
        defer_middleware=telemetry.sending,
        headers=telemetry.headers,
    )

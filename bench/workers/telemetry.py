"""Switches telemetry on; OpenTelemetry's SDK gets an exporter in batches that drops all spans."""

from __future__ import annotations

from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NoOpTracerProvider

from pgdefer import App
from pgdefer.contrib import otel, prometheus


class Dropping(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:  # noqa: ARG002
        return SpanExportResult.SUCCESS


def instrument(app: App, kinds: list[str]) -> None:
    """Switch on `spans`, or some as in `spans:0.1`, `metrics`, `prometheus`."""
    traces: TracerProvider | None = None
    for kind in kinds:
        name, _, share = kind.partition(":")
        if name == "spans":
            sampler = ParentBased(TraceIdRatioBased(float(share or 1)))
            traces = TracerProvider(sampler=sampler)
    if traces is not None:
        traces.add_span_processor(BatchSpanProcessor(Dropping()))
    if traces is not None or "metrics" in kinds:
        meters = MeterProvider(metric_readers=[InMemoryMetricReader()])
        otel.instrument(
            app,
            tracer_provider=traces or NoOpTracerProvider(),
            meter_provider=meters if "metrics" in kinds else NoOpMeterProvider(),
        )
    if "prometheus" in kinds:
        prometheus.instrument(app)

"""Switches telemetry on; OpenTelemetry's SDK gets an exporter in batches that drops all spans."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from pgdefer import App
from pgdefer.contrib import otel, prometheus


class Dropping(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:  # noqa: ARG002
        return SpanExportResult.SUCCESS


def instrument(app: App, kinds: list[str]) -> None:
    if "otel" in kinds:
        traces = TracerProvider()
        traces.add_span_processor(BatchSpanProcessor(Dropping()))
        meters = MeterProvider(metric_readers=[InMemoryMetricReader()])
        otel.instrument(app, tracer_provider=traces, meter_provider=meters)
    if "prometheus" in kinds:
        prometheus.instrument(app)

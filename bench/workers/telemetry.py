"""Switches telemetry on; OpenTelemetry's SDK gets an exporter in batches that drops all spans.

The kinds are `spans`, of all runs; `spans:0.1`, by the SDK's sampler; `sample:0.1`, by the option
`sample`; `metrics`; `prometheus`.
"""

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
    """Switch on these kinds."""
    traces: TracerProvider | None = None
    sample = 1.0
    for kind in kinds:
        name, _, share = kind.partition(":")
        if name == "spans":
            sampler = ParentBased(TraceIdRatioBased(float(share or 1)))
            traces = TracerProvider(sampler=sampler)
        elif name == "sample":
            traces, sample = TracerProvider(), float(share)
    if traces is not None:
        traces.add_span_processor(BatchSpanProcessor(Dropping()))
    if traces is not None or "metrics" in kinds:
        meters = MeterProvider(metric_readers=[InMemoryMetricReader()])
        otel.instrument(
            app,
            tracer_provider=traces or NoOpTracerProvider(),
            meter_provider=meters if "metrics" in kinds else NoOpMeterProvider(),
            sample=sample,
        )
    if "prometheus" in kinds:
        prometheus.instrument(app)

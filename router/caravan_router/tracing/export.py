"""Sends ended spans to a collector, from a thread of its own: nobody who serves requests waits for it."""

import logging
import os
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_EXPORT_BATCH_SIZE
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import caravan_proto
from caravan_router.tracing.settings import TraceSettings

_log = logging.getLogger(__name__)

_SERVICE_NAME = "caravan-router"
# Encoding a span holds the GIL for about 80 us, in which the event loop stands still: a whole batch takes 1.3 ms. With
# OpenTelemetry's default of 512, tokens would wait for the 5 ms after which Python changes threads, several times.
_BATCH_SPANS = 16
# For the last spans, and for the collector to answer, when the router ends.
_LAST_EXPORT_S = 3.0
_INTERRUPTED_S = 1.0
# It logs each call that fails; `_Reported` logs the first one.
_EXPORTER_LOG = "opentelemetry.exporter"
# They log each batch and each invalid header of a client.
_SILENCED = (
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
)


class SpanSender:
    """Sends the spans of ``provider`` until it is closed.

    Spans wait in a queue of OTEL_BSP_MAX_QUEUE_SIZE, by default 2048; when it is full, the oldest are dropped.
    """

    def __init__(self, settings: TraceSettings) -> None:
        for name in _SILENCED:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        reason = _FirstMessage(logging.WARNING)
        exporter_log = logging.getLogger(_EXPORTER_LOG)
        exporter_log.handlers, exporter_log.propagate = [reason], False
        self._exporter = _Reported(_make_exporter(settings), reason)
        batch_spans = None if os.environ.get(OTEL_BSP_MAX_EXPORT_BATCH_SIZE) else _BATCH_SPANS
        self.provider = TracerProvider(resource=_resource(settings.service_name), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter, max_export_batch_size=batch_spans))

    def close(self) -> None:
        """Send the spans that wait, for a few seconds at most. Blocks."""
        # A daemon, since a collector that does not answer must not keep the process.
        last = threading.Thread(target=self.provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_EXPORT_S)
        if last.is_alive():
            self._exporter.shutdown()  # interrupts a call that is retried
            last.join(_INTERRUPTED_S)


def _make_exporter(settings: TraceSettings) -> SpanExporter:
    if settings.over_http:
        endpoint = settings.endpoint
        return HttpExporter(endpoint=None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")
    return GrpcExporter(endpoint=settings.endpoint)


def _resource(service_name: str | None) -> Resource:
    """Return what all spans say of their process: the flag wins over the environment, this over the default."""
    default = Resource({"service.name": _SERVICE_NAME, "service.version": caravan_proto.__version__})
    given = Resource({} if service_name is None else {"service.name": service_name})
    return Resource.create(dict(default.merge(OTELResourceDetector().detect()).merge(given).attributes))


class _FirstMessage(logging.Handler):
    """Keeps the first message since ``text`` was empty: those of later attempts say less."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


class _Reported(SpanExporter):
    """Passes spans on, and logs once that this fails and once that it succeeds again."""

    def __init__(self, exporter: SpanExporter, reason: _FirstMessage) -> None:
        self._exporter = exporter
        self._reason = reason
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._lost:
                _log.warning("traces cannot be sent, and are lost meanwhile", extra={"reason": self._reason.text})
            self._lost += len(spans)
            return result
        if self._lost:
            _log.info("traces are sent again", extra={"lost": self._lost})
        self._lost, self._reason.text = 0, ""
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

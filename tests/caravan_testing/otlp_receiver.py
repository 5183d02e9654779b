"""A collector of traces: receives what OpenTelemetry's exporters send, by gRPC or by HTTP, on a port of its own."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """``parent_id`` is empty if the span has no parent. ``events``: names and attributes, in order."""

    name: str
    kind: int
    trace_id: str
    parent_id: str
    tracestate: str
    is_error: bool
    seconds: float
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]

    @property
    def event_names(self) -> list[str]:
        return [name for name, _ in self.events]

    def event(self, name: str) -> dict[str, Any]:
        """Return the attributes of the only event of this name."""
        (found,) = (attributes for known, attributes in self.events if known == name)
        return found


@dataclass
class Receiver:
    """``endpoint``: URL for `--otlp-endpoint`. Other threads append to ``spans``.

    ``accepts`` says whether the next call by gRPC succeeds; else it is refused for good.
    """

    endpoint: str = ""
    accepts: Callable[[], bool] = lambda: True
    spans: list[ReceivedSpan] = field(default_factory=list)

    def span(self, request_id: str) -> ReceivedSpan | None:
        """Return the span of a request; None if it has not come yet."""
        return next((span for span in self.spans if span.attributes["caravan.request_id"] == request_id), None)

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            resource = _attributes(group.resource.attributes)
            for span in (span for scope in group.scope_spans for span in scope.spans):
                times = [event.time_unix_nano for event in span.events]
                assert times == sorted(times)
                self.spans.append(
                    ReceivedSpan(
                        name=span.name,
                        kind=span.kind,
                        trace_id=span.trace_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        tracestate=span.trace_state,
                        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        attributes=_attributes(span.attributes),
                        events=[(event.name, _attributes(event.attributes)) for event in span.events],
                        resource=resource,
                    )
                )


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


@contextlib.contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    def export(request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext) -> bytes:
        if not receiver.accepts():
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not today")
        receiver.take(request)
        answer: bytes = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
        return answer

    decode = trace_service_pb2.ExportTraceServiceRequest.FromString
    methods: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(export, request_deserializer=decode)}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def http_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            receiver.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Do not write to stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

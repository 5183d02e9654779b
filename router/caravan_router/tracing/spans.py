"""The span of a request: its events are those of its generations, its attributes follow OpenTelemetry's conventions.

Names in ``caravan.`` are our own. No span contains a part of a prompt or of an output.
"""

import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import caravan_proto
from caravan_scheduler.core.recomputed import NOTHING_RECOMPUTED, Reason, Recomputed
from caravan_scheduler.core.trace import ArrivedRequest, GenerationTrace, RequestTrace, ServedRequest

_PROVIDER = "caravan"
_SERVER_ERROR = 500
# The client left, or aborted the request.
_NO_ERRORS = frozenset({"dropped", "aborted"})

Attributes = Mapping[str, str | int | bool]


class OpenTelemetry:
    """Makes the spans of a provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer: Tracer = provider.get_tracer("caravan", caravan_proto.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def request(self, arrived: ArrivedRequest) -> RequestTrace:
        """Begin the span of a request."""
        arrived_ns = time.time_ns() - int((time.monotonic() - arrived.arrived_s) * 1e9)
        span = self._tracer.start_span(
            f"{arrived.method} {arrived.route}",
            self._parent(arrived),
            SpanKind.SERVER,
            {
                "http.request.method": arrived.method,
                "http.route": arrived.route,
                "caravan.request_id": arrived.request_id,
            },
            start_time=arrived_ns,
        )
        return _RequestSpan(span)

    def _parent(self, arrived: ArrivedRequest) -> Context:
        """Return the span that the client names; none if its headers are invalid, as W3C Trace Context says."""
        if len(arrived.traceparent) != 1:
            return Context()
        carrier = {"traceparent": list(arrived.traceparent), "tracestate": list(arrived.tracestate)}
        return self._propagator.extract(carrier, Context())


class _RequestSpan:
    """The span of one request, which may have several generations."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._is_recording = span.is_recording()
        context = span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id)
        self.traceparent = f"00-{self.trace_id}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"
        self._generations = 0
        self._input_tokens = 0
        self._cached_tokens = 0
        self._computed_tokens: dict[Reason, int] = {}
        self._differs_at: int | None = None
        self._output_tokens = 0
        # By generation.
        self._finish_reasons: dict[int, str] = {}

    def serves(self, served: ServedRequest) -> None:
        attributes: dict[str, str | bool] = {f"caravan.gateway.{name}": text for name, text in served.gateway.items()}
        if served.session:
            attributes["caravan.session"] = served.session
        self._span.set_attributes(
            attributes
            | {
                "gen_ai.operation.name": served.operation,
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": served.asked or served.model,
                "gen_ai.response.model": served.model,
                "gen_ai.request.stream": served.streamed,
            }
        )

    def generation(self, prompt_tokens: int) -> GenerationTrace:
        number, self._generations = self._generations, self._generations + 1
        self._input_tokens += prompt_tokens
        return _GenerationEvents(self, number, counts_prompt=prompt_tokens > 0)

    def add(self, name: str, number: int, attributes: Attributes) -> None:
        """Add an event of a generation."""
        if self._is_recording:
            self._span.add_event(name, {**attributes, "caravan.generation": number})

    def note_prompt(self, cached: int, recomputed: Recomputed) -> None:
        """Count prompt tokens that were in the cache, and those that were not by reason."""
        self._cached_tokens += cached
        for reason, tokens in recomputed.by_reason.items():
            self._computed_tokens[reason] = self._computed_tokens.get(reason, 0) + tokens
        if self._differs_at is None:
            self._differs_at = recomputed.differs_at

    def note_end(self, number: int, output_tokens: int, *, reason: str = "", failure: str = "") -> None:
        """Count a generation that has ended, with a ``reason`` or with a ``failure``."""
        self._output_tokens += output_tokens
        if reason:
            self._finish_reasons[number] = reason
        elif failure not in _NO_ERRORS:
            self._span.set_attribute("error.type", failure)
            self._span.set_status(StatusCode.ERROR)

    def end(self, status: int) -> None:
        span = self._span
        if self._is_recording:
            span.set_attribute("http.response.status_code", status)
            if self._generations:
                reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
                span.set_attribute("gen_ai.response.finish_reasons", reasons)
                span.set_attribute("gen_ai.usage.input_tokens", self._input_tokens)
                span.set_attribute("gen_ai.usage.output_tokens", self._output_tokens)
                span.set_attribute("gen_ai.usage.cache_read.input_tokens", self._cached_tokens)
                for reason, tokens in self._computed_tokens.items():
                    span.set_attribute(f"caravan.prompt_computed.{reason.value}", tokens)
                if self._differs_at is not None:
                    span.set_attribute("caravan.prompt_differs_at", self._differs_at)
            if status >= _SERVER_ERROR:
                span.set_status(StatusCode.ERROR)
        span.end()


class _GenerationEvents:
    def __init__(self, request: _RequestSpan, number: int, *, counts_prompt: bool) -> None:
        self._request = request
        self._number = number
        self._counts_prompt = counts_prompt
        self._shard = ""

    def _add(self, name: str, attributes: Attributes) -> None:
        self._request.add(name, self._number, attributes)

    def queued(self) -> None:
        self._add("queued", {})

    def started(self, shard: str, cached_tokens: int, recomputed: Recomputed = NOTHING_RECOMPUTED) -> None:
        self._shard = shard
        if self._counts_prompt:
            self._request.note_prompt(cached_tokens, recomputed)
        self._add("started", {"caravan.shard": shard, "caravan.cached_tokens": cached_tokens})

    def got_first_token(self) -> None:
        self._add("first_token", {})

    def preempted(self, how: str) -> None:
        self._add("preempted", {"caravan.shard": self._shard, "caravan.preemption": how})

    def resumed(self, shard: str, computed_again: int, *, other_numerics: bool) -> None:
        before, self._shard = self._shard, shard
        if before != shard:
            self._add("migrated", {"caravan.shard.from": before, "caravan.shard.to": shard})
        attributes: Attributes = {"caravan.shard": shard, "caravan.recomputed_tokens": computed_again}
        self._add("resumed", {**attributes, "caravan.other_numerics": True} if other_numerics else attributes)

    def finished(self, reason: str, output_tokens: int) -> None:
        self._request.note_end(self._number, output_tokens, reason=reason)
        self._add("finished", {"caravan.finish_reason": reason, "caravan.output_tokens": output_tokens})

    def failed(self, failure: str, output_tokens: int) -> None:
        self._request.note_end(self._number, output_tokens, failure=failure)
        self._add("failed", {"error.type": failure, "caravan.output_tokens": output_tokens})

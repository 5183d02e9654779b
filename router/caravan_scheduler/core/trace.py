"""The life of a request as its trace shows it. `caravan_router.tracing` implements these interfaces."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from caravan_scheduler.core.recomputed import NOTHING_RECOMPUTED, Recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedRequest:
    """An HTTP request that was just received.

    ``route`` is the path's template. ``arrived_s``: when its head had arrived, in seconds on ``time.monotonic``.
    ``traceparent`` and ``tracestate`` have the values of all headers of these names.
    """

    method: str
    route: str
    request_id: str
    arrived_s: float
    traceparent: tuple[str, ...] = ()
    tracestate: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """What is known of a request once it has been validated.

    ``asked``: the model or adapter that it names, "" for the default. ``operation``: a value of OpenTelemetry's
    ``gen_ai.operation.name``. ``session``: the ends of the session's id. ``gateway``: what a trusted gateway says of
    the request, by name.
    """

    asked: str
    model: str
    operation: str
    streamed: bool
    session: str = ""
    gateway: Mapping[str, str] = field(default_factory=dict)


class GenerationTrace(Protocol):
    """The events of one generation. The methods are called on the event loop and must not block."""

    def queued(self) -> None: ...

    def started(self, shard: str, cached_tokens: int, recomputed: Recomputed = NOTHING_RECOMPUTED) -> None:
        """``shard`` begins to prefill the prompt, ``cached_tokens`` of which are in its cache, and why the others."""

    def got_first_token(self) -> None: ...

    def preempted(self, how: str) -> None:
        """The generation lost its cells to others, or because its shard drains. ``how``: a value of `Preemption`."""

    def resumed(self, shard: str, computed_again: int, *, other_numerics: bool) -> None:
        """``shard`` continues the generation; so many of its tokens are computed for another time.

        ``other_numerics``: it rounds otherwise than the shard before, so that the text may be another.
        """

    def finished(self, reason: str, output_tokens: int) -> None: ...

    def failed(self, failure: str, output_tokens: int) -> None:
        """The generation ended without a finish reason. ``failure``: a value of `core.request_metrics.Failure`."""


class RequestTrace(Protocol):
    """The span of one HTTP request."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty if the request is not traced."""
        ...

    @property
    def traceparent(self) -> str:
        """The header value that makes this span the parent of others; empty if the request is not traced."""
        ...

    def serves(self, served: ServedRequest) -> None: ...

    def generation(self, prompt_tokens: int) -> GenerationTrace:
        """Return the events of the next generation. ``prompt_tokens``: 0 if an earlier one has the same prompt."""
        ...

    def end(self, status: int) -> None:
        """End the span with the HTTP status of the reply."""


class Tracing(Protocol):
    """Makes a span for each request."""

    def request(self, arrived: ArrivedRequest) -> RequestTrace: ...


class NoTrace:
    """Both traces of a request that is not traced."""

    trace_id: Final = ""
    traceparent: Final = ""

    def serves(self, served: ServedRequest) -> None: ...

    def generation(self, prompt_tokens: int) -> "NoTrace":
        return self

    def queued(self) -> None: ...

    def started(self, shard: str, cached_tokens: int, recomputed: Recomputed = NOTHING_RECOMPUTED) -> None: ...

    def got_first_token(self) -> None: ...

    def preempted(self, how: str) -> None: ...

    def resumed(self, shard: str, computed_again: int, *, other_numerics: bool) -> None: ...

    def finished(self, reason: str, output_tokens: int) -> None: ...

    def failed(self, failure: str, output_tokens: int) -> None: ...

    def end(self, status: int) -> None: ...


NO_TRACE: Final = NoTrace()

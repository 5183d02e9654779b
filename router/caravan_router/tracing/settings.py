"""Whether and where traces are sent."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from caravan_proto.packages import Part, lack
from caravan_scheduler.core.trace import Tracing

_log = logging.getLogger(__name__)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


_GRPC, _HTTP = "grpc", "http/protobuf"


class TracingError(Exception):
    """Traces cannot be sent as the flags or the environment say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """How traces are sent; OpenTelemetry reads its other variables, such as those of the sampler, by itself.

    ``endpoint`` is the flag's URL; None: the exporter takes it from the environment. ``service_name`` is the flag's;
    None: from the environment, or else Caravan's. ``over_http``: by HTTP with protobuf instead of gRPC.
    """

    endpoint: str | None
    service_name: str | None
    over_http: bool = False


def read_settings(endpoint: str | None, service_name: str | None, environ: Mapping[str, str]) -> TraceSettings | None:
    """Return the settings by two flags and OpenTelemetry's standard variables; None if no traces are sent.

    Raises TracingError.
    """
    if endpoint is None and not any(environ.get(name) for name in _ENDPOINTS):
        return None
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _GRPC)
    if protocol not in {_GRPC, _HTTP}:
        raise TracingError(f"the protocol of OTLP must be {_GRPC} or {_HTTP}. Given: {protocol!r}")
    lacking = lack(Part.OTLP)
    if lacking and endpoint is not None:
        raise TracingError(f"--otlp-endpoint {lacking}")
    if lacking:
        # Clusters set these variables for all of their programs.
        _log.warning("no traces are sent, which %s", lacking)
        return None
    return TraceSettings(endpoint=endpoint, service_name=service_name, over_http=protocol == _HTTP)


@asynccontextmanager
async def tracing(settings: TraceSettings | None) -> AsyncIterator[Tracing | None]:
    """Send traces while the block runs; None without settings. The end takes at most a few seconds."""
    if settings is None:
        yield None
        return
    from caravan_router.tracing.export import SpanSender
    from caravan_router.tracing.spans import OpenTelemetry

    sender = await asyncio.to_thread(SpanSender, settings)
    try:
        yield OpenTelemetry(sender.provider)
    finally:
        await asyncio.to_thread(sender.close)

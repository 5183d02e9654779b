"""The metrics, on the port of the API or on one of their own."""

import hmac
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from caravan_dialects.api.errors import InvalidKeyError, MissingKeyError, NotFoundError
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.server.dialect import error_response
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag
from caravan_router.metrics.exposition import TextFormat
from caravan_router.metrics.recorder import Metrics


class MetricsPortError(Exception):
    """The port of the metrics cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAccess:
    """``key``: the bearer token that metrics ask for, None if they are open. ``port``: theirs, None for the API's.

    ``shared``: another router may listen on the port too, as while one takes over from the other.
    """

    key: str | None = None
    port: int | None = None
    shared: bool = False

    def check(self, request: web.Request) -> None:
        """Raise MissingKeyError or InvalidKeyError unless ``request`` may read metrics."""
        if self.key is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise MissingKeyError
        if not hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self.key.encode()):
            raise InvalidKeyError


OPEN_METRICS = MetricsAccess()
METRICS_ACCESS = web.AppKey("metrics_access", MetricsAccess)

ROUTES = Routes(TGI, tag=Tag.STATE)


@ROUTES.route(
    "GET",
    "/metrics",
    "Return metrics in Prometheus text format or, if `Accept` names it, in OpenMetrics",
    replies=(("text/plain", str), ("application/openmetrics-text", str)),
    open=True,
)
async def metrics(request: web.Request) -> web.Response:
    access = request.app[METRICS_ACCESS]
    if access.port is not None:
        raise NotFoundError(request.path)
    access.check(request)
    return await _rendered(request.app[STATE].metrics, request)


async def _rendered(found: Metrics, request: web.Request) -> web.Response:
    form = TextFormat.accepted(request.headers.get("Accept", ""))
    return web.Response(body=await found.render(form), headers={"Content-Type": form.content_type, "Vary": "Accept"})


@asynccontextmanager
async def serving_metrics(found: Metrics, access: MetricsAccess, host: str) -> AsyncIterator[str]:
    """Serve the metrics on their own port until the block ends; yield their URL, "" without one.

    Raises MetricsPortError.
    """
    if access.port is None:
        yield ""
        return

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            access.check(request)
        except (MissingKeyError, InvalidKeyError) as error:
            return error_response(TGI, error)
        return await _rendered(found, request)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        shared = access.shared and hasattr(socket, "SO_REUSEPORT")
        site = web.TCPSite(runner, host, access.port, reuse_port=shared)
        try:
            await site.start()
        except OSError as error:
            raise MetricsPortError(f"--metrics-port {access.port}: {error.strerror or error}") from error
        found_host, number = runner.addresses[0][:2]
        yield f"http://{f'[{found_host}]' if ':' in found_host else found_host}:{number}/metrics"
    finally:
        await runner.cleanup()

"""Routes for operators and tools: health, metrics, the API's description."""

from functools import cache
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web

from caravan_router.http.ops.docs_page import render_page
from caravan_router.http.server.errors import UnhealthyError
from caravan_router.http.server.middleware import Handler
from caravan_router.http.server.route import JSON, Route
from caravan_router.http.server.state import STATE
from caravan_router.http.tgi.errors import TGI
from caravan_router.metrics.recorder import CONTENT_TYPE


async def health(request: web.Request) -> web.Response:
    """Handle ``/health``, ``/ping`` and ``GET /``. Asks no shard, so that a long prefill does not delay the answer."""
    if not request.app[STATE].fleet.healthy:
        raise UnhealthyError
    return web.Response()


async def metrics(request: web.Request) -> web.Response:
    """Handle ``/metrics``."""
    return web.Response(body=await request.app[STATE].metrics.render(), headers={"Content-Type": CONTENT_TYPE})


@cache
def openapi_document() -> bytes:
    """Return the committed document."""
    return resources.files("caravan_router.http").joinpath("openapi.json").read_bytes()


@cache
def docs_page() -> bytes:
    """Return the document as a page."""
    return render_page(msgspec.json.decode(openapi_document())).encode()


def read_documents() -> None:
    """Read and render the documents once. Call before the event loop runs, which file access would block."""
    docs_page()


async def docs(_request: web.Request) -> web.Response:
    """Handle ``/docs``."""
    # The page needs no script and loads nothing, so nothing is allowed, whatever a description contains.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return web.Response(
        body=docs_page(), content_type="text/html", charset="utf-8", headers={"Content-Security-Policy": policy}
    )


async def openapi(_request: web.Request) -> web.Response:
    """Handle ``/openapi.json``."""
    return web.Response(body=openapi_document(), content_type="application/json")


def _get(path: str, handler: Handler, summary: str, **more: Any) -> Route:
    return Route(method="GET", path=path, handler=handler, dialect=TGI, summary=summary, **more)


_HEALTHY = "Return 200 while a shard is up and makes progress, else 503"
_DOCUMENT = "Return the OpenAPI document of this API"

ROUTES = (
    _get("/", health, _HEALTHY, errors=(503,), open=True, alias="root"),
    # Claude Code's probe.
    Route(
        method="HEAD", path="/", handler=health, dialect=TGI, summary=_HEALTHY, errors=(503,), open=True, alias="head"
    ),
    _get("/health", health, _HEALTHY, errors=(503,), open=True),
    _get("/ping", health, _HEALTHY, errors=(503,), open=True, alias="ping"),
    _get("/metrics", metrics, "Return metrics in Prometheus text format", replies=(("text/plain", str),), open=True),
    _get("/openapi.json", openapi, _DOCUMENT, replies=((JSON, dict),)),
    _get("/api-doc/openapi.json", openapi, _DOCUMENT, replies=((JSON, dict),), alias="tgi"),
    _get("/docs", docs, "Show this API's description as a page", replies=(("text/html", str),)),
)

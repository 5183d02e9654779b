"""Health, metrics and the OpenAPI document: what probes, Prometheus and generators of clients ask for."""

from functools import cache
from importlib import resources

import msgspec
from aiohttp import web

from caravan_dialects.api.errors import UnhealthyError
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.server.root_path import ROOT_PATH
from caravan_router.http.server.route import Compressed, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag

_HEALTHY = "Return 200 while a shard is up and makes progress, else 503"
_DOCUMENT = "Return the OpenAPI document of this API"


ROUTES = Routes(TGI, tag=Tag.STATE)


class Version(msgspec.Struct, frozen=True):
    version: str


class Load(msgspec.Struct, frozen=True):
    """As in vLLM. ``server_load``: generations in progress."""

    server_load: int


class Sleep(msgspec.Struct, frozen=True):
    """As in vLLM."""

    is_sleeping: bool


@ROUTES.route("GET", "/ping", _HEALTHY, errors=(503,), open=True, alias="ping")
@ROUTES.route("GET", "/health", _HEALTHY, errors=(503,), open=True)
@ROUTES.route("GET", "/v1/health", _HEALTHY, errors=(503,), open=True, alias="health_v1")
@ROUTES.route("HEAD", "/health", _HEALTHY, errors=(503,), open=True, alias="health_head")
# Claude Code's probe.
@ROUTES.route("HEAD", "/", _HEALTHY, errors=(503,), open=True, alias="head")
async def health(request: web.Request) -> web.Response:
    """Asks no shard, so that a long prefill does not delay the answer."""
    if not request.app[STATE].fleet.healthy:
        raise UnhealthyError
    return web.Response()


@ROUTES.route(
    "GET", "/readyz", "Return 200 from the moment that the first shard is up, before that 503", errors=(503,), open=True
)
async def readyz(request: web.Request) -> web.Response:
    """For readiness probes: while no shard is up, requests wait here, which is better than no router at all."""
    if not request.app[STATE].fleet.ready:
        raise UnhealthyError
    return web.Response()


@ROUTES.route("GET", "/livez", "Return 200 while the router process responds", open=True)
async def livez(_request: web.Request) -> web.Response:
    """For liveness probes: no restart brings a shard back."""
    return web.Response()


@ROUTES.route("GET", "/version", "Return Caravan's version", reply=Version)
async def vllm_version(request: web.Request) -> web.Response:
    return json_reply(Version(request.app[STATE].info.version))


@ROUTES.route("GET", "/load", "Return how many generations are in progress", reply=Load)
async def server_load(request: web.Request) -> web.Response:
    return json_reply(Load(request.app[STATE].permits.held))


@ROUTES.route("GET", "/is_sleeping", "Report whether all models are unloaded until a request loads one", reply=Sleep)
async def is_sleeping(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return json_reply(Sleep(state.catalogue is not None and not state.fleet.engines))


@cache
def openapi_document() -> bytes:
    """Return the committed document."""
    return resources.files("caravan_router.http").joinpath("openapi.json").read_bytes()


@cache
def _sent_document(root_path: str) -> Compressed:
    if not root_path:
        return Compressed(openapi_document(), "application/json")
    document = msgspec.json.decode(openapi_document())
    return Compressed(msgspec.json.encode({**document, "servers": [{"url": root_path}]}), "application/json")


def read_document(root_path: str) -> None:
    """Read the document once. Call before the event loop runs, which file access would block.

    ``root_path``: what a proxy puts before all paths.
    """
    _sent_document(root_path)


@ROUTES.route("GET", "/api-doc/openapi.json", _DOCUMENT, reply=dict, open=True, alias="tgi")
@ROUTES.route("GET", "/openapi.json", _DOCUMENT, reply=dict, open=True)
async def openapi(request: web.Request) -> web.Response:
    return _sent_document(request.app[ROOT_PATH]).reply(request, {})

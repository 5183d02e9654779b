"""Renders the OpenAPI document as one HTML page without scripts or external files."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web

from caravan_dialects.api.errors import UnhealthyError
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.server.root_path import ROOT_PATH
from caravan_router.http.server.route import Compressed, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { border-top: 1px solid #8886; padding-top: 1rem } h2 code { font-size: 1.1rem }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0 }
code { font-family: ui-monospace, monospace } :root { color-scheme: light dark }
"""
_PREFIX = "#/components/schemas/"
_HEALTHY = "Return 200 while a shard is up and makes progress, else 503"
_DOCUMENT = "Return the OpenAPI document of this API"


def render_page(document: Mapping[str, Any]) -> str:
    """Return the page: routes first, then the types of their bodies and replies."""
    info = document["info"]
    operations = [
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    types = [_type(name, schema) for name, schema in document["components"]["schemas"].items()]
    title = escape(info["title"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(info['description'])} "
        f"The same for machines: <a href=/openapi.json>openapi.json</a>.</p>"
        f"{''.join(operations)}{''.join(types)}</html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    rows = [
        (f"{parameter['in']} <code>{escape(parameter['name'])}</code>", _prose(parameter["description"]))
        for parameter in operation.get("parameters", ())
    ]
    rows += [("body", kinds) for kinds in _contents(operation.get("requestBody", {}))]
    for status, response in operation["responses"].items():
        kinds = "<br>".join(_contents(response))
        rows.append(
            (status, f"{escape(response['description'])}<br>{kinds}" if kinds else escape(response["description"]))
        )
    return f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{_prose(operation['summary'])}</p>{_table(rows)}"


def _contents(holder: Mapping[str, Any]) -> list[str]:
    return [
        f"<code>{escape(content_type)}</code>: {_kind(content['schema'])}"
        for content_type, content in holder.get("content", {}).items()
    ]


def _type(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(field)}</code>{' (needed)' if field in required else ''}",
            f"{_kind(kind)}<br>{_prose(kind['description'])}" if "description" in kind else _kind(kind),
        )
        for field, kind in schema.get("properties", {}).items()
    ]
    about = _prose(schema.get("description", ""))
    return f"<h2 id={escape(name)}><code>{escape(name)}</code></h2><p>{about}</p>{_table(rows)}"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a type in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_PREFIX))
        return f"<a href=#{name}>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    match schema.get("type"):
        case "array":
            return f"list of {_one(schema['items'])}" if schema.get("items") else "list"
        case "object" if schema.get("additionalProperties"):
            return f"map to {_one(schema['additionalProperties'])}"
        case str(kind):
            return escape(kind)
        case _:
            return "anything"


def _one(schema: Mapping[str, Any]) -> str:
    """Return a type in a few words, in parentheses if it is a choice of types."""
    return f"({_kind(schema)})" if "anyOf" in schema else _kind(schema)


def _prose(text: str) -> str:
    return escape(text).replace("``", "`")


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><td>{first}<td>{second}" for first, second in rows) + "</table>"


ROUTES = Routes(TGI)


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
        return Compressed.of(openapi_document(), "application/json")
    document = msgspec.json.decode(openapi_document())
    return Compressed.of(msgspec.json.encode({**document, "servers": [{"url": root_path}]}), "application/json")


@cache
def docs_page() -> bytes:
    """Return the document as a page."""
    return render_page(msgspec.json.decode(openapi_document())).encode()


def read_documents(root_path: str) -> None:
    """Read and render the documents once. Call before the event loop runs, which file access would block.

    ``root_path``: what a proxy puts before all paths.
    """
    docs_page()
    _sent_document(root_path)


@ROUTES.route("GET", "/api-doc/openapi.json", _DOCUMENT, reply=dict, alias="tgi")
@ROUTES.route("GET", "/openapi.json", _DOCUMENT, reply=dict)
async def openapi(request: web.Request) -> web.Response:
    return _sent_document(request.app[ROOT_PATH]).reply(request, {})


@ROUTES.route("GET", "/docs", "Show this API's description as a page", replies=(("text/html", str),))
async def docs(_request: web.Request) -> web.Response:
    # The page needs no script and loads nothing, so nothing is allowed, whatever a description contains.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return web.Response(
        body=docs_page(), content_type="text/html", charset="utf-8", headers={"Content-Security-Policy": policy}
    )

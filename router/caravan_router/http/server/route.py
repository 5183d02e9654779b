"""One row of the route table: aiohttp registers it, OpenAPI describes it.

And the replies of routes that generate nothing.
"""

import gzip
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec
from aiohttp import web

from caravan_dialects.api.error_table import Dialect
from caravan_router.http.server.tags import Tag

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


def json_reply(reply: object, **headers: str) -> web.Response:
    """Return ``reply`` as JSON."""
    return web.Response(body=msgspec.json.encode(reply), headers=headers, content_type="application/json")


@dataclass(frozen=True)
class Compressed:
    """Content that never changes, compressed when a client first asks for that."""

    content: bytes
    content_type: str

    @cached_property
    def compressed(self) -> bytes:
        """The content under gzip."""
        return gzip.compress(self.content, 9, mtime=0)

    def reply(self, request: web.Request, headers: Mapping[str, str]) -> web.Response:
        """Return the content in a form that the client takes. ``headers`` may have a ``Vary``."""
        body, sent = self.content, {**headers, "Content-Type": self.content_type}
        sent["Vary"] = ", ".join(filter(None, (headers.get("Vary"), "Accept-Encoding")))
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body, sent["Content-Encoding"] = self.compressed, "gzip"
        return web.Response(body=body, headers=sent)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


BODY_ERRORS = (400, 408, 413, 415, 503)


GENERATION_ERRORS = (*BODY_ERRORS, 404, 410, 424, 429, 503, 504)


STORE_ERRORS = (404, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A text in the URL or in a header. ``place``: "path", "query" or "header"; only a path's may not be left out."""

    name: str
    place: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A handler and its description.

    ``summary``: one line for users of the API. ``body``: the type of the body; several if any of them is accepted.
    ``form``: the type of a form, in place of a body.
    ``replies``: pairs of content type and type of a successful reply (for events, of each event's data).
    ``errors``: statuses beyond 404, 405, 500 and, where a key is needed, 401.
    ``open``: the route needs no API key. ``operator``: it needs an operator's, or without keys a
    client on this host.
    ``alias``: tells the operation from another one with the same handler.
    ``slashes``: the names in the path may have slashes.
    ``tag``: the group in which it is described.
    """

    method: str
    path: str
    handler: Handler
    dialect: Dialect
    summary: str
    parameters: tuple[Parameter, ...] = ()
    body: tuple[type, ...] = ()
    form: type | None = None
    replies: tuple[tuple[str, object], ...] = ()
    errors: tuple[int, ...] = ()
    open: bool = False
    operator: bool = False
    alias: str = ""
    slashes: bool = False
    tag: Tag

    @property
    def operation_id(self) -> str:
        """The name that tells it from all others."""
        return "_".join(filter(None, (self.handler.__name__, self.alias)))

    @property
    def pattern(self) -> str:
        """The path as aiohttp matches it."""
        return self.path.replace("}", ":.+}") if self.slashes else self.path

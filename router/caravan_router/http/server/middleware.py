"""Middlewares of every route: request id, access log, errors as JSON, CORS."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Sequence

from aiohttp import hdrs, web

from caravan_dialects.api.error_table import REASON_HEADER
from caravan_dialects.api.errors import (
    ExpectationError,
    ForeignPageError,
    MethodNotAllowedError,
    NotFoundError,
    RequestError,
)
from caravan_dialects.conversations.store import StoreError
from caravan_proto.telemetry import ACCESS_LOG
from caravan_router.http.server.dialect import DIALECTS, error_response
from caravan_router.http.server.event_stream import STREAM_BEGUN
from caravan_router.http.server.ignored import IGNORED_HEADER
from caravan_router.http.server.route import Handler
from caravan_router.http.server.state import ARRIVED, CLIENT, ENDING, STATE, TRACE, TRACING
from caravan_scheduler.core.errors import EngineError
from caravan_scheduler.core.trace import NO_TRACE, ArrivedRequest, RequestTrace

log = logging.getLogger(__name__)
access_log = logging.getLogger(ACCESS_LOG)

REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_HEADER = "X-Request-Id"

# Request ids are written to the log and back to the client: no line breaks, bounded length.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# Probes and scrapers ask for these every few seconds.
_QUIET = frozenset({"/health", "/v1/health", "/ping", "/livez", "/readyz", "/metrics"})
# The page sends it with what it asks for by itself, and its own files are below this path.
PAGE_HEADER = "X-Caravan-Page"
_PAGE_FILES = "/page/"

CLIENT_CLOSED = 499
_FIRST_ERROR = 400
# In place of a route and of a method, which clients could invent without end.
_NO_ROUTE, _OTHER_METHOD = "none", "other"
# Methods that change nothing and generate nothing.
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_LOGGED_CHARACTERS = 200


@web.middleware
async def identify_and_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Take the client's request id or make one, and begin its trace; count and log the request when it has ended."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    trace = request[TRACE] = _trace_of(request)
    status = 500
    try:
        response = await handler(request)
        status = response.status
    except web.HTTPException as error:
        status = error.status
        raise
    except (asyncio.CancelledError, ConnectionError):
        status = CLIENT_CLOSED
        raise
    finally:
        trace.end(status)
        _count(request, status)
        client = request.get(CLIENT)
        access_log.log(
            logging.DEBUG if _is_quiet(request, status) else logging.INFO,
            "%s %s %d %.3f s",
            request.method,
            # The raw path: a decoded one may contain line breaks.
            request.rel_url.raw_path[:_LOGGED_CHARACTERS],
            status,
            time.monotonic() - request[ARRIVED],
            extra={
                "request_id": request[REQUEST_ID],
                "status": status,
                "remote": request.remote,
                "key": "" if client is None else client.key.tenant.name,
                **_trace_field(trace),
            },
        )
    return response


def _count(request: web.Request, status: int) -> None:
    """Count a request that has ended. As in vLLM's counter, those of probes and scrapers would hide the others."""
    if request.path in _QUIET:
        return
    resource = request.match_info.route.resource
    request.app[STATE].metrics.http_request(
        _NO_ROUTE if resource is None else resource.canonical,
        request.method if request.method in hdrs.METH_ALL else _OTHER_METHOD,
        status,
    )


def _is_quiet(request: web.Request, status: int) -> bool:
    """Whether a request is one of many that no one made by hand, and went well if it is the page's."""
    if request.path in _QUIET:
        return True
    of_page = PAGE_HEADER in request.headers or request.path.startswith(_PAGE_FILES)
    return of_page and request.method in _READING and (status < _FIRST_ERROR or status == CLIENT_CLOSED)


def _trace_of(request: web.Request) -> RequestTrace:
    """Begin the span of a POST request to a known route, which may generate. Other requests are not traced."""
    tracing, resource = request.app.get(TRACING), request.match_info.route.resource
    if tracing is None or request.method != "POST" or resource is None:
        return NO_TRACE
    return tracing.request(
        ArrivedRequest(
            method=request.method,
            route=resource.canonical,
            request_id=request[REQUEST_ID],
            arrived_s=request[ARRIVED],
            traceparent=tuple(request.headers.getall("traceparent", ())),
            tracestate=tuple(request.headers.getall("tracestate", ())),
        )
    )


def _trace_field(trace: RequestTrace) -> dict[str, str]:
    """Return the field that names a trace in the log; none if the request is not traced."""
    return {"trace_id": trace.trace_id} if trace.trace_id else {}


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in the dialect of the request's route."""
    dialect = request.app[DIALECTS].of(request)
    try:
        return await handler(request)
    except (RequestError, EngineError, StoreError) as error:
        return error_response(dialect, error, request[REQUEST_ID])
    except web.HTTPNotFound:
        return error_response(dialect, NotFoundError(request.path), request[REQUEST_ID])
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return error_response(dialect, MethodNotAllowedError(request.method, allowed), request[REQUEST_ID])
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        log.exception("request %s failed", request[REQUEST_ID], extra=_trace_field(request[TRACE]))
        if request.get(STREAM_BEGUN, False):
            # Too late for a status: the server closes the connection, which the client sees as a broken stream.
            raise
        return error_response(dialect, error, request[REQUEST_ID])


async def expected(request: web.Request) -> web.Response | None:
    """Tell a client that sent ``Expect: 100-continue`` to send its body. aiohttp calls this before any middleware."""
    given = request.headers["Expect"]
    if given.lower() != "100-continue":
        return error_response(request.app[DIALECTS].of(request), ExpectationError(given))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # These bytes are not part of the response.
    request.writer.output_size = 0
    return None


class Cors:
    """CORS as TGI has it, and with DELETE: from any origin unless the operator names origins."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._allowed = frozenset(allowed_origins)
        self._varies = bool(self._allowed) and "*" not in self._allowed

    def _headers(self, request: web.Request) -> dict[str, str]:
        if not self._varies:
            return {"Access-Control-Allow-Origin": "*"}
        origin = request.headers.get("Origin")
        return {"Access-Control-Allow-Origin": origin} if origin in self._allowed and origin is not None else {}

    def _is_foreign(self, request: web.Request) -> bool:
        """Whether a page asks that is neither of an allowed origin nor this server's own."""
        origin = request.headers.get("Origin")
        if not self._varies or origin is None or origin in self._allowed:
            return False
        if request.headers.get("Sec-Fetch-Site") == "same-origin":
            return False
        # A proxy that ends TLS asks over HTTP.
        return origin.partition("://")[2] != request.host

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a browser's preflight request, and refuse what a page of another origin sends without one.

        Browsers send a body without a type unasked: the page cannot read the answer, but would use the model.
        """
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            # Browsers open WebSocket connections of any page without asking.
            changes = request.method not in _READING or "Upgrade" in request.headers
            if changes and self._is_foreign(request):
                error = ForeignPageError(request.headers["Origin"])
                return error_response(request.app[DIALECTS].of(request), error, request[REQUEST_ID])
            return await handler(request)
        # Any header is allowed: clients send a dozen of their own, and unknown ones have no effect.
        asked = request.headers.get("Access-Control-Request-Headers", "")
        names = asked if asked.isascii() and asked.isprintable() else ""
        return web.Response(
            headers={"Access-Control-Allow-Methods": "GET,POST,DELETE", "Access-Control-Allow-Headers": names}
        )

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the CORS headers just before headers are sent, on streams too."""
        response.headers.update(self._headers(request))
        if self._varies:
            response.headers["Vary"] = ", ".join(filter(None, (response.headers.get("Vary"), "Origin")))
        response.headers["Access-Control-Expose-Headers"] = (
            f"{REQUEST_ID_HEADER},{IGNORED_HEADER},{REASON_HEADER},Retry-After"
        )


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id just before headers are sent, on streams too."""
    if REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
        if (name := request.app[DIALECTS].of(request).id_header) is not None:
            response.headers[name] = request[REQUEST_ID]


async def end_connection(request: web.Request, response: web.StreamResponse) -> None:
    """Let a reply be the last on its connection if the server ends."""
    if request.app[ENDING].is_set():
        response.force_close()
        response.headers["Connection"] = "close"

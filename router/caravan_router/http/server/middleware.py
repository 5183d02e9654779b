"""Around every handler: request id, access log, errors as JSON, CORS."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from caravan_router.core.errors import EngineError
from caravan_router.http.server.errors import (
    ExpectationError,
    MethodNotAllowedError,
    NotFoundError,
    RequestError,
    error_response,
)
from caravan_router.http.server.event_stream import STREAM_BEGUN
from caravan_router.http.server.state import CLIENT

log = logging.getLogger(__name__)
access_log = logging.getLogger("caravan.access")

REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_HEADER = "X-Request-Id"

# It goes into the log and back to the client: nothing that could break a line, and not long.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# What probes and scrapers ask every few seconds.
_QUIET = frozenset({"/health", "/ping", "/metrics"})

CLIENT_CLOSED = 499
_LOGGED_CHARACTERS = 200

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def identify_and_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Takes the client's request id, or makes one; writes a line when the request has ended."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    began = time.monotonic()
    status = 500
    try:
        response = await handler(request)
        status = response.status
    except (asyncio.CancelledError, ConnectionResetError):
        status = CLIENT_CLOSED
        raise
    finally:
        client = request.get(CLIENT)
        access_log.log(
            logging.DEBUG if request.path in _QUIET else logging.INFO,
            "%s %s %d %.3f s",
            request.method,
            # As it was sent: what is quoted in it may be a line break.
            request.rel_url.raw_path[:_LOGGED_CHARACTERS],
            status,
            time.monotonic() - began,
            extra={
                "request_id": request[REQUEST_ID],
                "status": status,
                "remote": request.remote,
                "key": "" if client is None else client.key.tenant.name,
            },
        )
    return response


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error a client sees has a JSON body, in the dialect of its route."""
    try:
        return await handler(request)
    except (RequestError, EngineError) as error:
        return error_response(error, request.path)
    except web.HTTPNotFound:
        return error_response(NotFoundError(request.path), request.path)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return error_response(MethodNotAllowedError(request.method, allowed), request.path)
    except (web.HTTPException, ConnectionResetError):
        raise
    except Exception as error:
        log.exception("request %s failed", request[REQUEST_ID])
        if request.get(STREAM_BEGUN, False):
            # Too late for a status: the server closes the connection, which the client sees as a broken stream.
            raise
        return error_response(error, request.path)


async def expected(request: web.Request) -> web.Response | None:
    """Where a client waits to be told to send its body. aiohttp asks before any middleware."""
    given = request.headers["Expect"]
    if given.lower() != "100-continue":
        return error_response(ExpectationError(given), request.path)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # The answer has not begun.
    request.writer.output_size = 0
    return None


class Cors:
    """TGI's: GET and POST, from anywhere unless origins are named."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._allowed = frozenset(allowed_origins)

    def _headers(self, request: web.Request) -> dict[str, str]:
        if not self._allowed or "*" in self._allowed:
            return {"Access-Control-Allow-Origin": "*"}
        origin = request.headers.get("Origin")
        allow = {"Access-Control-Allow-Origin": origin} if origin in self._allowed and origin is not None else {}
        return {"Vary": "Origin", **allow}

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers a browser's question whether it may."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return await handler(request)
        # Whatever it would send: clients have headers of their own (OpenAI's a dozen), and none that is not known here
        # has an effect.
        asked = request.headers.get("Access-Control-Request-Headers", "")
        names = asked if asked.isascii() and asked.isprintable() else ""
        return web.Response(headers={"Access-Control-Allow-Methods": "GET,POST", "Access-Control-Allow-Headers": names})

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """As headers are about to leave, streams included."""
        response.headers.update(self._headers(request))
        response.headers["Access-Control-Expose-Headers"] = f"{REQUEST_ID_HEADER},Retry-After"


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """As headers are about to leave, streams included."""
    if REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]

"""Reads the bytes of a request's body."""

import asyncio

from aiohttp import web

from caravan_dialects.api.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    BrokenBodyError,
    UnsupportedCodingError,
    UnsupportedMediaError,
)
from caravan_router.http.server.body_room import SHARE
from caravan_router.http.server.state import STATE, AppState

_CODINGS = frozenset({"identity", "gzip", "deflate"})

_PLAIN_BYTES = 2_000_000
# Some pictures, in base64.
_MEDIA_BYTES = 32 << 20

_BODY = web.RequestKey("body", bytes)


def payload_limit(state: AppState) -> int:
    """Return the most bytes of a body, by the models that are known now."""
    if state.limits.payload_limit is not None:
        return state.limits.payload_limit
    engines = state.fleet.engines
    # A model that is not known yet, or not loaded, may see.
    unknown = not engines or state.catalogue is not None
    return _MEDIA_BYTES if unknown or any(engine.model.media for engine in engines) else _PLAIN_BYTES


async def read_json(request: web.Request, *, any_type: bool = False) -> bytes:
    """Read and decompress the body; the size limit counts decompressed bytes.

    ``any_type``: it counts as JSON whatever its content type says, but not for pages of other servers. Browsers let
    these send a few content types without asking this server first; JSON is not among them.

    Raises UnsupportedMediaError, UnsupportedCodingError, BodyTimeoutError, BrokenBodyError, and what `read_bytes` does.
    """
    if (
        "Content-Type" in request.headers
        and not _is_json(request.content_type)
        and not (any_type and _is_of_no_other_page(request))
    ):
        raise UnsupportedMediaError(request.content_type)
    coding = request.headers.get("Content-Encoding", "identity")
    if coding.lower() not in _CODINGS:
        raise UnsupportedCodingError(coding)
    limit_s = request.app[STATE].limits.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await read_bytes(request)
    except TimeoutError as error:
        raise BodyTimeoutError(limit_s) from error
    except web.RequestPayloadError as error:
        raise BrokenBodyError from error


async def read_bytes(request: web.Request) -> bytes:
    """Return the decompressed body, which is read once.

    Raises BodyTooLargeError, and what `BodyShare.grow` does.
    """
    if _BODY not in request:
        limit, share = payload_limit(request.app[STATE]), request[SHARE]
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > limit:
                raise BodyTooLargeError(limit)
            share.grow(len(chunk))
        request[_BODY] = bytes(body)
    return request[_BODY]


def forget_body(request: web.Request) -> None:
    """Free the bytes of a body that was decoded: with pictures, they are many."""
    if _BODY in request:
        request[SHARE].shrink(len(request[_BODY]))
        del request[_BODY]


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


def _is_of_no_other_page(request: web.Request) -> bool:
    own = f"{request.scheme}://{request.host}"
    return request.headers.get("Origin", own) == own

"""Reads a request's body into its type."""

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web

from caravan_router.api.body import decode
from caravan_router.api.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    MalformedBodyError,
    UnsupportedCodingError,
    UnsupportedMediaError,
)
from caravan_router.http.server.state import NAMED_MODEL, STATE

T = TypeVar("T")

_CODINGS = frozenset({"identity", "gzip", "deflate"})


async def read_json(request: web.Request) -> bytes:
    """Read and decompress the body; the size limit counts decompressed bytes.

    Raises UnsupportedMediaError, UnsupportedCodingError, BodyTimeoutError, BodyTooLargeError, MalformedBodyError.
    """
    if "Content-Type" in request.headers and not _is_json(request.content_type):
        raise UnsupportedMediaError(request.content_type)
    coding = request.headers.get("Content-Encoding", "identity")
    if coding.lower() not in _CODINGS:
        raise UnsupportedCodingError(coding)
    limit_s = request.app[STATE].limits.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError as error:
        raise BodyTimeoutError(limit_s) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLargeError(request.client_max_size) from error
    except web.RequestPayloadError as error:
        raise MalformedBodyError("it could not be decompressed or ended early") from error


async def read_body(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Read and decode the body.

    msgspec alone reads the JSON: the standard library accepts NaN, lone surrogates and infinite numbers.
    Raises BodyMismatchError, and what `read_json` raises.
    """
    body = decode(await read_json(request), decoder)
    request[NAMED_MODEL] = getattr(body, "model", None) or ""
    return body


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")

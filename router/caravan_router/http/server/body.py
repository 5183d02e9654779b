"""Reads a request's body into its type."""

import asyncio
import re
from typing import TypeVar

import msgspec
from aiohttp import web

from caravan_router.http.server.errors import (
    BodyMismatchError,
    BodyTimeoutError,
    BodyTooLargeError,
    MalformedBodyError,
    UnsupportedCodingError,
    UnsupportedMediaError,
)
from caravan_router.http.server.state import STATE

T = TypeVar("T")

_CODINGS = frozenset({"identity", "gzip", "deflate"})
_REASON_CHARACTERS = 300
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_PATH = re.compile(r" at `\$\.([^`]*)`$")


async def read_body(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Read, decompress and decode the body; the size limit counts decompressed bytes.

    msgspec alone reads the JSON: the standard library accepts NaN, lone surrogates and infinite numbers.
    Raises UnsupportedMediaError, UnsupportedCodingError, BodyTimeoutError, BodyTooLargeError, MalformedBodyError,
    BodyMismatchError.
    """
    if "Content-Type" in request.headers and not _is_json(request.content_type):
        raise UnsupportedMediaError(request.content_type)
    coding = request.headers.get("Content-Encoding", "identity")
    if coding.lower() not in _CODINGS:
        raise UnsupportedCodingError(coding)
    limit_s = request.app[STATE].limits.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            data = await request.read()
    except TimeoutError as error:
        raise BodyTimeoutError(limit_s) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLargeError(request.client_max_size) from error
    except web.RequestPayloadError as error:
        raise MalformedBodyError("it could not be decompressed or ended early") from error
    return decode(data, decoder)


def decode(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], inside: str = "") -> T:
    """Decode a body, or the part of it that is ``inside`` a field. Raises MalformedBodyError, BodyMismatchError."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise mismatch(error, inside) from error
    except msgspec.DecodeError as error:
        raise MalformedBodyError(str(error)) from error
    except UnicodeDecodeError as error:
        raise MalformedBodyError("a string is not valid UTF-8") from error
    except RecursionError as error:
        raise MalformedBodyError("it is nested too deeply") from error


def mismatch(error: msgspec.ValidationError, inside: str) -> BodyMismatchError:
    """Return the error of a body that has not its type, or of the part of it that is ``inside`` a field."""
    # The message quotes the client's own names and values, which may have any length.
    reason = _placed(str(error)[:_REASON_CHARACTERS], inside)
    return BodyMismatchError(_field_of(reason), reason)


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


def _placed(reason: str, inside: str) -> str:
    if not inside:
        return reason
    return reason.replace("at `$", f"at `$.{inside}", 1) if "at `$" in reason else f"{reason} - at `$.{inside}`"


def _field_of(message: str) -> str:
    path, unknown = _PATH.search(message), _UNKNOWN_FIELD.search(message)
    return ".".join(found[1] for found in (path, unknown) if found)

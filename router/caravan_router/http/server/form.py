"""Reads a form with a file into its type."""

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from caravan_dialects.api.body import mismatch
from caravan_dialects.api.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    BrokenBodyError,
    MalformedFormError,
    UnsupportedMediaError,
)
from caravan_router.http.server.body import SHARE, payload_limit
from caravan_router.http.server.ignored import note_ignored
from caravan_router.http.server.state import NAMED_MODEL, STATE

T = TypeVar("T", bound=msgspec.Struct)

FORM = "multipart/form-data"
# A field that is no file, and the fields of a form.
_MAX_TEXT_BYTES, _MAX_FIELDS = 64 << 10, 64


async def read_form(request: web.Request, kind: type[T]) -> T:
    """Read a form; a field of bytes is a file.

    Raises UnsupportedMediaError, BodyTimeoutError, BodyTooLargeError, BrokenBodyError, MalformedFormError,
    BodyMismatchError, and what `BodyShare.grow` does.
    """
    if request.content_type != FORM:
        raise UnsupportedMediaError(request.content_type, FORM)
    limit_s = request.app[STATE].limits.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            fields = await _fields(request, payload_limit(request.app[STATE]))
    except TimeoutError as error:
        raise BodyTimeoutError(limit_s) from error
    if not request.app[STATE].limits.strict_fields:
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        note_ignored(request, [name for name in fields if name not in known])
        fields = {name: value for name, value in fields.items() if name in known}
    try:
        form = msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise mismatch(error, "") from error
    request[NAMED_MODEL] = getattr(form, "model", None) or ""
    return form


async def _fields(request: web.Request, limit: int) -> dict[str, str | bytes]:
    fields: dict[str, str | bytes] = {}
    left = limit
    try:
        reader = await request.multipart()
        while (part := await reader.next()) is not None:
            if not isinstance(part, BodyPartReader) or part.name is None:
                raise MalformedFormError("each of its parts must have a name")
            if len(fields) >= _MAX_FIELDS:
                raise MalformedFormError(f"it may have at most {_MAX_FIELDS} fields")
            most = left if part.filename is not None else min(left, _MAX_TEXT_BYTES)
            data = bytearray()
            while chunk := await part.read_chunk():
                data += chunk
                if len(data) > most:
                    raise BodyTooLargeError(limit if most == left else _MAX_TEXT_BYTES)
                request[SHARE].grow(len(chunk))
            left -= len(data)
            fields[part.name] = bytes(data) if part.filename is not None else data.decode()
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError) as error:
        raise MalformedFormError(str(error)[:200] or "it ends early") from error
    except web.RequestPayloadError as error:
        raise BrokenBodyError from error
    return fields

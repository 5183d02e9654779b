"""Reads a request's body into its type, and tells of the fields that it ignores."""

from enum import Enum, auto
from typing import TypeVar

import msgspec
from aiohttp import web

from caravan_dialects.api.body import most_decoded_bytes
from caravan_dialects.api.generation.reading import BodyReader
from caravan_router.http.server.body import read_json
from caravan_router.http.server.body_room import SHARE
from caravan_router.http.server.ignored import note_ignored
from caravan_router.http.server.state import NAMED_MODEL, STATE

T = TypeVar("T", bound=msgspec.Struct)


class Tolerance(Enum):
    """Whether bodies may have unknown fields: never, unless the operator wants to know of them, or always."""

    NEVER = auto()
    BY_DEFAULT = auto()
    ALWAYS = auto()


async def read_body(request: web.Request, reader: BodyReader[T], tolerance: Tolerance, *, any_type: bool = False) -> T:
    """Read and decode the body. ``any_type``: it is JSON whatever its content type says, if no page sent it.

    msgspec alone reads the JSON: the standard library accepts NaN, lone surrogates and infinite numbers.
    Raises MalformedBodyError, BodyMismatchError, ValidationError, and what `read_json` raises.
    """
    in_path = request.match_info.get("model")
    if in_path:
        request[NAMED_MODEL] = in_path
    exact = tolerance is Tolerance.NEVER or (
        tolerance is Tolerance.BY_DEFAULT and request.app[STATE].limits.strict_fields
    )
    data = await read_json(request, any_type=any_type)
    request[SHARE].grow(most_decoded_bytes(data))
    body, ignored = reader.read(data, exact=exact)
    note_ignored(request, ignored)
    if not in_path:
        request[NAMED_MODEL] = getattr(body, "model", None) or ""
    return body

"""Reads bodies of agents, which send fields that change with every release. Unknown ones are logged and ignored."""

import logging
from typing import TypeVar

import msgspec
from aiohttp import web

from caravan_router.api.body import decode
from caravan_router.http.server.body import read_body, read_bytes
from caravan_router.http.server.dialect import path_of

T = TypeVar("T", bound=msgspec.Struct)

log = logging.getLogger(__name__)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MOST_NAMES = 256
_SHOWN_CHARACTERS = 60


class IgnoredNames:
    """Logs each name that a router ignores once. Clients choose the names, so only the first few hundred count."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def note(self, where: str, name: str) -> None:
        """Log that ``name`` is ignored in ``where``, such as a route, unless this was logged before."""
        entry = (where, name[:_SHOWN_CHARACTERS])
        if entry not in self._seen and len(self._seen) < _MOST_NAMES:
            self._seen.add(entry)
            log.info("ignored %r in %s", entry[1], where)


IGNORED = web.AppKey("ignored", IgnoredNames)


async def read_tolerant_body(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Read a body whose type allows unknown fields, and log their names. Raises what `read_body` raises."""
    read = await read_body(request, decoder)
    known = {field.encode_name for field in msgspec.structs.fields(decoder.type)}
    for name in decode(await read_bytes(request), _FIELDS):
        if name not in known:
            request.app[IGNORED].note(path_of(request), name)
    return read

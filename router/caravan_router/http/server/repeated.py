"""Requests that may be sent again: with the same ``Idempotency-Key``, they get what the first one has made.

What a request makes has an id that follows from the key. So the store itself tells, at any router and also after a
restart, whether it was made. A request that made nothing, as one that was refused, leaves nothing behind.
"""

import hashlib

from aiohttp import web

from caravan_dialects.api.generation.rules import header_error
from caravan_router.http.server.route import Parameter
from caravan_router.http.server.state import owner_of

_HEADER = "Idempotency-Key"
_MAX_CHARACTERS = 255
REPEATABLE = Parameter(
    name=_HEADER, place="header", description="A request with the key of an earlier one gets what that one has made"
)


def keyed_id(request: web.Request, prefix: str) -> str | None:
    """Return the id of what a request with a key makes, such as ``file_9f86...``; else None. Raises ValidationError."""
    key = request.headers.get(_HEADER)
    if key is None:
        return None
    if not 1 <= len(key) <= _MAX_CHARACTERS:
        raise header_error(_HEADER, f"a text of 1 to {_MAX_CHARACTERS} characters", key)
    named = "\0".join((prefix, owner_of(request), key))
    return f"{prefix}_{hashlib.sha256(named.encode(errors='surrogateescape')).hexdigest()[:32]}"

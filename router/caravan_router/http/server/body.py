"""Reads the bytes of a request's body."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import TypeVar

import msgspec
from aiohttp import web

from caravan_dialects.api.body import most_decoded_bytes
from caravan_dialects.api.errors import (
    BodiesTooLargeError,
    BodyTimeoutError,
    BodyTooLargeError,
    BrokenBodyError,
    DecodedBodyTooLargeError,
    UnsupportedCodingError,
    UnsupportedMediaError,
)
from caravan_dialects.api.generation.reading import BodyReader
from caravan_router.http.server.ignored import note_ignored
from caravan_router.http.server.route import Handler
from caravan_router.http.server.state import CLIENT, NAMED_MODEL, STATE, AppState

_CODINGS = frozenset({"identity", "gzip", "deflate"})
_PLAIN_BYTES = 2_000_000
# Some pictures, in base64.
_MEDIA_BYTES = 32 << 20


class BodyRoom:
    """Knows what each client holds of ``limit`` bytes.

    A client may hold as much as it leaves free. So one client gets a half at most, two a third each, and a client that
    comes later always finds room.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()
        self.total = 0

    @contextmanager
    def share(self, owner: str) -> Iterator["BodyShare"]:
        """Return the part of one request of ``owner``, which is given back at the end of the block."""
        share = BodyShare(self, owner)
        try:
            yield share
        finally:
            share.release()

    @property
    def most_for_one(self) -> int:
        """The bytes that one client may hold while it is alone."""
        return self._limit // 2

    def take(self, owner: str, count: int) -> None:
        """Let ``owner`` hold ``count`` bytes more. Raises BodiesTooLargeError."""
        if self._held[owner] + count > self._limit - self.total - count:
            raise BodiesTooLargeError(self._limit)
        self._held[owner] += count
        self.total += count

    def give_back(self, owner: str, count: int) -> None:
        """Let ``owner`` hold ``count`` bytes less."""
        self.total -= count
        self._held[owner] -= count
        if not self._held[owner]:
            del self._held[owner]


class BodyShare:
    """What one request holds: see `BodyRoom.share`."""

    __slots__ = ("_held", "_owner", "_room")

    def __init__(self, room: BodyRoom, owner: str) -> None:
        self._room = room
        self._owner = owner
        self._held = 0

    def another(self) -> "BodyShare":
        """Return the part of another request of the same client, which is empty."""
        return BodyShare(self._room, self._owner)

    def grow(self, count: int) -> None:
        """Hold ``count`` bytes more. Raises DecodedBodyTooLargeError if that never fits, BodiesTooLargeError."""
        if self._held + count > self._room.most_for_one:
            raise DecodedBodyTooLargeError(self._held + count, self._room.most_for_one)
        self._room.take(self._owner, count)
        self._held += count

    def shrink(self, count: int) -> None:
        """Hold ``count`` bytes less."""
        self._room.give_back(self._owner, count)
        self._held -= count

    def release(self) -> None:
        """Hold nothing."""
        self.shrink(self._held)


SHARE = web.RequestKey("body_share", BodyShare)


class BoundingBodies:
    """The middleware that gives each request its share of the room. It runs when the client is known."""

    def __init__(self, limit: int) -> None:
        self._room = BodyRoom(limit)

    @web.middleware
    async def bound(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Hold what the body takes until the request has ended."""
        client = request.get(CLIENT)
        # Without keys, hosts are told apart. A proxy is one client.
        owner = (client.key.tenant.name if client is not None else "") or request.remote or ""
        with self._room.share(owner) as request[SHARE]:
            return await handler(request)


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


def keep_body(request: web.Request, body: bytes) -> None:
    """Count ``body``, which did not come as that of an HTTP request. Raises what `BodyShare.grow` does."""
    request[SHARE].grow(len(body))
    request[_BODY] = body


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

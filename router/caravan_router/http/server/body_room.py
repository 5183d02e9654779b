"""Bounds the memory that the bodies of all open requests take together, and shares it between clients."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from caravan_dialects.api.errors import BodiesTooLargeError, DecodedBodyTooLargeError
from caravan_router.http.server.route import Handler
from caravan_router.http.server.state import CLIENT


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

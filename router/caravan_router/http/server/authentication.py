"""The middleware that finds the client of a request."""

from collections.abc import Set as AbstractSet

from aiohttp import web

from caravan_router.auth.client import Client
from caravan_router.auth.key import NO_KEY
from caravan_router.auth.keyring import Keyring
from caravan_router.http.server.errors import InvalidKeyError, MissingKeyError
from caravan_router.http.server.middleware import Handler
from caravan_router.http.server.state import CLIENT

_NOBODY = Client(NO_KEY, now=0.0)


class Authentication:
    """Identifies clients by ``Authorization: Bearer KEY``. Without a keyring there is one client, without limits."""

    def __init__(self, keyring: Keyring | None, open_routes: AbstractSet[tuple[str, str]]) -> None:
        """``open_routes``: pairs of method and path that need no key."""
        self._keyring = keyring
        self._open_routes = open_routes

    @web.middleware
    async def identify(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Find the client before the body is read. An unknown route needs a key too, so that keys hide what exists."""
        if self._keyring is None:
            request[CLIENT] = _NOBODY
        elif (request.method, request.path) not in self._open_routes:
            request[CLIENT] = _find(self._keyring, request.headers.get("Authorization", ""))
        return await handler(request)


def _find(keyring: Keyring, authorization: str) -> Client:
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise MissingKeyError
    client = keyring.find(secret.strip())
    if client is None:
        raise InvalidKeyError
    return client

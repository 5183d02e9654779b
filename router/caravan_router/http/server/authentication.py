"""The middleware that finds the client of a request."""

import ipaddress
import socket
from collections.abc import Iterable

from aiohttp import HttpVersion11, web

from caravan_dialects.api.errors import ForbiddenError, InvalidKeyError, MissingKeyError, NotLocalError
from caravan_dialects.auth.client import Client
from caravan_dialects.auth.key import NO_KEY
from caravan_router.auth.keyring import Keyring
from caravan_router.http.server.dialect import path_of
from caravan_router.http.server.route import Handler, Route
from caravan_router.http.server.state import CLIENT, AppState
from caravan_scheduler.core.engine import ANY_SENDER, TEXT_SENDER, TextSender

# Of Anthropic's clients and of Google's.
_KEY_HEADERS = ("x-api-key", "x-goog-api-key")
# The client of every request on a server without keys.
NOBODY = Client(NO_KEY, now=0.0)
# Proxies add them.
_SENT_FOR_OTHERS = (
    "Forwarded",
    "X-Forwarded-For",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Real-IP",
    "X-Client-IP",
    "CF-Connecting-IP",
    "True-Client-IP",
    "Via",
)


def client_named(state: AppState, owner: str) -> Client | None:
    """Return the client of the API key of this name, for what is done after its request; None if there is none."""
    if state.keyring is not None:
        return state.keyring.client(owner)
    return NOBODY if owner == NOBODY.key.tenant.name else None


class Authentication:
    """Identifies clients by ``Authorization: Bearer KEY``, or else by ``x-api-key: KEY``, as Anthropic's send it.

    Google's send ``x-goog-api-key: KEY``, or, to their own routes, ``?key=KEY`` in the URL.

    Without a keyring there is one client, without limits, and only programs on this host may use operators' routes.
    """

    def __init__(self, keyring: Keyring | None, routes: Iterable[Route]) -> None:
        self._keyring = keyring
        self._routes = {(route.method, route.path): route for route in routes}

    @web.middleware
    async def identify(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Find the client before the body is read. An unknown route needs a key too, so that keys hide what exists."""
        route = self._routes.get((request.method, path_of(request)))
        if self._keyring is None:
            if route is not None and route.operator and not _is_local(request):
                raise NotLocalError
            request[CLIENT] = NOBODY
        elif route is None or not route.open:
            request[CLIENT] = find_client(self._keyring, request, route)
        if route is not None and route.operator and not request[CLIENT].key.operator:
            raise ForbiddenError
        TEXT_SENDER.set(TextSender(tenant=request[CLIENT].key.tenant) if CLIENT in request else ANY_SENDER)
        return await handler(request)


def _is_local(request: web.Request) -> bool:
    """Whether a program on this host asks for itself or for this server's page, and not as a proxy."""
    if any(name in request.headers for name in _SENT_FOR_OTHERS) or not _is_of_own_page(request):
        return False
    # As nginx asks that adds no header, with the host's own address as the name.
    if request.version < HttpVersion11:
        return False
    try:
        return ipaddress.ip_address(request.remote or "").is_loopback
    except ValueError:
        return False


def _is_of_own_page(request: web.Request) -> bool:
    """Whether no page of another server asks, by what browsers tell.

    A page may let its own host's name lead to this host after it was loaded, so only names that are sure to mean this
    host count.
    """
    headers = request.headers
    if "Host" not in headers:
        # No browser leaves it out.
        return True
    own = f"{request.scheme}://{request.host}"
    if headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"} or headers.get("Origin", own) != own:
        return False
    try:
        name = request.url.host or ""
        return name in {"localhost", socket.gethostname()} or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _secret_of(request: web.Request, route: Route | None) -> str:
    """Return the key that the request carries; "" for none."""
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    for header in _KEY_HEADERS:
        if key := request.headers.get(header, "").strip():
            return key
    name = None if route is None else route.dialect.key_parameter
    return "" if name is None else request.query.get(name, "").strip()


def find_client(keyring: Keyring, request: web.Request, route: Route | None = None) -> Client:
    """Return the client whose key ``request`` carries. Raises MissingKeyError, InvalidKeyError."""
    secret = _secret_of(request, route)
    if not secret:
        raise MissingKeyError
    client = keyring.find(secret)
    if client is None:
        raise InvalidKeyError
    return client

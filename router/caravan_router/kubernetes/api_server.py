"""Lists and watches EndpointSlices at the API server, with the service account of this pod.

https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from caravan_router.kubernetes.endpoint_slices import EndpointSlice, SliceList

# The API server ends a watch after this many seconds, so that a new token comes into use and a lost connection is
# noticed; within that time and the next it says something.
_WATCH_S = 120
_SILENCE_S = 135.0
_CONNECT_S = 10.0
_PAGE = 500
_GONE = 410
_KEPT = 300


class ApiServerError(Exception):
    """The API server does not answer as it should."""


class ExpiredError(ApiServerError):
    """The API server does not know any more what happened since the version: list again."""


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class Event(msgspec.Struct, frozen=True):
    """``type`` is ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: msgspec.Raw


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """Where the API server is, and the folder with the token and the authority by which pods talk to it.

    Kubernetes renews the token there, so that it is read for each call.
    """

    url: str = "https://kubernetes.default.svc"
    folder: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")

    def token(self) -> str:
        """Raises OSError."""
        return (self.folder / "token").read_text("ascii").strip()

    def tls(self) -> ssl.SSLContext:
        """Raises OSError."""
        return ssl.create_default_context(cafile=str(self.folder / "ca.crt"))


class ApiServer:
    """A connection. Every call raises ApiServerError, OSError, TimeoutError or aiohttp.ClientError."""

    def __init__(self, account: ServiceAccount, namespace: str, service: str) -> None:
        self._account = account
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"kubernetes.io/service-name={service}"
        self._namespace = namespace
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        # The authority may be a new one by now, too.
        tls = await asyncio.to_thread(self._account.tls) if self._account.url.startswith("https") else False
        self._session = aiohttp.ClientSession(
            self._account.url,
            connector=aiohttp.TCPConnector(ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S),
        )
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._session.close()

    async def list_slices(self) -> tuple[list[EndpointSlice], str]:
        """Return the Service's slices, and the version from which to watch on."""
        found: list[EndpointSlice] = []
        page = ""
        while True:
            async with await self._get(limit=str(_PAGE), **({"continue": page} if page else {})) as response:
                listed = msgspec.json.decode(await response.read(), type=SliceList)
            found += listed.items
            page = listed.metadata.next_page
            if not page:
                return found, listed.metadata.resource_version

    async def watch(self, version: str) -> AsyncIterator[tuple[str, EndpointSlice]]:
        """Yield the type and the slice of each event since ``version``, until the API server ends the watch.

        Raises ExpiredError if it does not know all of them any more.
        """
        asked = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
        async with await self._get(**asked, timeoutSeconds=str(_WATCH_S)) as response:
            rest = b""
            # A line may be longer than what `readline` takes.
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in filter(None, lines):
                    yield _read(line)

    async def _get(self, **query: str) -> aiohttp.ClientResponse:
        token = await asyncio.to_thread(self._account.token)
        response = await self._session.get(
            self._path,
            params={"labelSelector": self._selector, **query},
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
        )
        if response.status == 200:
            return response
        async with response:
            said = (await response.text(errors="replace"))[:_KEPT]
        if response.status == _GONE:
            raise ExpiredError(said)
        if response.status == 403:
            said = (
                f"the pod's service account needs a Role that lets it list and watch endpointslices in the namespace "
                f"{self._namespace}: {said}"
            )
        raise ApiServerError(f"{response.status} {said}")


def _read(line: bytes) -> tuple[str, EndpointSlice]:
    event = msgspec.json.decode(line, type=Event)
    if event.type != "ERROR":
        return event.type, msgspec.json.decode(event.object, type=EndpointSlice)
    status = msgspec.json.decode(event.object, type=_Status)
    raise (ExpiredError if status.code == _GONE else ApiServerError)(f"{status.code} {status.message}")

"""Follows the pods of a Service in Kubernetes, by the EndpointSlices that its API server reports.

That is sooner than DNS, and includes pods that are ending. Requests use the service account of this pod. See
https://kubernetes.io/docs/reference/kubernetes-api/service-resources/endpoint-slice-v1/ and
https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from caravan_router.engine.discovery import KubernetesService

# The API server ends a watch after this many seconds, so that a new token comes into use and a lost connection is
# noticed; within that time and the next it says something.
_WATCH_S = 120
_SILENCE_S = 135.0
_CONNECT_S = 10.0
_PAGE = 500
_GONE = 410
_KEPT = 300
_log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
# A pod that a slice lacks, but that was not ending, may be in another slice in a moment.
_SURE_S = 2.0


class Conditions(msgspec.Struct, frozen=True):
    """``ready`` that is None means true, and ``terminating`` that is None false."""

    ready: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """A pod. All of its addresses lead to it, and the first one is enough."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions = Conditions()


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of a slice, or of a list of them, which is not complete while ``next_page`` is not empty."""

    name: str = ""
    resource_version: str = ""
    next_page: str = msgspec.field(default="", name="continue")


class EndpointSlice(msgspec.Struct, frozen=True):
    """Some of the pods of a Service, of one family of addresses."""

    metadata: Metadata
    endpoints: tuple[Endpoint, ...] | None = None


class SliceList(msgspec.Struct, frozen=True):
    """The answer to a list."""

    metadata: Metadata
    items: tuple[EndpointSlice, ...] = ()


class KnownPods:
    """The addresses of a Service's pods, ``ip:port``.

    A pod is there from when it is first ready until it terminates or its slice lacks it: its readiness in between is
    for the router to judge, which notices sooner whether a shard answers.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._slices: dict[str, EndpointSlice] = {}
        self.addresses: frozenset[str] = frozenset()
        # Those of pods that are ending.
        self.terminating: frozenset[str] = frozenset()

    def replace(self, slices: Iterable[EndpointSlice]) -> None:
        """Note all slices that there are."""
        self._slices = {one.metadata.name: one for one in slices}
        self._update()

    def put(self, changed: EndpointSlice) -> None:
        """Note a slice that is new or has changed."""
        self._slices[changed.metadata.name] = changed
        self._update()

    def remove(self, deleted: EndpointSlice) -> None:
        """Note that a slice is gone."""
        self._slices.pop(deleted.metadata.name, None)
        self._update()

    def _update(self) -> None:
        pods = [pod for one in self._slices.values() for pod in one.endpoints or () if pod.addresses]
        ending = {self._address(pod) for pod in pods if pod.conditions.terminating}
        staying = {self._address(pod) for pod in pods} - ending
        ready = {self._address(pod) for pod in pods if pod.conditions.ready is not False}
        self.terminating = frozenset(ending)
        self.addresses = frozenset(staying & (ready | self.addresses))

    def _address(self, pod: Endpoint) -> str:
        host = pod.addresses[0]
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"


class ApiServerError(Exception):
    """The API server does not answer as it should."""


_ERRORS = (ApiServerError, OSError, TimeoutError, aiohttp.ClientError, msgspec.MsgspecError, UnicodeError)


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


@dataclass(frozen=True, slots=True)
class WatchedService:
    """A source of addresses that tells by itself when they change."""

    service: KubernetesService
    account: ServiceAccount = field(default_factory=ServiceAccount)

    def __str__(self) -> str:
        return str(self.service)

    async def watch(self, note: Callable[[frozenset[str]], None]) -> None:
        """Call ``note`` with every new set of addresses, until cancelled. The last ones stay while nothing is heard."""
        pods = _Pods(self.service.port, note)
        pause_s, failed = _FIRST_PAUSE_S, False
        try:
            while True:
                try:
                    async with ApiServer(self.account, self.service.namespace, self.service.name) as server:
                        slices, version = await server.list_slices()
                        pods.known.replace(slices)
                        pods.tell()
                        pause_s, failed = _FIRST_PAUSE_S, False
                        await _follow(server, version, pods)
                except ExpiredError as error:
                    _log.info("listing the endpoints again", extra={"source": str(self), "reason": str(error)})
                except _ERRORS as error:
                    level = logging.DEBUG if failed else logging.WARNING
                    reason = str(error) or type(error).__name__
                    extra = {"source": str(self), "reason": reason, "shards": len(pods.told)}
                    _log.log(level, "the endpoints of shards cannot be watched, the last ones stay", extra=extra)
                    failed = True
                # Jitter: all routers lose an API server that restarts at the same moment.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        finally:
            pods.close()


async def _follow(server: ApiServer, version: str, pods: "_Pods") -> None:
    """Note events from ``version`` on, over one watch after another. Raises what `ApiServer` raises."""
    while True:
        begun = asyncio.get_running_loop().time()
        async for kind, changed in server.watch(version):
            version = changed.metadata.resource_version
            if kind == "DELETED":
                pods.known.remove(changed)
            elif kind != "BOOKMARK":
                pods.known.put(changed)
            pods.tell()
        if asyncio.get_running_loop().time() - begun < _FIRST_PAUSE_S:
            await asyncio.sleep(_FIRST_PAUSE_S)  # a proxy in between may end each watch at once


class _Pods:
    """What is known of the pods, and what was told of them."""

    def __init__(self, port: int, note: Callable[[frozenset[str]], None]) -> None:
        self.known = KnownPods(port)
        self.told: frozenset[str] = frozenset()
        self._note = note
        self._checks: set[asyncio.TimerHandle] = set()

    def tell(self) -> None:
        """Tell of pods that are new or ending, and in a moment of those that are missing."""
        missing = self.told - self.known.addresses - self.known.terminating
        self._set(self.known.addresses | missing)
        if missing:
            self._checks = {check for check in self._checks if not check.cancelled()}
            self._checks.add(asyncio.get_running_loop().call_later(_SURE_S, self._drop, missing))

    def close(self) -> None:
        """Tell nothing any more."""
        for check in self._checks:
            check.cancel()

    def _drop(self, missing: frozenset[str]) -> None:
        self._set(self.told - (missing - self.known.addresses))

    def _set(self, addresses: frozenset[str]) -> None:
        if addresses != self.told:
            self.told = addresses
            self._note(addresses)

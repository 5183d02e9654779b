"""The shards behind a Service, as the API server tells of them: sooner than DNS, and with those that are ending."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import msgspec

from caravan_router.engine.discovery import KubernetesService
from caravan_router.kubernetes.api_server import ApiServer, ApiServerError, ExpiredError, ServiceAccount
from caravan_router.kubernetes.endpoint_slices import KnownPods

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
# A pod that a slice lacks, but that was not ending, may be in another slice in a moment.
_SURE_S = 2.0
_ERRORS = (ApiServerError, OSError, TimeoutError, aiohttp.ClientError, msgspec.MsgspecError, UnicodeError)


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

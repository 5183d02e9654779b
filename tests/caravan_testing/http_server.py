"""The HTTP layer over a scripted engine, on a real port."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import ClientResponse, ClientSession, web

from caravan_router.http.app import OPEN_TO_ALL, Access, build_app
from caravan_router.http.limits import Limits
from caravan_router.http.server.listener import Listen, listening
from caravan_router.http.server.state import STATE
from caravan_router.metrics.recorder import Metrics
from caravan_testing.scripted_engine import ScriptedEngine


@dataclass
class Service:
    """``url`` has no slash at its end; ``client`` takes paths."""

    engine: ScriptedEngine
    limits: Limits
    metrics: Metrics
    url: str
    client: ClientSession
    app: web.Application = field(repr=False)

    @property
    def free_permits(self) -> int:
        return self.app[STATE].permits.free

    def is_idle(self) -> bool:
        """Everything taken was given back."""
        return self.engine.all_closed and self.free_permits == self.limits.max_concurrent_requests

    async def post(self, path: str, body: Any, **headers: str) -> ClientResponse:
        """``headers``: with ``_`` for ``-``."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=named)

    async def sample(self, name: str) -> float:
        """Value of a metric, labels included in ``name``."""
        for line in (await self.metrics.render()).decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)


@asynccontextmanager
async def serving(
    engine: ScriptedEngine, limits: Limits | None = None, access: Access = OPEN_TO_ALL
) -> AsyncIterator[Service]:
    limits = limits or Limits()
    metrics = Metrics()
    app = build_app(engine, limits, metrics, access=access)
    async with listening(app, limits, Listen()) as url, ClientSession(url) as client:
        yield Service(engine, limits, metrics, url, client, app)


async def until(condition: Callable[[], bool]) -> None:
    """Poll until ``condition`` holds. Fail after a minute, since the machine may be busy."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.001)


def events(body: str) -> list[Any]:
    """The data of each event, ``[DONE]`` as text."""
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), body
    data = [line.removeprefix("data: ") for line in lines]
    return [one if one == "[DONE]" else msgspec.json.decode(one) for one in data]

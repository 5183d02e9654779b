"""The HTTP layer on a real port, with a scripted engine behind it."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import ClientResponse, ClientSession, web

from caravan_dialects.api.limits import Limits
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_dialects.bulk.store import BulkStore
from caravan_dialects.conversations.store import Store
from caravan_dialects.tool_servers import NO_TOOL_SERVERS, ToolServers
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import OPEN_TO_ALL, Access, build_app
from caravan_router.http.server.listener import Listen, listening
from caravan_router.http.server.state import STATE
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.core.generation import Tenant
from caravan_testing.scripted_engine import ScriptedEngine
from caravan_testing.waiting import eventually


@dataclass
class Service:
    """A running server. ``url`` has no slash at its end; ``client`` takes paths."""

    engine: ScriptedEngine
    limits: Limits
    metrics: Metrics
    url: str
    client: ClientSession
    app: web.Application = field(repr=False)

    @property
    def free_permits(self) -> int:
        return self.limits.max_concurrent_requests - self.app[STATE].permits.held

    def is_idle(self) -> bool:
        """Whether all streams are closed and all permits returned."""
        return self.engine.all_closed and self.free_permits == self.limits.max_concurrent_requests

    async def post(self, path: str, body: Any, **headers: str) -> ClientResponse:
        """POST ``body`` as JSON. The names of ``headers`` have ``_`` for ``-``."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=named)

    async def reply(self, path: str, body: Any, **headers: str) -> Any:
        """`post` ``body`` and return the JSON of the reply, whose status must be 200."""
        response = await self.post(path, body, **headers)
        assert response.status == 200, await response.text()
        return await response.json()

    async def events(self, path: str, body: Any) -> list[Any]:
        """POST ``body`` and return the `events` of the reply, whose status must be 200."""
        response = await self.post(path, body)
        assert response.status == 200, await response.text()
        return events(await response.text())

    async def sample(self, name: str) -> float:
        """Return the value of a metric; ``name`` includes its labels."""
        return await sample_of(self.metrics, name)


@asynccontextmanager
async def serving(
    engine: ScriptedEngine,
    limits: Limits | None = None,
    access: Access = OPEN_TO_ALL,
    *,
    store: Store | None = None,
    bulk: BulkStore | None = None,
    tool_servers: ToolServers = NO_TOOL_SERVERS,
) -> AsyncIterator[Service]:
    limits = limits or Limits()
    metrics = Metrics()
    for each in engine.engines:
        metrics.of(each.model.name)
    app = build_app(engine, limits, metrics, access=access, store=store, bulk=bulk, tool_servers=tool_servers)
    async with listening(app, limits, Listen()) as port, ClientSession(port.url) as client:
        yield Service(engine, limits, metrics, port.url, client, app)


def keys(*names: str) -> Access:
    """Return the access of clients with API keys, whose secrets are their names."""
    found = [ApiKey(digest=digest_of(name), tenant=Tenant(name=name)) for name in names]
    return Access(keyring=Keyring(found, time.monotonic()))


_MODEL_LABEL = re.compile(r',?model="[^"]*"')


async def sample_of(metrics: Metrics, name: str) -> float:
    """Return the value of one of ``metrics``, the sum over all models; ``name`` includes its labels but the model."""
    values = []
    for line in (await metrics.render()).decode().splitlines():
        series, _, value = line.rpartition(" ")
        if _MODEL_LABEL.sub("", series).removesuffix("{}") == name:
            values.append(float(value))
    if not values:
        raise KeyError(name)
    return sum(values)


def named_events(body: str) -> list[Any]:
    """Return the decoded data of each server-sent event that has a name, which must be the data's ``type``."""
    assert body.endswith("\n\n")
    found = []
    for message in body.removesuffix("\n\n").split("\n\n"):
        name, data = message.split("\n")
        found.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def events(body: str) -> list[Any]:
    """Return the decoded data of each server-sent event; ``[DONE]`` stays text."""
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), body
    data = [line.removeprefix("data: ") for line in lines]
    return [one if one == "[DONE]" else msgspec.json.decode(one) for one in data]


# Prompts whose greedy outputs by the demo model have no near ties: the best token leads by more than 0.5 in logprob,
# while others in the batch change logprobs by some thousandths.
PROMPTS = ("21 22 23 24 25", "31, 32, 33, 34,", "100 101 102 103 104", "1000 1001 1002")
TOKENS = 40


async def _streamed(session: ClientSession, url: str, prompt: str) -> str:
    """Return the text of a greedy stream."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
        chunks = events(await response.text())
    assert chunks.pop() == "[DONE]"
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@asynccontextmanager
async def undisturbed(url: str) -> AsyncIterator[None]:
    """Run streams again and again during the block; each text must be the one it is without any disturbance."""
    ended: list[str] = []
    async with ClientSession() as session:
        calm = {prompt: await _streamed(session, url, prompt) for prompt in PROMPTS}

        async def run(prompt: str) -> None:
            while True:
                assert await _streamed(session, url, prompt) == calm[prompt]
                ended.append(prompt)

        running = [asyncio.create_task(run(prompt)) for prompt in PROMPTS]
        try:
            yield
            before = len(ended)
            # Wait for the streams that were disturbed last, so that they are checked too.
            await eventually(
                lambda: len(ended),
                "the streams that were disturbed end",
                lambda found: found >= before + len(PROMPTS) or any(task.done() for task in running),
            )
        finally:
            for task in running:
                task.cancel()
            done = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in done), done

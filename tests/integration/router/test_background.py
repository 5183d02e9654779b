"""A router that takes over the port of another one continues its responses in the background at once."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_router.app import run_router
from caravan_router.config import RouterConfig
from caravan_shard.backends.base import TokenBatch
from caravan_testing.cluster import ClusterConfig, cluster
from caravan_testing.http_server import named_events
from caravan_testing.waiting import eventually, in_time

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "On and on", "max_output_tokens": 200, "temperature": 1.0, "seed": 10}


async def read(session: ClientSession, url: str, after: int) -> list[Any]:
    """Return the events of a response after the number ``after`` until its stream ends, whole or not."""
    async with session.get(url, params={"stream": "true", "starting_after": str(after)}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    return named_events(text) if text else []


async def read_some(session: ClientSession, url: str, count: int) -> None:
    """Wait until a response has so many events."""
    async with session.get(url, params={"stream": "true"}) as response:
        async for line in response.content:
            count -= line == b"\n"
            if not count:
                response.close()
                return


@pytest.mark.slow
async def test_the_next_router_goes_on_at_once(tmp_path: Path) -> None:
    # While a router ends, a step takes a quarter of a second and the response 50 seconds. Ending takes few steps.
    ended = threading.Event()
    ended.set()

    def slow_unless_ended(_batch: TokenBatch) -> None:
        ended.wait(0.25)

    config = ClusterConfig(shards=1, hook=slow_unless_ended, listed=True)
    async with cluster(config) as running:
        running.list_shards([])
        await eventually(lambda: not running.fleet.shards(), "the shards are free")
        flags = RouterConfig(
            shard=tuple(running.addresses),
            port=0,
            handover=str(tmp_path / "handover"),
            state_file=str(tmp_path / "state"),
            graceful_termination_timeout=30.0,
        )
        urls = asyncio.Queue[str]()

        async def start(stop: asyncio.Event) -> tuple[asyncio.Task[None], str]:
            task = asyncio.create_task(run_router(flags, stop, lambda _fleet, url: urls.put_nowait(url)))
            return task, await urls.get()

        async with in_time("both routers answer"), ClientSession() as session:
            first, url = await start(asyncio.Event())
            async with session.post(f"{url}{PATH}", json=BODY) as response:
                undisturbed = (await response.json())["output"][0]["content"][0]["text"]
            ended.clear()
            async with session.post(f"{url}{PATH}", json=BODY | {"background": True}) as response:
                one = f"{url}{PATH}/{(await response.json())['id']}"
            reading = asyncio.create_task(read(session, one, -1))
            await read_some(session, one, 10)
            stop = asyncio.Event()
            second, _ = await start(stop)
            await first
            ended.set()
            events = await reading
            assert events[-1]["type"] == "response.output_text.delta", "the first router ended before the response"
            while "response" not in events[-1]:
                events += await read(session, one, events[-1]["sequence_number"])
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
            assert events[-1]["response"]["error"] is None
            assert deltas == undisturbed == events[-1]["response"]["output"][0]["content"][0]["text"]
            stop.set()
            await second

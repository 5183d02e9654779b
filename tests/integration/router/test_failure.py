"""A router whose engine fails ends at once, so that its supervisor can start another."""

import asyncio

import pytest
from aiohttp import ClientError, ClientSession

from caravan_router.app import run_router
from caravan_router.config import RouterConfig
from caravan_router.engine.fleet import Fleet
from caravan_testing.waiting import in_time


async def test_a_router_whose_engine_fails_ends_and_closes_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = asyncio.Event()

    async def run(_fleet: Fleet) -> None:
        await broken.wait()
        raise RuntimeError("a bug")

    monkeypatch.setattr(Fleet, "run", run)
    config = RouterConfig(shard=("unix:/nowhere",), port=0, shard_grace_s=600.0, graceful_termination_timeout=600.0)
    urls = asyncio.Queue[str]()
    router = asyncio.create_task(run_router(config, asyncio.Event(), lambda _fleet, url: urls.put_nowait(url)))
    async with ClientSession() as session, in_time("the router ends with its engine"):
        url = await urls.get()
        waiting = asyncio.create_task(session.post(f"{url}/generate", json={"inputs": "a"}))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        broken.set()
        with pytest.raises(ClientError):
            await waiting
        with pytest.raises(RuntimeError, match="a bug"):
            await router

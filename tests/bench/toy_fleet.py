"""Toy shards and a router, all of them processes, whose places all have a stream that never ends."""

import asyncio
import contextlib
import re
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from caravan_testing.programs import Program, program, url_of


@dataclass(frozen=True, slots=True)
class ToyFleet:
    """``shards`` with ``streams`` each, whose steps take ``step_ms``. ``records``: the router has `--record`."""

    shards: int
    streams: int
    step_ms: float
    records: bool = False


@contextlib.asynccontextmanager
async def toy_streams(fleet: ToyFleet) -> AsyncIterator[tuple[ClientSession, str, Program]]:
    """Yield a session, the router's address and its program while all streams run."""
    shards, streams = fleet.shards, fleet.streams
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = [f"unix:{folder}/{number}.sock" for number in range(shards)]
        toy = (
            "--backend",
            "fake",
            "-c",
            str(streams * 1024),
            "-np",
            str(streams),
            "--fake-step-ms",
            str(fleet.step_ms),
        )
        for number, address in enumerate(addresses):
            await stack.enter_async_context(
                program("caravan_shard", *toy, "--address", address, "--shard-id", f"s{number}")
            )
        flags = [flag for address in addresses for flag in ("--shard", address)]
        limits = ["--max-concurrent-requests", str(2 * shards * streams)]
        if fleet.records:
            limits += ["--record", f"{folder}/recording"]
        router = await stack.enter_async_context(program("caravan_serve", "router", *flags, *limits, "--port", "0"))
        url = await url_of(router)
        session = await stack.enter_async_context(
            ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None))
        )
        await _until(session, url, "caravan_shards_up", shards)
        clients = [asyncio.create_task(_client(session, url, number)) for number in range(shards * streams)]
        try:
            await _until(session, url, "tgi_batch_current_size", shards * streams)
            yield session, url, router
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def _client(session: ClientSession, url: str, number: int) -> None:
    """Keep one stream running, and read it without looking at it."""
    body = {"prompt": f"stream {number}", "max_tokens": 900, "ignore_eos": True, "stream": True, "model": "tgi"}
    while True:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for _ in response.content.iter_any():
                pass


async def metrics_of(session: ClientSession, url: str) -> str:
    """Return what `/metrics` tells."""
    async with session.get(f"{url}/metrics") as response:
        return await response.text()


def sum_of(metrics: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE))


async def _until(session: ClientSession, url: str, name: str, value: float, within_s: float = 300.0) -> None:
    deadline = time.monotonic() + within_s
    while (seen := sum_of(await metrics_of(session, url), name)) < value:
        assert time.monotonic() < deadline, f"{name} is {seen:g} and not {value:g} after {within_s:g} s"
        await asyncio.sleep(0.5)

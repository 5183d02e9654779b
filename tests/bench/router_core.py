"""Measures how many steps of real shard processes one router core can feed. Not run by the tests.

``PYTHONPATH=tests python -m bench.router_core --shards 20``: toy shards whose steps take 25 ms stream 32 sequences each
through one router. Prints, for the time when all streams run: the steps of a shard per second and how long a shard did
not compute between two steps, both as the router's metrics have them, and the router's processor time. On a machine
with fewer cores than processes, shards and clients delay each other: then only the processor time means something.

``--watched 6``: the same with a viewer of the timeline and without one in turn, six times each, for ``--seconds`` each.
Prints the router's processor time for a step of each, and the median of how much more the pairs had with a viewer.
``--record``: the router records what it decides.
"""

import argparse
import asyncio
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from caravan_serve.bench.runner import cpu_seconds
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


@dataclass(frozen=True, slots=True)
class Sample:
    """The router's counters: steps, their overhead and tokens of all shards, and its processor time, in seconds."""

    at_s: float
    steps: float
    overhead_s: float
    tokens: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``watched``: how often the timeline is watched for ``seconds``, and how often not."""

    fleet: ToyFleet
    seconds: float
    watched: int


async def measure(plan: Plan) -> list[tuple[Sample, Sample]]:
    """Return the counters at the beginning and the end of spans of ``plan.seconds`` in which all streams run.

    Every second span has a viewer of the timeline, if any has.
    """
    async with toy_streams(plan.fleet) as (session, url, router):
        spans = []
        for _ in range(max(1, plan.watched)):
            spans.append(await _span(session, url, router, plan.seconds))
            if plan.watched:
                viewer = asyncio.create_task(_watch(session, url))
                await asyncio.sleep(1.0)
                spans.append(await _span(session, url, router, plan.seconds))
                viewer.cancel()
                await asyncio.gather(viewer, return_exceptions=True)
        return spans


async def _span(session: ClientSession, url: str, router: Program, seconds: float) -> tuple[Sample, Sample]:
    first = await _sample(session, url, router)
    await asyncio.sleep(seconds)
    return first, await _sample(session, url, router)


async def _watch(session: ClientSession, url: str) -> None:
    async with session.get(f"{url}/admin/timeline") as response:
        assert response.status == 200, await response.text()
        async for _ in response.content.iter_any():
            pass


async def _sample(session: ClientSession, url: str, router: Program) -> Sample:
    metrics = await metrics_of(session, url)
    return Sample(
        time.monotonic(),
        sum_of(metrics, "caravan_step_overhead_seconds_count"),
        sum_of(metrics, "caravan_step_overhead_seconds_sum"),
        sum_of(metrics, "caravan_batch_size_sum"),
        cpu_seconds([router.process.pid]),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32, help="of each shard")
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--watched", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    fleet = ToyFleet(given.shards, given.streams, given.step_ms, records=given.record)
    plan = Plan(fleet=fleet, seconds=given.seconds, watched=given.watched)
    spans = asyncio.run(measure(plan))
    for first, last in spans:
        sys.stdout.write(_line(fleet, first, last))
    if plan.watched:
        costs = [1e3 * (last.cpu_s - first.cpu_s) / max(1.0, last.steps - first.steps) for first, last in spans]
        more = sorted(with_viewer / without - 1 for without, with_viewer in zip(costs[::2], costs[1::2], strict=True))
        sys.stdout.write(f"with a viewer {100 * median(more):+.1f} % ({100 * more[0]:+.1f} to {100 * more[-1]:+.1f})\n")


def _line(fleet: ToyFleet, first: Sample, last: Sample) -> str:
    seconds, steps = last.at_s - first.at_s, max(1.0, last.steps - first.steps)
    cpu_s = last.cpu_s - first.cpu_s
    needed = cpu_s / steps * fleet.shards * 1000 / fleet.step_ms
    return (
        f"{steps / seconds / fleet.shards:.1f} steps/s of a shard (at most {1000 / fleet.step_ms:.1f}), "
        f"{1e3 * (last.overhead_s - first.overhead_s) / steps:.1f} ms between two steps\n"
        f"{(last.tokens - first.tokens) / seconds:.0f} tokens/s, router: {cpu_s / seconds:.2f} cores, "
        f"{1e3 * cpu_s / steps:.3f} ms a step of {fleet.streams} streams; "
        f"{needed:.2f} cores at {1000 / fleet.step_ms:g} steps/s of {fleet.shards} shards\n"
    )


if __name__ == "__main__":
    main()

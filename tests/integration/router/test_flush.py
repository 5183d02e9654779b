"""``/admin/prefixes`` over a whole Caravan: the shards give up what the router says they do."""

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_proto.messages.limits import KvLayout
from caravan_testing.cluster import Cluster, ClusterConfig, cluster, generate
from caravan_testing.specs import read, spec, undisturbed
from caravan_testing.waiting import eventually


async def prefixes(session: ClientSession, running: Cluster, method: str = "GET", query: str = "") -> dict[str, Any]:
    """What each shard is said to keep, or to have kept until it was flushed."""
    async with session.request(method, f"{running.url}/admin/prefixes{query}") as response:
        assert response.status == 200
        return {one["shard"]: one for one in (await response.json())["shards"]}


async def flushed(session: ClientSession, running: Cluster, query: str = "") -> dict[str, int]:
    """How many cells each shard is said to have given up."""
    return {name: one["cells"] for name, one in (await prefixes(session, running, "DELETE", query)).items()}


def held(running: Cluster, address: str) -> int:
    """Tokens that a shard holds."""
    backend = running.backends[address]
    return sum(backend.length(sequence_id) for sequence_id in range(running.config.max_sequences))


async def serve_some(session: ClientSession, running: Cluster) -> None:
    bodies: list[dict[str, object]] = [
        {"inputs": f"{number}" * 30, "parameters": {"max_new_tokens": 5}} for number in range(4)
    ]
    await asyncio.gather(*(generate(session, running.url, body) for body in bodies))
    await running.wait_until_at_rest()


async def test_idle_shards_give_up_all_at_once() -> None:
    config = ClusterConfig(shards=2, step_s=0.002, layout=KvLayout.SPLIT)
    async with cluster(config) as running, ClientSession() as session:
        await serve_some(session, running)
        listed = await prefixes(session, running)
        kept = {name: sum(prefix["tokens"] for prefix in one["prefixes"]) for name, one in listed.items()}
        assert all(kept.values())
        assert kept == {name: held(running, name) for name in running.addresses}
        fuller, other = sorted(running.addresses, key=lambda name: -kept[name])
        assert await flushed(session, running, f"?shard={fuller}") == {fuller: listed[fuller]["cells"]}
        await eventually(lambda: held(running, fuller) == 0, "the shard gave them up")
        assert held(running, other) == kept[other]
        assert await flushed(session, running) == {fuller: 0, other: listed[other]["cells"]}
        await eventually(lambda: held(running, other) == 0, "the other shard gave them up, too")
        assert not any(one["prefixes"] for one in (await prefixes(session, running)).values())
        await serve_some(session, running)


@pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
async def test_a_running_stream_notices_nothing(layout: KvLayout) -> None:
    shares = layout is KvLayout.UNIFIED
    async with cluster(ClusterConfig(step_s=0.002, layout=layout)) as running, ClientSession() as session:
        await serve_some(session, running)
        wanted = spec([1, 2, 3], 400)
        reading = asyncio.create_task(read(running.engine.submit(wanted)))
        shard = running.engine.scheduler.shards[running.addresses[0]]
        await eventually(lambda: bool(shard.stays.decoding), "it decodes")
        gone = (await prefixes(session, running, "DELETE"))[shard.name]
        assert len(gone["prefixes"]) == 4
        # Unified cells are saved and released when nobody waits, split ones saved where they are between running ones.
        in_cells, in_memory = gone["cells"], sum(prefix["memory_bytes"] for prefix in gone["prefixes"])
        assert (in_cells == 0) is shares
        assert in_memory == gone["memory_bytes"]
        assert not reading.done()
        # The shard hears of it with the next command.
        assert await reading == undisturbed(wanted)
        await running.wait_until_at_rest()
        assert (len(shard.stays.parked), len(shard.runs.keys)) == ((0, 1) if shares else (1, 0))


async def test_an_operator_that_leaves_leaves_nothing() -> None:
    async with cluster() as running:
        waiting = asyncio.create_task(running.fleet.prefix_cache.flush_prefixes(running.addresses))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert [
            one.shard for one in await running.fleet.prefix_cache.flush_prefixes(running.addresses)
        ] == running.addresses
        assert not running.engine.prefixes._flushes

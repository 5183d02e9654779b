"""``/admin/prefixes`` over a whole Caravan: the shards give up what the router says they do."""

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_shard.kv_layout import KvLayout
from caravan_testing.cluster import Cluster, ClusterConfig, cluster, eventually, generate
from caravan_testing.specs import read, spec, undisturbed


async def prefixes(session: ClientSession, running: Cluster, method: str = "GET", query: str = "") -> dict[str, Any]:
    """What each shard is said to keep, or to have given up."""
    async with session.request(method, f"{running.url}/admin/prefixes{query}") as response:
        assert response.status == 200
        return {one["shard"]: one for one in (await response.json())["shards"]}


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
    async with cluster(ClusterConfig(shards=2, step_s=0.002)) as running, ClientSession() as session:
        await serve_some(session, running)
        first, second = running.addresses
        listed = await prefixes(session, running)
        assert sum(len(one["prefixes"]) for one in listed.values()) == 4
        kept = {name: sum(prefix["tokens"] for prefix in one["prefixes"]) for name, one in listed.items()}
        assert kept == {name: held(running, name) for name in running.addresses}
        assert all(held(running, name) for name in running.addresses), "both shards served some"
        flushed = await prefixes(session, running, "DELETE", f"?shard={first}")
        assert (list(flushed), flushed[first]["cells"]) == ([first], listed[first]["cells"])
        await eventually(lambda: held(running, first) == 0, "the shard heard of it")
        assert held(running, second) == kept[second]
        assert await prefixes(session, running, "DELETE") != {}
        await eventually(lambda: held(running, second) == 0, "the other one, too")
        assert all(not one["prefixes"] for one in (await prefixes(session, running)).values())
        await serve_some(session, running)


@pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
async def test_a_running_stream_notices_nothing(layout: KvLayout) -> None:
    async with cluster(ClusterConfig(step_s=0.002, layout=layout)) as running, ClientSession() as session:
        await serve_some(session, running)
        wanted = spec([1, 2, 3], 60)
        reading = asyncio.create_task(read(running.engine.submit(wanted)))
        shard = running.engine.scheduler.shards[running.addresses[0]]
        await eventually(lambda: bool(shard.decoding), "it decodes")
        assert len((await prefixes(session, running, "DELETE"))[shard.name]["prefixes"]) == 4
        assert not reading.done()
        # The shard hears of it with the next command.
        assert await reading == undisturbed(wanted)
        await running.wait_until_at_rest()
        assert len(shard.parked) == 1


async def test_an_operator_that_leaves_leaves_nothing() -> None:
    async with cluster() as running:
        waiting = asyncio.create_task(running.engine.flush_prefixes(running.addresses))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert [one.shard for one in await running.engine.flush_prefixes(running.addresses)] == running.addresses
        assert not running.engine._flushes

"""Models that only embed, on toy models over real gRPC: shards without cells and sequences."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession

from caravan_scheduler.core.shards import ShardState
from caravan_shard.arrays import Floats
from caravan_shard.backends.toy.backend import EMBEDDING_SIZE, ToyBackend, toy_embedding
from caravan_testing.cluster import Cluster, ClusterConfig, cluster, expected_text
from caravan_testing.waiting import eventually


async def start(running: Cluster, count: int = 1) -> list[str]:
    """Start shards of the model ``vectors``, which only embeds, and list them behind those that there are."""
    new = [running.add_address() for _ in range(count)]
    for address in new:
        await running.start_shard(address, "vectors", "vectors-file", only_embeds=True)
    await asyncio.to_thread(running.list_shards, running.addresses)
    await running.wait_until_up(len(running.addresses))
    return new


async def post(running: Cluster, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with ClientSession() as session, session.post(f"{running.url}{path}", json=body) as response:
        return response.status, await response.json()


def passes(backend: ToyBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each forward pass over texts adds their number."""
    counts: list[int] = []
    embed = backend.embed

    def counted(texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
        counts.append(len(texts))
        return embed(texts, lane)

    monkeypatch.setattr(backend, "embed", counted)
    return counts


async def test_such_a_model_is_served_beside_one_that_generates() -> None:
    async with cluster(ClusterConfig(listed=True)) as running:
        (address,) = await start(running)
        status, reply = await post(running, "/v1/embeddings", {"model": "vectors", "input": [[1, 2], [3]]})
        assert status == 200
        vectors = [entry["embedding"] for entry in reply["data"]]
        np.testing.assert_allclose(vectors, [toy_embedding(text, EMBEDDING_SIZE) for text in ([1, 2], [3])], atol=1e-6)
        body = {"model": "toy", "prompt": "x", "max_tokens": 5, "temperature": 0}
        status, reply = await post(running, "/v1/completions", body)
        assert (status, reply["choices"][0]["text"]) == (200, expected_text("x", 5))
        status, reply = await post(running, "/v1/completions", {"model": "vectors", "prompt": "x"})
        assert (status, "only embeds texts: use /v1/embeddings" in reply["error"]["message"]) == (400, True)
        async with ClientSession() as session, session.get(f"{running.url}/admin/shards") as response:
            shards = {shard["address"]: shard for shard in (await response.json())["shards"]}
        assert shards[address]["state"] == "serving"
        assert (shards[address]["limits"]["max_sequences"], shards[address]["limits"]["cells"]) == (0, 0)
        await running.wait_until_at_rest()


async def test_its_shards_drain_and_come_back() -> None:
    async with cluster(ClusterConfig(shards=0, listed=True)) as running:
        first, second = await start(running, 2)
        assert await running.fleet.drain_shard(first)
        await running.servers[first].drain()
        await eventually(lambda: running.state(first) is not ShardState.SERVING, "the first shard has drained")
        status, _ = await post(running, "/v1/embeddings", {"input": [[1, 2]]})
        assert status == 200
        await running.stop_shard(first)
        await running.stop_shard(second)
        await running.start_shard(second, "vectors", "vectors-file", only_embeds=True)
        status, _ = await post(running, "/v1/embeddings", {"input": [[1, 2]]})
        assert status == 200


async def test_texts_of_a_request_share_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(ClusterConfig(shards=0, listed=True)) as running:
        (address,) = await start(running)
        counts = passes(running.backends[address], monkeypatch)
        texts = [[number % 200] for number in range(100)]
        vectors = await running.engine.queries.embed([tuple(text) for text in texts])
        np.testing.assert_allclose(vectors, [toy_embedding(text, EMBEDDING_SIZE) for text in texts], atol=1e-6)
        # A call has 64 texts, and a pass of the toy model 8; the first of a call may find the worker idle.
        assert sum(counts) == 100
        assert len(counts) <= 64 // 8 + 36 // 8 + 2 * 2
        # More tokens than a pass may have: 512 for all of its texts.
        counts.clear()
        long = tuple([7] * 300)
        assert len(await running.engine.queries.embed([long, long, (1,), (2,)])) == 4
        assert counts in ([1, 3], [1, 1, 2])


async def test_texts_go_to_the_shard_with_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(ClusterConfig(shards=0, listed=True, step_s=0.05)) as running:
        addresses = await start(running, 2)
        counts = [passes(running.backends[address], monkeypatch) for address in addresses]
        await asyncio.gather(*(running.engine.queries.embed([(number,)]) for number in range(20)))
        assert [sum(count) for count in counts] == [10, 10]

"""Models that only embed, and floods of requests with adapters, on toy models over real gRPC."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession

from caravan_proto.messages.limits import KvLayout
from caravan_router.engine.streams import RequestStream
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.shards import ShardState
from caravan_shard.arrays import Floats
from caravan_shard.backends.toy.backend import EMBEDDING_SIZE, ToyBackend, toy_embedding
from caravan_testing.cluster import Cluster, ClusterConfig, cluster, expected_text
from caravan_testing.specs import read, spec, undisturbed
from caravan_testing.toy_oracle import expected_logprobs
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


LAYOUTS = pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
ADAPTERS = ("one", "other")


def demand(chance: random.Random) -> list[GenerationSpec]:
    """Return requests: a third begin with the same tokens, and every fourth asks for prompt logprobs."""
    common = [chance.randrange(256) for _ in range(24)]
    wanted = []
    for number in range(60):
        own = [chance.randrange(256) for _ in range(chance.randrange(2, 40))]
        prompt = [*common, *own] if number % 3 == 0 else own
        adapter = chance.choice(["", *ADAPTERS])
        wanted.append(
            spec(prompt, chance.randrange(1, 30), seed=number, adapter=adapter, prompt_logprobs=number % 4 == 0)
        )
    return wanted


async def check(running: Cluster, wanted: list[GenerationSpec]) -> None:
    """Check that each request gets the tokens that it gets alone, and each prompt logprob once, in order."""

    async def submit(number: int, one: GenerationSpec) -> tuple[RequestStream, list[int]]:
        await asyncio.sleep(max(0, number - 30) * 0.01)
        stream = running.engine.submit(one)
        return stream, await read(stream)

    done = await asyncio.gather(*(submit(number, one) for number, one in enumerate(wanted)))
    for one, (stream, tokens) in zip(wanted, done, strict=True):
        assert tokens == undisturbed(one)
        told = [token.logprob for token in stream.prompt_logprobs]
        if not one.prompt_logprobs:
            assert told == []
            continue
        rows = expected_logprobs(one.prompt, one.adapter)
        expected = [row[token] for row, token in zip(rows, one.prompt[1:], strict=True)]
        assert told[0] is None
        np.testing.assert_allclose(np.array(told[1:], np.float64), expected, atol=1e-4)
    await running.wait_until_at_rest()


@LAYOUTS
async def test_a_flood_of_several_adapters(layout: KvLayout) -> None:
    """A step returns logprobs of at most nine prompt tokens, which is less than most prompts have."""
    config = ClusterConfig(layout=layout, adapters=ADAPTERS, max_prompt_logprob_tokens=9)
    async with cluster(config) as running:
        await check(running, demand(random.Random(3)))


async def test_a_flood_of_several_adapters_into_scarce_cells() -> None:
    """Sequences are swapped and computed again with their adapter, on two shards."""
    config = ClusterConfig(
        shards=2, cells=200, adapters=ADAPTERS, max_sequences=12, max_prompt_logprob_tokens=9, token_s=0.0002
    )
    async with cluster(config) as running:
        await check(running, demand(random.Random(4)))


async def test_texts_have_vectors_while_requests_run() -> None:
    wanted = demand(random.Random(5))[:20]
    texts = [tuple(place % 250 for place in range(length)) for length in (1, 30, 400)]
    async with cluster(ClusterConfig(adapters=ADAPTERS, embedding_size=16, step_s=0.001)) as running:
        checking = asyncio.ensure_future(check(running, wanted))
        for _ in range(10):
            vectors = await running.engine.queries.embed(texts)
            np.testing.assert_allclose(vectors, [toy_embedding(text, 16) for text in texts], atol=1e-6)
        await checking

"""A flood of requests with several adapters and with prompt logprobs, on the toy model."""

import asyncio
import random

import numpy as np
import pytest

from caravan_proto.messages.limits import KvLayout
from caravan_router.engine.streams import RequestStream
from caravan_scheduler.core.generation import GenerationSpec
from caravan_shard.backends.toy.backend import toy_embedding
from caravan_testing.cluster import Cluster, ClusterConfig, cluster
from caravan_testing.specs import read, spec, undisturbed
from caravan_testing.toy_oracle import expected_logprobs

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

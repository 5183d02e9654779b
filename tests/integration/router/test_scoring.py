"""Endings of one context with prompt logprobs, on the toy model."""

import asyncio

import numpy as np
import pytest

from caravan_proto.messages.limits import KvLayout
from caravan_router.engine.streams import RequestStream
from caravan_scheduler.core.generation import GenerationSpec
from caravan_shard.backends.base import TokenBatch
from caravan_testing.cluster import ClusterConfig, cluster
from caravan_testing.specs import read, spec, undisturbed
from caravan_testing.toy_oracle import expected_logprobs

CONTEXT = list(b"a context of which the log probabilities are known " * 4)
ENDINGS = [[number, *b" ends", 200 - number] for number in range(24)]


def check(one: GenerationSpec, stream: RequestStream, tokens: list[int]) -> None:
    assert tokens == undisturbed(one)
    rows = expected_logprobs(one.prompt)
    expected = [row[token] for row, token in zip(rows, one.prompt[1:], strict=True)]
    found = [token.logprob for token in stream.prompt_logprobs]
    assert found[0] is None
    np.testing.assert_allclose(np.array(found[1:], np.float64), expected, atol=1e-4)


@pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
async def test_endings_of_one_context_compute_it_once(layout: KvLayout) -> None:
    computed = []

    def count(batch: TokenBatch) -> None:
        computed.append(len(batch.tokens))

    async with cluster(ClusterConfig(layout=layout, max_prompt_logprob_tokens=256, hook=count)) as running:
        wanted = [spec([*CONTEXT, *ending], 1, prompt_logprobs=True) for ending in ENDINGS]

        async def submit(one: GenerationSpec) -> None:
            stream = running.engine.submit(one)
            check(one, stream, await read(stream))

        await asyncio.gather(*map(submit, wanted))
        # An ending and the token before it, whose logits give the first logprob of the ending. Those that start with
        # the first one's last chunk do not wait for fewer than 16 tokens.
        early = running.config.max_sequences * 16
        assert sum(computed) <= len(CONTEXT) + len(ENDINGS) * (len(ENDINGS[0]) + 1) + early
        # A request that comes later finds what is cached, in cells or saved.
        computed.clear()
        await submit(spec([*CONTEXT, *b"later"], 1, prompt_logprobs=True))
        assert sum(computed) <= len(b"later") + 1 + 16
        await running.wait_until_at_rest()

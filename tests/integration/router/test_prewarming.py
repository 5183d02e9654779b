"""A prompt that a response has prepared is in the cache of the shards."""

from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.cluster import ClusterConfig, cluster

# To compute a token takes long enough that prefixes are kept and loaded instead.
SLOW = ClusterConfig(token_s=0.001)


async def respond(session: ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post("/v1/responses", json=body) as response:
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


@pytest.mark.parametrize("store", [False, True])
async def test_what_follows_a_prepared_prompt_computes_its_own_part_only(store: bool) -> None:
    items = [{"role": "system", "content": "Tell of the sea. " * 3}, {"role": "user", "content": "Is it deep?"}]
    more = {"max_output_tokens": 5, "temperature": 0, "store": store}
    async with cluster(SLOW) as running, ClientSession(running.url) as session:
        prepared = await respond(session, {"input": items, "generate": False, "store": store})
        assert (prepared["output"], prepared["usage"]["output_tokens"]) == ([], 0)
        known = prepared["usage"]["input_tokens"]
        await running.wait_until_at_rest()
        assert prepared["usage"]["input_tokens_details"]["cached_tokens"] == 0
        answered = await respond(session, {"input": items, **more})
        # The last tokens of a prompt are computed again, for their logits.
        assert answered["usage"]["input_tokens_details"]["cached_tokens"] >= known - 2
        if store:
            question = [{"role": "user", "content": "And wide?"}]
            continued = await respond(session, {"input": question, "previous_response_id": prepared["id"], **more})
            sent = await respond(session, {"input": [*items, *question], **more, "store": False})
            assert continued["output"][0]["content"] == sent["output"][0]["content"]
            assert continued["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
        await running.wait_until_at_rest()

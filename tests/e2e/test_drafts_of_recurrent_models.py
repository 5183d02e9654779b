"""Drafts over HTTP for models with recurrent layers: where llama.cpp takes tokens back, and why elsewhere not."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.metrics_text import total
from caravan_testing.serve_process import serve
from caravan_testing.shard_models import CONVOLUTION_MODEL, HYBRID_MODEL, fetched

pytestmark = [pytest.mark.e2e, pytest.mark.model]

FLAGS = ("--exact", "-t", "1", "-np", "2", "-c", "2048", "--speculate", "4")
PROMPTS = [random.Random(number).choices(range(20, 250), k=60) for number in range(3)]


async def speculation(session: ClientSession) -> dict[str, Any]:
    """Return what the router knows of the drafts of its only shard."""
    [shard] = (await (await session.get("/admin/shards")).json())["shards"]
    found: dict[str, Any] = shard["speculation"]
    return found


async def answers(session: ClientSession, **fields: Any) -> list[list[int]]:
    """Return the greedy answers to the prompts."""
    found = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with session.post("/v1/completions", json=body | fields) as response:
            assert response.status == 200, await response.text()
            found.append((await response.json())["choices"][0]["token_ids"])
    return found


async def drafted(session: ClientSession) -> float:
    return total(await (await session.get("/metrics")).text(), "caravan_spec_decode_num_draft_tokens_total")


async def repeat(url: str) -> None:
    async with ClientSession(url) as session:
        assert (await speculation(session))["off_because"] is None
        plain = await answers(session, speculate=0)
        assert await drafted(session) == 0
        # What ended outputs had is proposed, if only now and then, to learn what it is worth.
        for _ in range(3):
            assert await answers(session) == plain
        assert await drafted(session) > 0


async def ask_in_vain(url: str) -> None:
    async with ClientSession(url) as session:
        found = await speculation(session)
        assert found["max_draft_tokens"] == 0
        assert "cannot be cut back" in found["off_because"]
        assert await answers(session) == await answers(session, speculate=0)
        assert await drafted(session) == 0


@pytest.mark.parametrize(("model", "check"), [(CONVOLUTION_MODEL, repeat), (HYBRID_MODEL, ask_in_vain)])
def test_drafts(model: Path, check: Any) -> None:
    with serve(*FLAGS, models=[fetched(model)]) as server:
        asyncio.run(check(server.url))

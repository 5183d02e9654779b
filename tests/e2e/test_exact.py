"""With --exact, a text is the same alone and in company, in any chunks, with drafts, and after a new start."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from caravan_serve.bench.workloads import seeded, words
from caravan_testing.serve_process import serve
from caravan_testing.shard_models import DEMO_MODEL, WORDS_MODEL, fetched, requantise

pytestmark = [pytest.mark.e2e, pytest.mark.model]

ANSWERS, TOKENS = 6, 12
FLAGS = ("--exact", "--parallel", "4", "--ctx-size", "2048", "--threads", "1")


async def answers(url: str, *, together: bool) -> list[list[int]]:
    """Return greedy and drawn answers, asked for one after another or all at once."""
    source = seeded("exact")
    bodies = [
        {
            "prompt": words(source, source.randint(5, 120)),
            "max_tokens": TOKENS,
            "temperature": number % 2,
            "seed": 7,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for number in range(ANSWERS)
    ]
    async with aiohttp.ClientSession(url) as session:

        async def answer(body: dict[str, Any]) -> list[int]:
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                found: list[int] = (await response.json())["choices"][0]["token_ids"]
                return found

        if together:
            return list(await asyncio.gather(*map(answer, bodies)))
        return [await answer(body) for body in bodies]


async def numerics(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession(url) as session, session.get("/admin/shards") as response:
        found: dict[str, Any] = (await response.json())["shards"][0]["numerics"]
        return found


# The thorough comparison at a start takes long, so each kind of weights of the real model has one of the two.
@pytest.mark.parametrize(
    ("weights", "attention"),
    [
        ("quick", "off"),
        pytest.param("quick", "on", marks=pytest.mark.slow),
        pytest.param("Q4_1", "off", marks=pytest.mark.slow),
        pytest.param("Q4_0", "on", marks=pytest.mark.slow),
    ],
)
async def test_company_chunks_drafts_and_a_new_start_change_no_token(
    weights: str, attention: str, tmp_path: Path
) -> None:
    model = fetched(WORDS_MODEL if weights == "quick" else DEMO_MODEL)
    if weights == "Q4_0":
        model = requantise(model, tmp_path / "q4_0.gguf")
    with serve(*FLAGS, "--flash-attn", attention, models=[model]) as server:
        alone = await answers(server.url, together=False)
        assert await answers(server.url, together=True) == alone
        first = await numerics(server.url)
    assert first["exact"]
    assert first["same_in_company"]
    assert first["same_in_chunks"]
    with serve(*FLAGS, "--flash-attn", attention, "--speculate", "4", models=[model]) as server:
        assert await numerics(server.url) == first
        assert await answers(server.url, together=True) == alone

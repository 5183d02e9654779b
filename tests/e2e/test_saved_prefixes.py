"""A prefix that returns from host memory takes cells once, on a real model, and the texts stay the same."""

import asyncio
import random
import re
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.oracle import Oracle, check_same, repeated_list
from caravan_testing.serve_process import serve
from caravan_testing.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(900)]

REQUESTS, NEW_TOKENS = 6, 24
# See test_scarce_cells.py.
TIE_LOGITS = 1.0


async def used_cells(session: ClientSession) -> int:
    """Return the cells of running sequences now."""
    async with session.get("/admin/shards") as response:
        shards = (await response.json())["shards"]
    return sum(shard["used_cells"] for shard in shards)


async def burst(session: ClientSession, prompt: str) -> tuple[list[list[int]], int]:
    """Send equal requests at once. Return their tokens and the most cells that were seen."""

    async def answer() -> list[int]:
        parameters = {"max_new_tokens": NEW_TOKENS, "details": True}
        async with session.post("/generate", json={"inputs": prompt, "parameters": parameters}) as response:
            got: Any = await response.json()
            assert response.status == 200, got
        return [token["id"] for token in got["details"]["tokens"]]

    answers = asyncio.gather(*(answer() for _ in range(REQUESTS)))
    most = 0
    while not answers.done():
        most = max(most, await used_cells(session))
        await asyncio.sleep(0.005)
    return await answers, most


async def until_saved(session: ClientSession) -> None:
    """Wait until what was computed is in host memory, and no longer in cells."""

    async def look() -> tuple[bool, bool]:
        page = await (await session.get("/metrics")).text()
        saved = re.search(r'^caravan_saved_bytes{.*"memory".*} [1-9]', page, re.MULTILINE)
        cached = re.search(r"^caravan_kv_cells_(?:cached|used){.*} [1-9]", page, re.MULTILINE)
        return saved is not None, cached is not None

    await eventually(look, "all is in memory and none in cells", lambda found: found == (True, False))


def test_equal_prompts_take_as_many_cells_from_memory_as_when_new(oracle: Oracle) -> None:
    prompt = repeated_list(7, 60, random.Random(7))
    length = oracle.prompt_length(prompt)
    assert length > 100
    expected = oracle.greedy(prompt, NEW_TOKENS)

    async def run(url: str) -> None:
        async with ClientSession(url) as session:
            for _ in range(3):
                outputs, most = await burst(session, prompt)
                for output in outputs:
                    check_same(oracle, prompt, expected, output, TIE_LOGITS)
                assert length < most <= length + REQUESTS * (2 + NEW_TOKENS)
                await until_saved(session)

    with serve("-np", "8", "-c", "4096", "--kv-layout", "unified", "-t", "1") as served:
        asyncio.run(run(served.url))

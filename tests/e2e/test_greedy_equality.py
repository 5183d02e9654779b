"""Greedy output in a batch is the one that llama-cpp-python finds alone, but for ties."""

import asyncio

import pytest
from aiohttp import ClientSession

from caravan_testing.oracle import Oracle, check_same
from caravan_testing.serve_process import Served

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NEW_TOKENS = 16
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small dog who",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The three primary colors are",
    "A good recipe for bread begins with",
    "In the year 1492,",
    "The square root of 144 is",
    "Dear Sir or Madam,",
    "The largest planet in the solar system is",
    "import numpy as np\n",
    "She opened the old wooden door and",
    "List five animals:",
    "The opposite of hot is",
    "To be, or not to be,",
    "Photosynthesis is the process by which",
    "Q: What is 2+2?\nA:",
    "The train left the station at",
    "My favorite book is",
    "Les trois mousquetaires sont",
)


async def _generate(session: ClientSession, url: str, prompt: str, new_tokens: int = NEW_TOKENS) -> list[int]:
    parameters = {"max_new_tokens": new_tokens, "details": True}
    async with session.post(f"{url}/generate", json={"inputs": prompt, "parameters": parameters}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return [token["id"] for token in answer["details"]["tokens"]]


async def test_twenty_prompts_in_a_batch_give_the_output_of_each_alone(served: Served, oracle: Oracle) -> None:
    expected = [oracle.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]
    async with ClientSession() as session:
        got = await asyncio.gather(*(_generate(session, served.url, prompt) for prompt in PROMPTS))
    for prompt, alone, together in zip(PROMPTS, expected, got, strict=True):
        check_same(oracle, prompt, alone, together)


async def test_streams_that_join_and_leave_do_not_change_others(served: Served) -> None:
    """While two streams decode, others join, end and disconnect."""
    async with ClientSession() as session:
        alone = [await _generate(session, served.url, prompt) for prompt in PROMPTS[:2]]
        steady = [asyncio.create_task(_generate(session, served.url, prompt)) for prompt in PROMPTS[:2]]
        for number, prompt in enumerate(PROMPTS[2:14]):
            passing = asyncio.create_task(_generate(session, served.url, prompt, 3 + number))
            await asyncio.sleep(0.03)
            if number % 3 == 0:
                passing.cancel()
            await asyncio.wait({passing})
        assert [await task for task in steady] == alone

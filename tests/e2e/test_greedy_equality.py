"""Greedy output in a batch is what the model says alone; where it is not, the two tokens were as good as equal."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession

from caravan_testing.serve_process import MODEL, Served

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NEW_TOKENS = 32
# Different batch shapes take different kernels, which round differently. Seen on the demo model: below 0.1.
TIE_LOGITS = 0.25
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


class Oracle:
    """llama-cpp-python's Llama, one sequence at a time, and the logits behind its choices."""

    def __init__(self) -> None:
        from llama_cpp import Llama

        self.llama = Llama(
            str(MODEL), n_ctx=256, n_threads=2, n_threads_batch=2, flash_attn=True, logits_all=True, verbose=False
        )

    def greedy(self, prompt: str) -> list[int]:
        self.llama.reset()
        tokens = self.llama.tokenize(prompt.encode(), add_bos=True, special=True)
        output: list[int] = []
        for token in self.llama.generate(tokens, temp=0.0):
            output.append(token)
            if len(output) == NEW_TOKENS or token == self.llama.token_eos():
                break
        return output

    def logits_after(self, prompt: str, output: list[int]) -> Any:
        self.llama.reset()
        tokens = self.llama.tokenize(prompt.encode(), add_bos=True, special=True)
        self.llama.eval([*tokens, *output])
        return np.array(self.llama.scores[self.llama.n_tokens - 1])


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    result = Oracle()
    yield result
    result.llama.close()


async def _generate(session: ClientSession, url: str, prompt: str, new_tokens: int = NEW_TOKENS) -> list[int]:
    parameters = {"max_new_tokens": new_tokens, "details": True}
    async with session.post(f"{url}/generate", json={"inputs": prompt, "parameters": parameters}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return [token["id"] for token in answer["details"]["tokens"]]


def check_same(oracle: Oracle, prompt: str, expected: list[int], got: list[int]) -> None:
    """Equal, or different first at a tie."""
    for place, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
        if ours != theirs:
            logits = oracle.logits_after(prompt, expected[:place])
            gap = abs(float(logits[ours] - logits[theirs]))
            assert gap < TIE_LOGITS, f"{prompt!r} differs at token {place}: {ours} for {theirs}, {gap:.4f} logits apart"
            return
    assert len(got) == len(expected)


async def test_twenty_prompts_together_equal_each_alone(served: Served, oracle: Oracle) -> None:
    expected = [oracle.greedy(prompt) for prompt in PROMPTS]
    async with ClientSession() as session:
        got = await asyncio.gather(*(_generate(session, served.url, prompt) for prompt in PROMPTS))
    for prompt, alone, together in zip(PROMPTS, expected, got, strict=True):
        check_same(oracle, prompt, alone, together)
    exact = sum(alone == together for alone, together in zip(expected, got, strict=True))
    assert exact >= len(PROMPTS) * 3 // 4, f"only {exact} of {len(PROMPTS)} equal: too many for ties"


async def test_joining_and_leaving_changes_nobody(served: Served, oracle: Oracle) -> None:
    """While two streams decode, others join, end and disconnect."""
    async with ClientSession() as session:
        steady = [asyncio.create_task(_generate(session, served.url, prompt)) for prompt in PROMPTS[:2]]
        for number, prompt in enumerate(PROMPTS[2:14]):
            passing = asyncio.create_task(_generate(session, served.url, prompt, 3 + number))
            await asyncio.sleep(0.03)
            if number % 3 == 0:
                passing.cancel()
            await asyncio.wait({passing})
        for prompt, task in zip(PROMPTS, steady, strict=False):
            check_same(oracle, prompt, oracle.greedy(prompt), await task)

"""A beam search of the demo model finds what a plain one finds over the logits of llama-cpp-python's Llama."""

from dataclasses import replace

import numpy as np
import pytest
from aiohttp import ClientSession

from caravan_router.core.generation import BeamSearch
from caravan_testing.beam_oracle import beam_outputs
from caravan_testing.oracle import Oracle
from caravan_testing.serve_process import Served
from caravan_testing.specs import spec

pytestmark = [pytest.mark.e2e, pytest.mark.model]

WIDTH, NEW_TOKENS = 3, 10
# Scores of outputs that rounding may exchange differ by less than this. It is the mean error of a token's logprob.
TIE_SCORE = 0.02


def logprobs_after(oracle: Oracle, prompt: str, output: tuple[int, ...]) -> list[float]:
    logits = oracle.logits_after(prompt, list(output)).astype(np.float64)
    top = logits.max()
    return [float(value) for value in logits - top - np.log(np.exp(logits - top).sum())]


@pytest.mark.parametrize("prompt", ["The capital of France is", "def fibonacci(n):"])
async def test_outputs_are_those_of_a_plain_search(served: Served, oracle: Oracle, prompt: str) -> None:
    body = {"prompt": prompt, "use_beam_search": True, "n": WIDTH, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    fields = {"logprobs": 0, "return_token_ids": True}
    async with ClientSession() as session, session.post(f"{served.url}/v1/completions", json=body | fields) as response:
        reply = await response.json()
        assert response.status == 200, reply
    got = [tuple(choice["token_ids"]) for choice in reply["choices"]]
    start = oracle.prompt_length(prompt)
    wanted = spec(reply["choices"][0]["prompt_token_ids"], NEW_TOKENS)
    assert len(wanted.prompt) == start
    wanted = replace(wanted, beams=BeamSearch(width=WIDTH, index=0))
    expected = beam_outputs(lambda tokens: logprobs_after(oracle, prompt, tokens[start:]), wanted)
    for choice, output, best in zip(reply["choices"], got, expected, strict=True):
        score = sum(choice["logprobs"]["token_logprobs"]) / len(output)
        assert abs(score - best.score) < TIE_SCORE, f"{output} for {best.tokens}"
    assert got[0] == expected[0].tokens

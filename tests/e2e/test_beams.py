"""A beam search of a real model finds what a plain one finds over the logprobs that the same server tells alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import httpx2
import pytest

from caravan_scheduler.core.generation import BeamSearch
from caravan_testing.beam_oracle import beam_outputs
from caravan_testing.serve_process import Served, serve
from caravan_testing.shard_models import WORDS_MODEL, fetched
from caravan_testing.specs import spec
from caravan_testing.waiting import DEADLINE_S

pytestmark = [pytest.mark.e2e, pytest.mark.model]

WIDTH, NEW_TOKENS = 3, 10
# A search looks at twice as many of the likeliest next tokens as it is wide.
ALTERNATIVES = 2 * WIDTH


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server whose logprobs depend on the tokens before alone, so that no rounding takes part in the search."""
    flags = ("--exact", "-np", "4", "-c", "2048", "-t", "1", "--max-top-n-tokens", str(ALTERNATIVES))
    with serve(*flags, models=(fetched(WORDS_MODEL),)) as running:
        yield running


@pytest.mark.parametrize("prompt", ["The capital of France is", "def fibonacci(n):"])
def test_outputs_are_those_of_a_plain_search(served: Served, prompt: str) -> None:
    with httpx2.Client(base_url=served.url, timeout=DEADLINE_S) as client:

        def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text
            found: dict[str, Any] = response.json()
            return found

        @cache
        def logprobs_after(tokens: tuple[int, ...]) -> Sequence[float]:
            """Return the logprobs of the likeliest tokens after ``tokens``, and no chance of all others."""
            body = {"prompt": list(tokens), "n_predict": 1, "temperature": 0, "n_probs": ALTERNATIVES}
            (place,) = ask("/completion", body)["completion_probabilities"]
            row = [-1e9] * vocabulary
            for token in place["top_logprobs"]:
                row[token["id"]] = token["logprob"]
            return row

        vocabulary = ask("/api/show", {"model": ""})["model_info"]["caravan.vocab_size"]
        body = {"prompt": prompt, "use_beam_search": True, "n": WIDTH, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        reply = ask("/v1/completions", body | {"logprobs": 0, "return_token_ids": True})
        wanted = spec(reply["choices"][0]["prompt_token_ids"], NEW_TOKENS)
        expected = beam_outputs(logprobs_after, replace(wanted, beams=BeamSearch(width=WIDTH, index=0)))
    got = [(tuple(choice["token_ids"]), sum(choice["logprobs"]["token_logprobs"])) for choice in reply["choices"]]
    assert [tokens for tokens, _ in got] == [best.tokens for best in expected]
    assert [total / NEW_TOKENS for _, total in got] == pytest.approx([best.score for best in expected], abs=1e-4)

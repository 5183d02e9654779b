"""A beam search of a tiny llama finds what Hugging Face's ``generate`` has found with the same weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import ClientSession

from caravan_testing.serve_process import Served, serve
from caravan_testing.shard_tiny_llama import END_TOKEN_IDS, write_tiny_llama

# grpc.aio works only on the event loop on which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="session")

_CASES = json.loads((Path(__file__).parent / "beams_of_tiny_llama.json").read_text())["cases"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")
    # transformers computes with 32-bit keys and values.
    exact = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
    with serve("-np", "4", "-c", "512", "-t", "1", "--kv-layout", "unified", *exact, models=[model]) as running:
        yield running


async def test_outputs_and_scores_are_those_of_transformers(tiny: Served) -> None:
    assert len(_CASES) == 36
    async with ClientSession() as session:
        for case in _CASES:
            body = {
                "prompt": case["prompt"],
                "use_beam_search": True,
                "n": case["width"],
                "length_penalty": case["length_penalty"],
                "early_stopping": case["early_stopping"],
                "max_tokens": 12,
                "stop_token_ids": list(END_TOKEN_IDS[1:]),
                "logprobs": 0,
                "return_token_ids": True,
            }
            async with session.post(f"{tiny.url}/v1/completions", json=body) as response:
                reply = await response.json()
                assert response.status == 200, reply
            outputs = [choice["token_ids"] for choice in reply["choices"]]
            assert outputs == case["outputs"], case
            for choice, score in zip(reply["choices"], case["scores"], strict=True):
                logprobs = choice["logprobs"]["token_logprobs"]
                assert sum(logprobs) / len(logprobs) ** case["length_penalty"] == pytest.approx(score, abs=0.01)

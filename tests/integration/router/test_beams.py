"""Beam searches on shards with the toy model, equal to a search that is written plainly."""

import asyncio
import math
from dataclasses import replace

import pytest
from aiohttp import ClientSession

from caravan_scheduler.core.generation import BeamSearch, EarlyStopping, GenerationSpec
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_shard.backends.toy.model import TOY_FACTS
from caravan_testing.beam_oracle import BeamOutput, beam_outputs
from caravan_testing.cluster import VOCABULARY, Cluster, ClusterConfig, cluster
from caravan_testing.specs import run, spec, undisturbed
from caravan_testing.toy_oracle import logprobs_after

PROMPTS = (b"a", b"the quick brown fox", b"a much longer prompt that is computed in more than one chunk " * 3)


def members(prompt: bytes, new: int, search: BeamSearch, *, priority: int = 0) -> list[GenerationSpec]:
    one = spec(prompt, new, priority=priority)
    one = replace(
        one,
        stopping=replace(one.stopping, ignore_eos=False, stop_token_ids=frozenset({ord("x"), ord("q")})),
        sampling=replace(one.sampling, logprobs=True),
    )
    return [replace(one, beams=replace(search, index=index)) for index in range(search.width)]


def search(width: int, penalty: float = 1.0, early: EarlyStopping = EarlyStopping.NO) -> BeamSearch:
    return BeamSearch(
        width=width, index=0, length_penalty=penalty, early_stopping=early, eos_token_ids=TOY_FACTS.eos_token_ids
    )


async def found(running: Cluster, wanted: list[GenerationSpec]) -> list[list[GeneratedToken]]:
    streams = [running.engine.submit(one) for one in wanted]
    outputs = []
    for stream in streams:
        outputs.append([token async for tokens in stream for token in tokens])
        stream.close()
    return outputs


def check(wanted: list[GenerationSpec], outputs: list[list[GeneratedToken]]) -> list[BeamOutput]:
    expected = beam_outputs(logprobs_after, wanted[0])
    assert [tuple(token.token_id for token in output) for output in outputs] == [one.tokens for one in expected]
    for output, one in zip(outputs, expected, strict=True):
        total = sum(token.logprob or 0.0 for token in output)
        assert wanted[0].beams is not None
        assert math.isclose(total / len(output) ** wanted[0].beams.length_penalty, one.score, rel_tol=1e-4)
        assert output[-1].finish is not None
    return expected


async def test_in_company_with_scarce_cells() -> None:
    async with cluster(ClusterConfig(cells=320, max_sequences=8)) as running:
        searches = [members(prompt, 20, search(3), priority=number % 2) for number, prompt in enumerate(PROMPTS * 2)]
        others = [spec([number + 40, 50, 60], 30, priority=1 - number % 2) for number in range(6)]
        results = await asyncio.gather(
            *(found(running, wanted) for wanted in searches), *(run(running.engine, one) for one in others)
        )
        for wanted, outputs in zip(searches, results, strict=False):
            check(wanted, outputs)  # type: ignore[arg-type]
        assert results[len(searches) :] == [undisturbed(one) for one in others]
        await running.wait_until_at_rest()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_choices_over_http_are_the_best_first(path: str) -> None:
    is_chat = path.endswith("chat/completions")
    body = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 12, "length_penalty": 0.5, "early_stopping": "never"}
    logprobs = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    async with cluster(ClusterConfig()) as running, ClientSession(running.url) as client:
        async with client.post(path, json=body | fields | logprobs | {"return_token_ids": True}) as response:
            reply = await response.json()
        assert response.status == 200, reply
        prompt = reply["prompt_token_ids"] if is_chat else reply["choices"][0]["prompt_token_ids"]
        one = spec(prompt, 12)
        one = replace(
            one,
            stopping=replace(one.stopping, ignore_eos=False),
            beams=search(3, penalty=0.5, early=EarlyStopping.NEVER),
        )
        expected = beam_outputs(logprobs_after, one)
        assert [tuple(choice["token_ids"]) for choice in reply["choices"]] == [best.tokens for best in expected]
        for choice, best in zip(reply["choices"], expected, strict=True):
            columns = choice["logprobs"]
            values = [token["logprob"] for token in columns["content"]] if is_chat else columns["token_logprobs"]
            assert math.isclose(sum(values) / len(values) ** 0.5, best.score, rel_tol=1e-4)
            text = b"".join(VOCABULARY.piece(token).data for token in best.tokens if token < 256).decode()
            assert (choice["message"]["content"] if is_chat else choice["text"]) == text
        await running.wait_until_at_rest()

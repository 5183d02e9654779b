"""Samplers of a request over HTTP: the tokens are those that the shard's samplers give on the toy model."""

from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_proto.messages.sampling import SAMPLERS, SamplingParams
from caravan_shard.backends.toy.model import BOS
from caravan_testing.cluster import cluster
from caravan_testing.toy_oracle import expected_output

PROMPT = [BOS, *b"samplers"]
# What protobuf carries as float32 is written so that it is exact.
FIELDS: dict[str, dict[str, Any]] = {
    "top_n_sigma": {"top_n_sigma": 1.5},
    "dynatemp": {"temperature": 0.75, "dynatemp_range": 0.5, "dynatemp_exponent": 2.0},
    "dynatemp around 0": {"temperature": 0.0, "dynatemp_range": 1.5},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.25},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.25, "top_k": 100},
    "adaptive_p": {"adaptive_target": 0.25, "adaptive_decay": 0.5},
    "order": {"temperature": 3.0, "top_p": 0.5, "top_k": 40, "samplers": ["top_k", "top_p", "temperature"]},
    "other order": {"temperature": 3.0, "top_p": 0.5, "top_k": 40, "samplers": ["temperature", "top_k", "top_p"]},
}


def expected(fields: dict[str, Any], seed: int, defaults: tuple[str, ...] = ()) -> list[int]:
    """The output with ``fields``; ``defaults``: the order without ``samplers``."""
    used = fields.get("samplers")
    order = defaults if used is None else (*used, *(name for name in SAMPLERS if name not in used))
    sampling = SamplingParams(**{"temperature": 1.0, **fields, "samplers": order, "seed": seed})
    return expected_output(PROMPT, 24, sampling=sampling, ignore_eos=True)


async def post(url: str, body: dict[str, Any]) -> Any:
    async with ClientSession() as session, session.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


@pytest.mark.parametrize("name", FIELDS)
async def test_completions_and_their_choices_use_the_samplers(name: str) -> None:
    async with cluster() as running:
        body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        url = f"{running.url}/v1/completions"
        whole = await post(url, body | FIELDS[name] | {"seed": 5})
        assert whole["choices"][0]["token_ids"] == expected(FIELDS[name], 5)
        choices = [FIELDS[name] | {"seed": 6}, {"seed": 7}]
        both = (await post(url, body | {"n": 2, "choice_parameters": choices}))["choices"]
        assert [choice["token_ids"] for choice in both] == [expected(FIELDS[name], 6), expected({}, 7)]
        await running.wait_until_at_rest()


@pytest.mark.parametrize("name", FIELDS)
async def test_llama_servers_routes_have_its_order_unless_another_is_given(name: str) -> None:
    async with cluster() as running:
        # Without these, its defaults would be on.
        plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
        body = {"prompt": PROMPT, "n_predict": 24, "ignore_eos": True, "return_tokens": True, "seed": 8}
        reply = await post(f"{running.url}/completion", body | plain | FIELDS[name])
        assert reply["tokens"] == expected(plain | FIELDS[name], 8, SAMPLERS)
        await running.wait_until_at_rest()


async def test_ollamas_options_have_mirostat_without_the_defaults_of_filters() -> None:
    async with cluster() as running:
        options: dict[str, Any] = {
            "mirostat": 2,
            "mirostat_tau": 3.0,
            "mirostat_eta": 0.25,
            "temperature": 1.0,
            "seed": 9,
        }
        body = {"model": "toy", "prompt": "x", "context": PROMPT, "stream": False}
        reply = await post(f"{running.url}/api/generate", body | {"options": options | {"num_predict": 24}})
        count = reply["eval_count"]
        output = expected_output(reply["context"][:-count], 24, sampling=SamplingParams(**options))
        assert reply["context"][-count:] == output
        await running.wait_until_at_rest()


def test_the_cases_differ_from_each_other() -> None:
    outputs = {name: expected(fields, 5) for name, fields in FIELDS.items()}
    assert len({tuple(output) for output in outputs.values()}) == len(FIELDS)

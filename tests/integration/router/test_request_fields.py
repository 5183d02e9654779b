"""Samplers, texts to fill in, truncated chats and scored endings, from HTTP to the toy model."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession

from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.sampling import SAMPLERS, SamplingParams
from caravan_router.engine.streams import RequestStream
from caravan_scheduler.core.generation import GenerationSpec
from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.toy.model import BOS
from caravan_testing.cluster import Cluster, ClusterConfig, cluster, expected_text
from caravan_testing.specs import read, spec, undisturbed
from caravan_testing.toy_oracle import expected_logprobs, expected_output

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


# The toy's tokens for it are bytes.
FILLED = [BOS, *b"\x1d", *b"def f(</s>", *b"\x1e", *b")\n", *b"\x1f"]


async def send(session: ClientSession, running: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(f"{running.url}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


async def test_the_model_reads_both_sides_and_no_control_token_in_them() -> None:
    expected = expected_output(FILLED, 12)
    async with cluster() as running, ClientSession() as session:
        body = {"prompt": "def f(</s>", "suffix": ")\n", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        reply = await send(session, running, "/v1/completions", body)
        (choice,) = reply["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (FILLED, expected)
        asked = {"model": "toy", "prompt": "def f(</s>", "suffix": ")\n", "stream": False}
        inserted = await send(
            session, running, "/api/generate", {**asked, "options": {"temperature": 0, "num_predict": 12}}
        )
        assert inserted["context"] == [*FILLED, *expected]
        await running.wait_until_at_rest()


# Copies of what is cached are worth it.
_COMPUTING = ClusterConfig(step_s=0.001, token_s=0.0002)


@pytest.mark.usefixtures("copies_cost_as_guessed")
async def test_llama_servers_routes_return_the_same_text() -> None:
    async with cluster(_COMPUTING) as running, ClientSession() as session:
        greedy = {"temperature": 0, "n_predict": 12}
        plain = await send(session, running, "/completion", {"prompt": "hello", **greedy})
        assert plain["content"] == expected_text("hello", 12)
        body = {"input_prefix": "def f(", "prompt": "</s>", "input_suffix": ")\n", **greedy, "return_tokens": True}
        filled = await send(session, running, "/infill", body)
        assert filled["tokens"] == expected_output(FILLED, 12)
        for path, one in (("/completion", {"prompt": "hello", **greedy}), ("/infill", body)):
            async with session.post(f"{running.url}{path}", json={**one, "n": 2}) as response:
                both = await response.json()
            assert [(each["index"], each["content"]) for each in both] == [
                (index, (plain if path == "/completion" else filled)["content"]) for index in range(2)
            ]
        long = {**body, "input_prefix": "x" * 200}
        first, again = [await send(session, running, "/infill", long) for _ in range(2)]
        assert first["tokens_cached"] == 0
        assert again["tokens_cached"] > 200
        anew = await send(session, running, "/infill", {**long, "cache_prompt": False})
        assert anew["tokens_cached"] == 0
        assert first["content"] == again["content"] == anew["content"]
        await running.wait_until_at_rest()


async def ask(session: ClientSession, running: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(f"{running.url}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


async def test_what_is_left_is_answered_as_if_it_were_all() -> None:
    messages = [{"role": "system", "content": "Be short."}]
    for number in range(60):
        messages += [{"role": "user", "content": f"{number} " + "x" * 20}, {"role": "assistant", "content": "a" * 20}]
    messages.append({"role": "user", "content": "Last"})
    greedy = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    async with cluster(ClusterConfig(cells=1024)) as running, ClientSession() as session:
        body = {"messages": messages, "truncation": "auto", **greedy}
        told = await ask(session, running, "/v1/chat/completions", body)
        gone = set(told["truncated"]["messages"])
        left = [message for at, message in enumerate(messages) if at not in gone]
        assert left[0] == messages[0]
        assert left[1] == messages[1 + 2 * told["truncated"]["turns"]]
        same = await ask(session, running, "/v1/chat/completions", {"messages": left, **greedy})
        assert told["prompt_token_ids"] == same["prompt_token_ids"]
        assert told["choices"] == same["choices"]
        options = {"temperature": 0, "num_predict": 12}
        body = {"model": "toy", "messages": messages, "stream": False, "options": options}
        answer = await ask(session, running, "/api/chat", body)
        assert answer["prompt_eval_count"] == told["usage"]["prompt_tokens"]
        assert answer["message"]["content"] == told["choices"][0]["message"]["content"]
        await running.wait_until_at_rest()


CONTEXT = list(b"a context of which the log probabilities are known " * 4)
ENDINGS = [[number, *b" ends", 200 - number] for number in range(24)]


def check(one: GenerationSpec, stream: RequestStream, tokens: list[int]) -> None:
    assert tokens == undisturbed(one)
    rows = expected_logprobs(one.prompt)
    expected = [row[token] for row, token in zip(rows, one.prompt[1:], strict=True)]
    found = [token.logprob for token in stream.prompt_logprobs]
    assert found[0] is None
    np.testing.assert_allclose(np.array(found[1:], np.float64), expected, atol=1e-4)


@pytest.mark.usefixtures("copies_cost_as_guessed")
@pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
async def test_endings_of_one_context_compute_it_once(layout: KvLayout) -> None:
    computed = []

    def count(batch: TokenBatch) -> None:
        computed.append(len(batch.tokens))

    config = replace(_COMPUTING, layout=layout, max_prompt_logprob_tokens=256, hook=count)
    async with cluster(config) as running:
        wanted = [spec([*CONTEXT, *ending], 1, prompt_logprobs=True) for ending in ENDINGS]

        async def submit(one: GenerationSpec) -> None:
            stream = running.engine.submit(one)
            check(one, stream, await read(stream))

        await asyncio.gather(*map(submit, wanted))
        # An ending and the token before it, whose logits give the first logprob of the ending. Those that start with
        # the first one's last chunk do not wait for fewer than 16 tokens.
        early = running.config.max_sequences * 16
        assert sum(computed) <= len(CONTEXT) + len(ENDINGS) * (len(ENDINGS[0]) + 1) + early
        # A request that comes later finds what is cached, in cells or saved.
        computed.clear()
        await submit(spec([*CONTEXT, *b"later"], 1, prompt_logprobs=True))
        assert sum(computed) <= len(b"later") + 1 + 16
        await running.wait_until_at_rest()

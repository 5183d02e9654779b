"""Thoughts end where their budget says, also with scarce cells and lost shards, and constraints apply behind them."""

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_proto.messages.constraint import Thought
from caravan_router.engine.streams import RequestStream
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.cluster import VOCABULARY, ClusterConfig, cluster
from caravan_testing.specs import read, run, spec, undisturbed
from caravan_testing.waiting import eventually

ENDING = tuple(b"</think>\n\n")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content.split('</think>')[-1] }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def demand(count: int) -> list[tuple[GenerationSpec, list[int]]]:
    """Return requests with and without budgets, and their outputs."""
    chance = random.Random(13)
    wanted = []
    for number in range(count):
        one = spec([chance.randrange(32, 127) for _ in range(chance.randrange(1, 60))], 40, seed=number)
        output = undisturbed(one)
        if number % 4:
            budget = number % 25
            forced = [*output[:budget], *ENDING]
            rest = replace(
                one,
                prompt=(*one.prompt, *forced),
                stopping=replace(one.stopping, max_new_tokens=40 - len(forced)),
            )
            thought = Thought(closings=(b"</think>",), ending=ENDING, max_tokens=budget)
            one = replace(one, thought=thought, max_draft_tokens=4 * (number % 3))
            output = [*forced, *undisturbed(rest)]
        wanted.append((one, output))
    return wanted


async def test_scarce_cells() -> None:
    async with cluster(ClusterConfig(cells=300, max_sequences=16, step_s=0.002, token_s=0.0002)) as running:
        wanted = demand(60)
        got = await asyncio.gather(*(run(running.engine, one) for one, _ in wanted))
        assert got == [output for _, output in wanted]
        await running.wait_until_at_rest()


async def end_after(stream: RequestStream, tokens: int) -> list[int]:
    """Read ``stream`` and end its thought once so many tokens are there."""
    output: list[int] = []
    asked = False
    async for ready in stream:
        output += [token.token_id for token in ready]
        if not asked and len(output) >= tokens:
            asked = True
            stream.end_thought()
    stream.close()
    return output


@pytest.mark.parametrize("cells", [300, 4000])
async def test_a_thought_ends_when_the_client_says_so_and_the_output_goes_on_behind_it(cells: int) -> None:
    chance = random.Random(5)
    config = ClusterConfig(shards=2, cells=cells, max_sequences=16, step_s=0.002, token_s=0.0002)
    async with cluster(config) as running:
        asked = [
            replace(
                spec([chance.randrange(32, 127) for _ in range(chance.randrange(1, 60))], 120, seed=number),
                thought=Thought(closings=(b"</think>",), ending=ENDING, max_tokens=[None, 60, 10][number % 3]),
                max_draft_tokens=4 * (number % 2),
            )
            for number in range(12)
        ]
        after = [chance.randrange(1, 40) for _ in asked]
        outputs = await asyncio.gather(*map(end_after, map(running.engine.submit, asked), after))
        await running.wait_until_at_rest()
    early = 0
    for one, output, tokens in zip(asked, outputs, after, strict=True):
        assert one.thought is not None
        free = undisturbed(one)
        end = next(at for at in range(len(output)) if tuple(output[at : at + len(ENDING)]) == ENDING)
        most = one.thought.max_tokens
        assert output[:end] == free[:end]
        assert end >= min(tokens, len(output) if most is None else most)
        early += end < (len(output) if most is None else most)
        begun = (*one.prompt, *output[: end + len(ENDING)])
        left = 120 - end - len(ENDING)
        rest = replace(one, prompt=begun, stopping=replace(one.stopping, max_new_tokens=left))
        assert output[end + len(ENDING) :] == undisturbed(rest)
    assert early >= 6


async def test_a_thought_that_has_not_begun_is_left_out() -> None:
    async with cluster(ClusterConfig()) as running:
        one = replace(spec(range(40, 60), 30, seed=1), thought=Thought(closings=(b"</think>",), ending=ENDING))
        stream = running.engine.submit(one)
        stream.end_thought()
        assert (await read(stream))[: len(ENDING)] == list(ENDING)


async def test_a_lost_shard() -> None:
    async with cluster(ClusterConfig(shards=2, step_s=0.002)) as running:
        wanted = demand(40)
        streams = [running.engine.submit(one) for one, _ in wanted]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await eventually(lambda: sum(task.done() for task in reading) >= 5, "some have ended")
        await running.stop_shard(running.addresses[0])
        assert await asyncio.gather(*reading) == [output for _, output in wanted]


async def test_a_budget_ends_the_thought_of_a_chat_where_it_says() -> None:
    async with cluster(ClusterConfig(chat_template=TEMPLATE)) as running, ClientSession(running.url) as client:

        async def chat(**body: Any) -> dict[str, Any]:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 7, **body}
            async with client.post("/v1/chat/completions", json=body) as response:
                reply: dict[str, Any] = await response.json()
                assert response.status == 200, reply
                return reply

        free = await chat(ignore_eos=True)
        assert free["choices"][0]["message"]["content"] == ""
        for budget in (1, 2, 20):
            reply = await chat(ignore_eos=True, reasoning_budget_tokens=budget)
            message = reply["choices"][0]["message"]
            assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
            # A token of the toy model is a byte.
            thought = free["choices"][0]["message"]["reasoning_content"][:budget].rstrip()
            assert message["reasoning_content"] == thought
            assert len(VOCABULARY.tokenize(message["content"], add_special=False, parse_special=False)) > 0
            assert "</think>" not in message["content"]

        schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
        named = {"name": "a", "schema": schema | {"additionalProperties": False}}
        asked = {"response_format": {"type": "json_schema", "json_schema": named}}
        reply = await chat(**asked, reasoning_budget_tokens=9)
        message = reply["choices"][0]["message"]
        assert json.loads(message["content"])["a"] in {1, 22}
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 9

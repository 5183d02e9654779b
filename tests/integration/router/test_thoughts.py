"""Thoughts end where their budget says, also with scarce cells and lost shards, and constraints apply behind them."""

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

from aiohttp import ClientSession

from caravan_proto.messages.constraint import Thought
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

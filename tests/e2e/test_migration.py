"""Sequences move from shard to shard while the real model generates them, and their texts stay the same.

`tests/integration/router/test_migration.py` shows it with toy shards.
"""

import asyncio
import json
import re

import pytest
from aiohttp import ClientSession

from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]

FLAGS = ("-np", "4", "-c", "4096", "-t", "1", "--exact")
PROMPTS = [
    f"{number}. The history of the {place} begins" for number, place in enumerate(("sea", "moon", "city", "bread"))
]
# All of them, and what each has before a drain.
NEW_TOKENS, SOME_TOKENS = 150, 20


async def generate(session: ClientSession, prompt: str, into: list[int]) -> None:
    """Append token ids to ``into`` as they come."""
    parameters = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    async with session.post("/generate_stream", json={"inputs": prompt, "parameters": parameters}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data:"):
                into.append(json.loads(line.removeprefix(b"data:"))["token"]["id"])  # noqa: PERF401  as they come


async def metric(session: ClientSession, name: str) -> float:
    text = await (await session.get("/metrics")).text()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{\S*)? (\S+)$", text, re.MULTILINE))


async def busiest(session: ClientSession) -> str:
    """Return the address of the shard with the most sequences."""
    shards = (await (await session.get("/admin/shards")).json())["shards"]
    return str(max(shards, key=lambda shard: int(shard["sequences"]))["address"])


async def until(session: ClientSession, address: str, *, serving: bool) -> None:
    """Wait until a shard serves, or does not. One that starts with --exact compares many logits first."""

    async def state() -> str | None:
        shards = (await (await session.get("/admin/shards")).json())["shards"]
        return next((one["state"] for one in shards if one["address"] == address), None)

    what = f"{address} serves" if serving else f"{address} serves no longer"
    await eventually(state, what, lambda found: serving is (found == "serving"))


async def run(session: ClientSession, *, drains: bool) -> list[list[int]]:
    """Generate from all prompts at once. If ``drains``, drain the shard that has the most of them meanwhile."""
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    async with asyncio.TaskGroup() as group:
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            group.create_task(generate(session, prompt, output))
        if drains:
            await eventually(lambda: all(len(output) >= SOME_TOKENS for output in outputs), "all have some tokens")
            address = await busiest(session)
            async with session.post(f"/admin/shards/{address.replace('/', '%2F')}/drain") as response:
                assert response.status == 200, await response.text()
            # `caravan serve` starts it again.
            for wanted in (False, True):
                await until(session, address, serving=wanted)
    return outputs


async def move_twice(served: Served) -> tuple[list[list[list[int]]], dict[str, float]]:
    """Return the outputs of three rounds, of which the second and the third are moved, and what that took."""
    async with ClientSession(served.url) as session:
        rounds = [await run(session, drains=drains) for drains in (False, True, True)]
        names = ("caravan_recomputed_tokens", "caravan_fetched_bytes")
        return rounds, {name: await metric(session, name) for name in names}


def test_texts_stay_the_same_while_their_sequences_move() -> None:
    with serve("--shards", "2", *FLAGS) as served:
        (undisturbed, *moved), seen = asyncio.run(move_twice(served))
    assert moved == [undisturbed, undisturbed]
    # What was measured to take less time decides.
    assert seen["caravan_fetched_bytes"] > 1_000_000 or seen["caravan_recomputed_tokens"] > SOME_TOKENS

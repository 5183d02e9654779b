"""`caravan serve` with two models on four shards, as processes with the toy model."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.cluster import expected_text
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import eventually

FLAGS = ("--backend", "fake", "--fake-step-ms", "5", "--parallel", "2", "--max-concurrent-requests", "30")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with two shards for each of two models."""
    with serve(*FLAGS, "--shards", "2", models=("models/first.gguf", "models/second.gguf")) as running:
        yield running


async def get(session: ClientSession, served: Served, path: str) -> Any:
    async with session.get(f"{served.url}{path}") as response:
        return await response.json()


async def models(session: ClientSession, served: Served) -> list[str]:
    return [entry["id"] for entry in (await get(session, served, "/v1/models"))["data"]]


async def until_serving(session: ClientSession, served: Served, shards: int) -> None:
    async def states() -> list[str]:
        return [shard["state"] for shard in (await get(session, served, "/admin/shards"))["shards"]]

    await eventually(states, f"{shards} shards serve", lambda found: found.count("serving") == shards)


async def steps(session: ClientSession, served: Served) -> dict[str, int]:
    """Return the number of steps of each shard, by its address."""
    async with session.get(f"{served.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("caravan_batch_size_count{"):
            labels, _, value = line.rpartition(" ")
            found[labels.partition('shard="')[2].partition('"')[0]] += int(value)
    return dict(found)


async def ask(
    session: ClientSession, served: Served, model: str, prompt: str, tokens: int, **more: Any
) -> tuple[int, str, str]:
    """Return the status, the model and the text of a completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0} | more
    async with session.post(f"{served.url}/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            return response.status, "", answer["error"]["code"]
        return 200, answer["model"], answer["choices"][0]["text"]


async def test_mixed_load_is_served_by_the_shards_of_each_model(served: Served) -> None:
    async with ClientSession() as session:
        # The first --model is the default, whichever loads first.
        assert await models(session, served) == ["first.gguf", "second.gguf"]
        await until_serving(session, served, 4)
        by_model: dict[str, list[str]] = {"first.gguf": [], "second.gguf": []}
        for shard in (await get(session, served, "/admin/shards"))["shards"]:
            by_model[shard["model"]].append(shard["address"])
        assert [len(addresses) for addresses in by_model.values()] == [2, 2]
        for model, others in (("first.gguf", "second.gguf"), ("second.gguf", "first.gguf")):
            before = await steps(session, served)
            wanted = [(model, f"{model} {number}", 6 + number) for number in range(12)]
            answers = await asyncio.gather(*(ask(session, served, *one) for one in wanted))
            assert answers == [(200, model, expected_text(prompt, tokens)) for _, prompt, tokens in wanted]
            after = await steps(session, served)
            assert all(after[address] > before.get(address, 0) for address in by_model[model])
            assert all(after.get(address, 0) == before.get(address, 0) for address in by_model[others])
        mixed = [(list(by_model)[number % 2], f"mixed {number}", 6) for number in range(24)]
        answers = await asyncio.gather(*(ask(session, served, *one) for one in mixed))
        assert answers == [(200, model, expected_text(prompt, tokens)) for model, prompt, tokens in mixed]

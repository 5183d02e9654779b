"""A model whose positions have several dimensions (M-RoPE): what it computed is shared, and moves between shards."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.serve_process import serve
from caravan_testing.shard_models import POSITIONS_MODEL, fetched
from caravan_testing.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]

FLAGS = ("--shards", "2", "-np", "4", "-c", "4096", "-t", "1", "--exact")
PROMPT = " ".join(f"{number} camels cross the desert." for number in range(12))


async def complete(session: ClientSession, prompt: str, **fields: Any) -> tuple[list[str], int]:
    """Return the texts of an answer, and how many tokens of the prompt were there already."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    texts = [choice["text"] for choice in answer["choices"]]
    return texts, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def shards(session: ClientSession) -> dict[str, Any]:
    """Return what the router knows of each shard, by address."""
    listed = (await (await session.get("/admin/shards")).json())["shards"]
    return {shard["address"]: shard for shard in listed}


async def until(session: ClientSession, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until what the router knows of its shards meets ``condition``."""
    await eventually(lambda: shards(session), "the shards are as they should be", condition)


async def drain_the_holder(session: ClientSession) -> None:
    """Drain the shard that holds all prefixes, and wait until it has gone."""
    held = (await (await session.get("/admin/prefixes")).json())["shards"]
    (holder,) = (one["shard"] for one in held if one["prefixes"])
    async with session.post(f"/admin/shards/{holder.replace('/', '%2F')}/drain") as response:
        assert response.status == 200, await response.text()
    await until(session, lambda known: known.get(holder, {}).get("state") not in ("serving", "draining"))


async def saved_bytes(session: ClientSession) -> int:
    """Return what all shards have saved in memory."""
    return sum(one["memory_bytes"] for one in (await (await session.get("/admin/prefixes")).json())["shards"])


async def try_all(url: str) -> None:
    async with ClientSession(url) as session:
        await until(session, lambda known: [shard["state"] for shard in known.values()] == ["serving"] * 2)
        (first,), _ = await complete(session, PROMPT)
        longer = f"{PROMPT}{first} And then"
        (again,), cached = await complete(session, longer)
        assert cached > len(PROMPT) // 2
        await drain_the_holder(session)
        # The other shard has it now. Whether it loads that depends on whether this is faster than to compute it.
        assert await saved_bytes(session) > 0
        (moved,), _ = await complete(session, longer)
        (fresh,), none_cached = await complete(session, longer, cache_salt="from the start")
        assert (again, moved, none_cached) == (fresh, fresh, 0)
        # A fork.
        several, _ = await complete(session, longer, n=3, cache_salt="fork")
        assert several == [fresh] * 3


def test_what_was_computed_is_shared_forked_and_moved() -> None:
    with serve(*FLAGS, models=(fetched(POSITIONS_MODEL),)) as served:
        asyncio.run(try_all(served.url))

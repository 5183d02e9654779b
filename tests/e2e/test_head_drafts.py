"""Drafts of a model's own head over HTTP: outputs are those without, and it is shown what was drafted."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.metrics_text import total
from caravan_testing.serve_process import serve
from caravan_testing.shard_models import CHAIN_HEAD_MODEL, DFLASH_HEAD, DFLASH_MODEL, DSPARK_HEAD, fetched

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

# Cells for less than what may run at once: sequences wait or are preempted. Chunks of any size are computed alike.
FLAGS = ("-t", "1", "-np", "6", "-c", "640", "--kv-layout", "unified")
NEW, MOST = 96, 4


def bodies() -> list[dict[str, Any]]:
    """Return greedy and seeded requests; some have two choices, which begin with the same cells."""
    found = []
    for number in range(8):
        prompt = random.Random(number).choices(range(300, 1200), k=60)
        body = {"prompt": prompt, "max_tokens": NEW, "ignore_eos": True, "return_token_ids": True}
        sampling = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
        found.append(body | sampling | {"n": 2 if number % 4 == 3 else 1, "priority": number % 3})
    return found


async def answers(session: ClientSession) -> list[list[list[int]]]:
    """Return the tokens of all choices of all requests, which are sent at once."""

    async def answer(body: dict[str, Any]) -> list[list[int]]:
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            choices = (await response.json())["choices"]
            return [choice["token_ids"] for choice in sorted(choices, key=lambda one: one["index"])]

    return await asyncio.gather(*map(answer, bodies()))


async def ask(url: str) -> tuple[list[list[list[int]]], str, dict[str, Any], dict[str, Any]]:
    """Return the answers, and then the metrics, what is said of the model, and of the drafts of its shard."""
    async with ClientSession(url) as session:
        found = await answers(session)
        metrics = await (await session.get("/metrics")).text()
        info = await (await session.get("/info")).json()
        [shard] = (await (await session.get("/admin/shards")).json())["shards"]
        return found, metrics, info, shard["speculation"]


@pytest.mark.parametrize(
    ("model", "head", "method"),
    [(CHAIN_HEAD_MODEL, None, "MTP"), (DFLASH_MODEL, DFLASH_HEAD, "DFlash"), (DFLASH_MODEL, DSPARK_HEAD, "DSpark")],
)
def test_outputs_are_those_of_a_server_without(model: Path, head: Path | None, method: str) -> None:
    model = fetched(model)
    drafting = ["--spec-type", f"draft-{method.lower()}", "--speculate", str(MOST)]
    drafting += [] if head is None else ["--model-draft", str(fetched(head))]
    with serve(*FLAGS, models=[model]) as server:
        expected, plain_metrics, plain_info, _ = asyncio.run(ask(server.url))
    with serve(*FLAGS, *drafting, models=[model]) as server:
        found, metrics, info, speculation = asyncio.run(ask(server.url))
    assert found == expected
    assert sum(map(len, found)) == 10
    of_head = 'source="model"'
    drafted = total(metrics, "caravan_spec_decode_num_draft_tokens_total", of_head)
    accepted = total(metrics, "caravan_spec_decode_num_accepted_tokens_total", of_head)
    # How many are worth their time depends on the machine, but some are always tried, and most are right.
    assert 0 < accepted <= drafted
    assert total(plain_metrics, "caravan_spec_decode_num_draft_tokens_total") == 0
    assert info["draft_model"] == f"{(head or model).name} ({method})"
    assert plain_info["draft_model"] is None
    assert speculation["max_draft_tokens"] >= MOST
    assert speculation["off_because"] is None

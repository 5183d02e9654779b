"""Drafts of a model's own head over HTTP: outputs are those without, and it is shown what was drafted."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.always_drafts import draft_always
from caravan_testing.metrics_text import total
from caravan_testing.serve_process import serve
from caravan_testing.shard_models import CHAIN_HEAD_MODEL, fetched
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from caravan_testing.tiny_dflash import Dflash, write_cyclic

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.model]

# Cells for less than what may run at once: sequences wait or are preempted. Chunks of any size are computed alike.
FLAGS = ("-t", "1", "-np", "6", "-c", "640", "--kv-layout", "unified")
NEW, MOST = 96, 4
# Of a model with few tokens, a step of which takes much longer than a pass of its head.
DEEP = Shape(layers=24, inner=2048, context=4096, trunk=0.00003)
KINDS = {"MTP": None, "DFlash": Dflash(), "DSpark": Dflash(markov=0.01, from_last=True)}


def written(folder: Path, head: Dflash | None) -> list[Path]:
    """Return the file of a model, and that of its head if it has one."""
    if head is None:
        return [fetched(CHAIN_HEAD_MODEL)]
    model = write_cyclic(folder / "model.gguf", write_tiny_llama(folder / "deep.gguf", DEEP))
    return [model, head.write(folder / "head.gguf", model)]


def bodies(tokens: range) -> list[dict[str, Any]]:
    """Return greedy and seeded requests; some have two choices, which begin with the same cells."""
    found = []
    for number in range(8):
        prompt = random.Random(number).choices(tokens, k=60)
        body = {"prompt": prompt, "max_tokens": NEW, "ignore_eos": True, "return_token_ids": True}
        sampling = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
        found.append(body | sampling | {"n": 2 if number % 4 == 3 else 1, "priority": number % 3})
    return found


async def answers(session: ClientSession, tokens: range) -> list[list[list[int]]]:
    """Return the tokens of all choices of all requests, which are sent at once."""

    async def answer(body: dict[str, Any]) -> list[list[int]]:
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            choices = (await response.json())["choices"]
            return [choice["token_ids"] for choice in sorted(choices, key=lambda one: one["index"])]

    return await asyncio.gather(*map(answer, bodies(tokens)))


async def ask(url: str, tokens: range) -> tuple[list[list[list[int]]], str, dict[str, Any], dict[str, Any]]:
    """Return the answers, and then the metrics, what is said of the model, and of the drafts of its shard."""
    async with ClientSession(url) as session:
        found = await answers(session, tokens)
        metrics = await (await session.get("/metrics")).text()
        info = await (await session.get("/info")).json()
        [shard] = (await (await session.get("/admin/shards")).json())["shards"]
        return found, metrics, info, shard["speculation"]


@pytest.mark.parametrize("method", KINDS)
def test_outputs_are_those_of_a_server_without(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, *head = written(tmp_path, KINDS[method])
    tokens = range(10, 200) if head else range(300, 1200)
    drafting = ["--spec-type", f"draft-{method.lower()}", "--speculate", str(MOST)]
    drafting += [flag for path in head for flag in ("--model-draft", str(path))]
    with serve(*FLAGS, models=[model]) as server:
        expected, plain_metrics, plain_info, _ = asyncio.run(ask(server.url, tokens))
    draft_always(monkeypatch)
    with serve(*FLAGS, *drafting, models=[model]) as server:
        found, metrics, info, speculation = asyncio.run(ask(server.url, tokens))
    assert found == expected
    assert sum(map(len, found)) == 10
    of_head = 'source="model"'
    drafted = total(metrics, "caravan_spec_decode_num_draft_tokens_total", of_head)
    accepted = total(metrics, "caravan_spec_decode_num_accepted_tokens_total", of_head)
    # About half of the tokens of the ten answers.
    assert 2 * NEW < accepted <= drafted < 2 * accepted
    assert total(plain_metrics, "caravan_spec_decode_num_draft_tokens_total") == 0
    assert info["draft_model"] == f"{(head[0] if head else model).name} ({method})"
    assert plain_info["draft_model"] is None
    assert speculation["max_draft_tokens"] >= MOST
    assert speculation["off_because"] is None

"""A server on the GPUs of this host, with its defaults. Without GPUs, all but the first test run on the CPU."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_shard.backends.llama.devices.devices import find_devices, first_devices
from caravan_testing.serve_process import Served, serve
from caravan_testing.shard_models import DEMO_MODEL, TIE_LOGITS, ModelDriver, fetched

pytestmark = pytest.mark.gpu

NEW_TOKENS = 32
PROMPTS = tuple(f"{number}. The history of the {place} begins" for number, place in enumerate(("sea", "moon") * 4))
# As in test_gpu: a GPU adds in another order than a CPU.
LEAST_TIE_LOGITS = 0.75
DRAWN = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 11}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("-np", "8", "-c", "8192", models=(fetched(DEMO_MODEL),)) as running:
        yield running


async def _generate(session: ClientSession, url: str, prompt: str, **parameters: Any) -> list[int]:
    asked = {"max_new_tokens": NEW_TOKENS, "details": True, **parameters}
    async with session.post(f"{url}/generate", json={"inputs": prompt, "parameters": asked}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return [token["id"] for token in answer["details"]["tokens"]]


async def _all(url: str, *, together: bool) -> list[list[int]]:
    async with ClientSession() as session:
        if together:
            return list(await asyncio.gather(*(_generate(session, url, prompt) for prompt in PROMPTS)))
        return [await _generate(session, url, prompt) for prompt in PROMPTS]


def test_the_weights_are_on_the_gpus() -> None:
    if not first_devices():
        pytest.skip("llama.cpp finds no GPU")
    free = sum(device.free_bytes for device in find_devices())
    with serve("-np", "8", "-c", "8192", models=(fetched(DEMO_MODEL),)):
        taken = free - sum(device.free_bytes for device in find_devices())
    assert taken >= 0.8 * DEMO_MODEL.stat().st_size


def test_company_changes_no_text_but_at_ties(served: Served) -> None:
    alone = asyncio.run(_all(served.url, together=False))
    together = asyncio.run(_all(served.url, together=True))
    judge = ModelDriver(fetched(DEMO_MODEL), ctx_size=2048, gpu_layers=0, device="none")
    judge.tie_logits = max(LEAST_TIE_LOGITS, TIE_LOGITS[DEMO_MODEL])
    try:
        for prompt, expected, got in zip(PROMPTS, alone, together, strict=True):
            judge.check_same(judge.tokens(prompt), expected, got)
    finally:
        judge.backend.close()


async def test_a_seed_repeats_its_draws(served: Served) -> None:
    async with ClientSession() as session:
        first = await _generate(session, served.url, PROMPTS[0], **DRAWN)
        again = await _generate(session, served.url, PROMPTS[0], **DRAWN)
        other = await _generate(session, served.url, PROMPTS[0], **{**DRAWN, "seed": 12})
    assert first == again != other

"""A preempted sequence continues its draws: every token is the one that its seed and position select.

`tests/integration/router/test_preemption.py` shows it with the toy model.
"""

import asyncio
import json
import re

import pytest
from aiohttp import ClientSession

from caravan_testing.oracle import Oracle, check_draws
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.model]

LOW = {11: "Once upon a time there was a small dog who", 12: "My favorite book is"}
# New tokens between two interruptions, and many more that the requests may have, in case the test is late.
SOME_TOKENS, LOW_TOKENS = 8, 230
HIGH = {21: "The train left the station at", 22: "A good recipe for bread begins with"}


async def stream(
    session: ClientSession, prompt: str, seed: int, new_tokens: int, priority: int, into: list[int]
) -> None:
    """Append token ids to ``into`` as they arrive, sampled at temperature 1 without filters."""
    parameters = {"do_sample": True, "seed": seed, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    body = {"inputs": prompt, "parameters": parameters, "priority": priority}
    async with session.post("/generate_stream", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data:"):
                into.append(json.loads(line.removeprefix(b"data:"))["token"]["id"])  # noqa: PERF401  as they come


async def interrupted(served: Served) -> tuple[dict[int, list[int]], dict[str, float]]:
    """Return outputs by seed and preemptions by kind.

    Three times, requests of high priority take both sequence ids from those of low priority, which run again by then.
    """
    outputs: dict[int, list[int]] = {seed: [] for seed in LOW}

    async def some_tokens() -> None:
        enough = {seed: len(outputs[seed]) + SOME_TOKENS for seed in LOW}
        await eventually(lambda: all(len(outputs[seed]) >= enough[seed] for seed in LOW), "both have some new tokens")

    async with ClientSession(served.url) as session, asyncio.TaskGroup() as low:
        tasks = [low.create_task(stream(session, LOW[seed], seed, LOW_TOKENS, 0, outputs[seed])) for seed in LOW]
        for number in range(3):
            await some_tokens()
            assert not any(task.done() for task in tasks)
            async with asyncio.TaskGroup() as high:
                for seed, prompt in HIGH.items():
                    into = outputs[seed + 100 * number] = []
                    high.create_task(stream(session, prompt, seed + 100 * number, 4, 5, into))
        await some_tokens()
        for task in tasks:
            task.cancel()
    async with ClientSession(served.url) as session, session.get("/metrics") as response:
        counts = re.findall(r'^caravan_preemptions{how="(\w+)"\S*} (\S+)$', await response.text(), re.MULTILINE)
    return outputs, {how: float(count) for how, count in counts}


@pytest.mark.parametrize("cache_ram", ["64", "0"], ids=["64-swap", "0-recompute"])
@pytest.mark.parametrize("layout", ["unified", "split"])
def test_a_preempted_sequence_draws_the_same_tokens(oracle: Oracle, layout: str, cache_ram: str) -> None:
    flags = ("-np", "2", "-c", "512", "-t", "1", "--kv-layout", layout, "--cache-ram", cache_ram)
    with serve(*flags) as served:
        outputs, preemptions = asyncio.run(interrupted(served))
    assert sum(preemptions.values()) >= 3
    # With room to swap, what was measured to take less time decides: on a busy machine, not always swapping.
    # `scheduling/test_preemption.py` tests the decision.
    assert cache_ram != "0" or not preemptions["swap"]
    prompts = LOW | {seed + 100 * number: prompt for seed, prompt in HIGH.items() for number in range(3)}
    for seed, output in outputs.items():
        check_draws(oracle, prompts[seed], seed, output, can_end=False)

"""A shard that drains hands its sequences, and what it keeps of ended ones, to other shards, over gRPC."""

import asyncio
from dataclasses import replace

import pytest
from aiohttp import ClientSession

from caravan_scheduler.core.shards import ShardState
from caravan_testing.cluster import Cluster, ClusterConfig, body, cluster, expected_text, generate
from caravan_testing.specs import read, spec, undisturbed
from caravan_testing.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.usefixtures("copies_cost_as_guessed")

# Computing takes long enough that moving cells is faster.
CONFIG = ClusterConfig(shards=2, step_s=0.004, token_s=0.002, drain_timeout_s=DEADLINE_S)
PROMPT = list(range(60, 200))
# While the last prompts are computed, the first sequences generate some 70 tokens, and more on a busy machine.
NEW_TOKENS = 400


@pytest.mark.parametrize("same_cells", [True, False])
async def test_sequences_move_while_they_are_generated(same_cells: bool) -> None:
    async with cluster(CONFIG) as running:
        if not same_cells:
            await restart(running, running.addresses[1], "71" * 32)
        wanted = [spec([number, *PROMPT], NEW_TOKENS) for number in range(6)]
        streams = [running.engine.submit(one) for one in wanted]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await running.wait_until_all_have(2, sequences=6)
        leaving = running.addresses[0]
        moving = len(running.engine.scheduler.shards[leaving].stays.residents)
        assert moving > 0
        await running.drain_shard(leaving)
        assert running.state(leaving) is not ShardState.SERVING
        assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
        again = await running.metric("caravan_tokens_recomputed_total")
        swapped = await running.metric('caravan_request_preemptions_total{how="swap"}')
        fetched = await running.metric("caravan_prefix_fetched_bytes_total")
        if same_cells:
            # Only tokens of the steps that were under way then are computed again.
            assert (swapped, again < moving * len(PROMPT), fetched > 0) == (moving, True, True)
        else:
            assert (swapped, again >= moving * len(PROMPT), fetched) == (0, True, 0)
        await running.wait_until_at_rest()


async def restart(running: Cluster, address: str, fingerprint: str) -> None:
    """Start a shard again whose saved runs have another fingerprint."""
    await running.stop_shard(address)
    await running.start_shard(address, state_fingerprint=fingerprint)
    await running.wait_until_up(2)


async def test_prefixes_of_ended_sequences_survive_a_rolling_restart_of_all_shards() -> None:
    text = "a prompt in common, which is long enough to be worth a transfer " * 3
    async with cluster(CONFIG) as running, ClientSession() as session:
        assert (await generate(session, running.url, body(text, 5)))["generated_text"] == expected_text(text, 5)
        for address in list(running.addresses):
            await running.wait_until_up(2)
            await running.drain_shard(address)
            await running.start_shard(address)
        await running.wait_until_up(2)
        before = await running.metric("caravan_prompt_cached_tokens_total")
        longer = text + "!"
        assert (await generate(session, running.url, body(longer, 5)))["generated_text"] == expected_text(longer, 5)
        assert await running.metric("caravan_prompt_cached_tokens_total") - before > len(text) - 20
        await running.wait_until_at_rest()


async def test_a_rolling_restart_under_load_fails_no_request_and_computes_little_again() -> None:
    async with cluster(replace(CONFIG, shards=3)) as running, ClientSession() as session:
        ended = asyncio.Event()
        served = 0

        async def client(number: int) -> None:
            nonlocal served
            turn = 0
            while not ended.is_set():
                text = f"client {number} asks for the {turn}th time " * 4
                new_tokens = 30 + 7 * (turn % 5)
                answer = await generate(session, running.url, body(text, new_tokens))
                assert answer["generated_text"] == expected_text(text, new_tokens)
                served += new_tokens
                turn += 1

        async def served_more(than: int) -> None:
            await eventually(lambda: served, "requests are served", lambda found: found > than)

        clients = [asyncio.create_task(client(number)) for number in range(9)]
        await eventually(lambda: served > 0 and len(running.engine.scheduler.sequences) == 9, "nine clients are served")
        for address in list(running.addresses):
            await running.drain_shard(address)
            await running.start_shard(address)
            await running.wait_until_up(3)
            # The clients go on beside the new one.
            await served_more(served)
        ended.set()
        await asyncio.gather(*clients)
        prompts = await running.metric("caravan_prompt_tokens_total")
        again = await running.metric("caravan_tokens_recomputed_total")
        assert again < (prompts + served) / 10, f"{again} tokens of {prompts + served} were computed again"
        await running.wait_until_at_rest()

"""Mirostat and adaptive-p on the toy model: the value that they carry outlives moves, losses and drafts."""

import asyncio
from dataclasses import replace

import pytest

from caravan_testing.always_drafts import draft_always
from caravan_testing.cluster import ClusterConfig, cluster
from caravan_testing.specs import read, run, spec, undisturbed, with_feedback
from caravan_testing.waiting import DEADLINE_S, in_time

PROMPT = list(range(60, 100))
KINDS = (0, 1, 2)


async def test_outputs_differ_from_those_without_it() -> None:
    async with cluster() as running:
        plain = spec(PROMPT, 60, seed=4)
        outputs = [await run(running.engine, one) for one in (plain, *(with_feedback(plain, kind) for kind in KINDS))]
        assert outputs == [undisturbed(plain), *(undisturbed(with_feedback(plain, kind)) for kind in KINDS)]
        assert len({tuple(output) for output in outputs}) == 4
        greedy = spec(PROMPT, 30)
        assert [await run(running.engine, with_feedback(greedy, kind)) for kind in KINDS] == [undisturbed(greedy)] * 3
        await running.wait_until_at_rest()


@pytest.mark.parametrize("drains", [True, False], ids=["drained", "lost"])
async def test_it_goes_to_another_shard_with_the_tokens(drains: bool) -> None:
    config = ClusterConfig(shards=2, step_s=0.004, token_s=0.0005, drain_timeout_s=DEADLINE_S)
    async with cluster(config) as running:
        wanted = [with_feedback(spec([number, *PROMPT], 300, seed=number), number % 3) for number in range(6)]
        reading = [asyncio.create_task(read(running.engine.submit(one))) for one in wanted]
        await running.wait_until_all_have(20, sequences=6)
        leaving = running.addresses[0]
        assert running.engine.scheduler.shards[leaving].stays.residents
        if drains:
            async with in_time("the shard has drained"):
                await running.servers[leaving].drain()
        await running.stop_shard(leaving)
        assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
        await running.wait_until_at_rest()


async def test_drafts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    async with cluster(ClusterConfig(wrong_every=3, link=replace(ClusterConfig().link, wants_drafts=True))) as running:
        # A low target repeats much, so that drafts of the prompt are right.
        wanted = [with_feedback(spec(PROMPT * 2, 100, seed=number), number % 3) for number in range(3)]
        drafted = [replace(one, max_draft_tokens=4, prediction=tuple(undisturbed(one))) for one in wanted]
        streams = [running.engine.submit(one) for one in drafted]
        assert await asyncio.gather(*map(read, streams)) == [undisturbed(one) for one in wanted]
        assert sum(count.accepted for stream in streams for count in stream.drafts) > 0
        await running.wait_until_at_rest()

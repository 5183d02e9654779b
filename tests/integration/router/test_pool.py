"""The cells of a shard as one pool, on the toy model: a common prefix of several requests is computed once."""

import asyncio

import pytest

from caravan_proto.messages.limits import KvLayout
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.cluster import Cluster, ClusterConfig, StepLog, cluster
from caravan_testing.specs import read, run, spec, undisturbed

LAYOUTS = pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
# Six steps of 16 tokens. A request does not wait for the last few tokens of a prefix, but computes them again.
PREFIX = list(range(1, 97))
NEW_TOKENS = 12
# Computing takes longer than loading what was saved.
TOKEN_S = 0.0002


async def run_at_once(running: Cluster, wanted: list[GenerationSpec]) -> None:
    """Submit all in one turn of the loop. Check that each gets the same tokens as alone, and that nothing is left."""
    streams = [running.engine.submit(one) for one in wanted]
    got = await asyncio.gather(*map(read, streams))
    assert got == [undisturbed(one) for one in wanted]
    await running.wait_until_at_rest()


@LAYOUTS
@pytest.mark.parametrize("requests", [2, 8])
async def test_a_prefix_of_several_at_the_same_instant_is_computed_once(layout: KvLayout, requests: int) -> None:
    log = StepLog()
    async with cluster(ClusterConfig(layout=layout, hook=log)) as running:
        endings = [[150 + number, 7, number] for number in range(requests)]
        await run_at_once(running, [spec([*PREFIX, *ending], NEW_TOKENS) for ending in endings])
        assert await running.metric("caravan_prefix_cache_hit_tokens") == (requests - 1) * len(PREFIX)
    # The last token of each request is sampled, but never computed.
    assert log.computed_tokens == len(PREFIX) + sum(map(len, endings)) + requests * (NEW_TOKENS - 1)


@LAYOUTS
async def test_a_prefix_longer_than_a_step_is_computed_once(layout: KvLayout) -> None:
    """The followers arrive while the leader's prompt is being computed."""
    log = StepLog()
    config = ClusterConfig(layout=layout, hook=log, max_batch_tokens=16, cells=2048)
    async with cluster(config) as running:
        leader = running.engine.submit(spec([*PREFIX, 150, 7], NEW_TOKENS))
        async with log.held():
            followers = [running.engine.submit(spec([*PREFIX, 151 + number, 7], NEW_TOKENS)) for number in range(3)]
        await asyncio.gather(*map(read, [leader, *followers]))
        await running.wait_until_at_rest()
    assert log.computed_tokens == len(PREFIX) + 4 * 2 + 4 * (NEW_TOKENS - 1)


@LAYOUTS
@pytest.mark.parametrize("max_sequences", [16, 3, 1])
async def test_choices_fork_one_prefill(layout: KvLayout, max_sequences: int) -> None:
    """With fewer sequence ids than choices, later choices start from the cells of ended ones."""
    log = StepLog()
    choices = 8
    config = ClusterConfig(layout=layout, max_sequences=max_sequences, hook=log)
    async with cluster(config) as running:
        await run_at_once(running, [spec(PREFIX, NEW_TOKENS, seed=seed) for seed in range(choices)])
        assert await running.metric("caravan_prefix_cache_hit_tokens") == (choices - 1) * (len(PREFIX) - 2)
    # Each choice computes the last tokens of the prompt itself, because its first draw needs the logits.
    assert log.computed_tokens == len(PREFIX) + 2 * (choices - 1) + choices * (NEW_TOKENS - 1)


@LAYOUTS
async def test_the_second_turn_of_a_conversation_computes_only_what_is_new(layout: KvLayout) -> None:
    log = StepLog()
    async with cluster(ClusterConfig(layout=layout, hook=log, token_s=TOKEN_S)) as running:
        answer = await run(running.engine, spec(PREFIX, NEW_TOKENS))
        before = log.computed_tokens
        question = [*PREFIX, *answer, 200, 201, 202]
        stream = running.engine.submit(spec(question, NEW_TOKENS))
        assert await read(stream) == undisturbed(spec(question, NEW_TOKENS))
        assert stream.cached_tokens == len(PREFIX) + NEW_TOKENS - 1
        await running.wait_until_at_rest()
    assert log.computed_tokens - before == 1 + 3 + NEW_TOKENS - 1


@LAYOUTS
async def test_nothing_is_shared_between_namespaces(layout: KvLayout) -> None:
    """Neither with ended requests nor with those of the same instant."""
    log = StepLog()
    async with cluster(ClusterConfig(layout=layout, hook=log, token_s=TOKEN_S)) as running:
        at_once = [running.engine.submit(spec(PREFIX, NEW_TOKENS, namespace=name)) for name in ("", "a", "b")]
        await asyncio.gather(*map(read, at_once))
        assert [stream.cached_tokens for stream in at_once] == [0, 0, 0]
        assert log.computed_tokens == 3 * (len(PREFIX) + NEW_TOKENS - 1)
        for name, cached in (("c", 0), ("a", len(PREFIX) - 2), ("c", len(PREFIX) - 2)):
            later = running.engine.submit(spec(PREFIX, NEW_TOKENS, namespace=name))
            await read(later)
            assert later.cached_tokens == cached, name
        await running.wait_until_at_rest()


async def test_without_prefix_caching_nothing_stays() -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(prefix_caching=False))
    async with cluster(config) as running:
        for _ in range(2):
            stream = running.engine.submit(spec(PREFIX, NEW_TOKENS))
            assert await read(stream) == undisturbed(spec(PREFIX, NEW_TOKENS))
            assert stream.cached_tokens == 0
            await running.wait_until_at_rest()
        (shard,) = running.engine.scheduler.shards.values()
        assert not shard.stays.parked

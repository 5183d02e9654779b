"""Requests need ten times as many cells as there are, on the toy model. Preemption changes no output."""

import asyncio
import random
from dataclasses import replace

import pytest

from caravan_proto.messages.limits import KvLayout
from caravan_router.engine.streams import RequestStream
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.cluster import Cluster, ClusterConfig, StepLog, cluster
from caravan_testing.specs import read, run, spec, undisturbed, with_feedback
from caravan_testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("copies_cost_as_guessed")

CELLS = 512
# Size of a cell in the toy model's saved states.
CELL_BYTES = 8


def scarce(**changes: object) -> ClusterConfig:
    """Return a configuration with few cells, in which swapping is cheaper than computing again."""
    fields: dict[str, object] = {"cells": CELLS, "max_sequences": 16, "token_s": 0.0002, **changes}
    return ClusterConfig(**fields)  # type: ignore[arg-type]


def with_history(wanted: GenerationSpec) -> GenerationSpec:
    """Return ``wanted`` with stops and all samplers that look at earlier tokens. The values are exact in float32."""
    sampling = replace(
        wanted.sampling,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        repeat_last_n=20,
        dry_multiplier=0.75,
        dry_allowed_length=1,
        dry_penalty_last_n=None,
        xtc_probability=0.5,
        xtc_threshold=0.0625,
    )
    stopping = replace(
        wanted.stopping, stop_token_ids=frozenset({101, 110}), min_tokens=min(6, wanted.stopping.max_new_tokens)
    )
    return replace(wanted, sampling=sampling, stopping=stopping)


def demand(chance: random.Random) -> list[GenerationSpec]:
    """Return sampled requests of mixed lengths: a third begin with the same tokens, the second half has priorities.

    A quarter use samplers that look at earlier tokens, and a half those that carry a value from token to token.
    """
    common = [chance.randrange(256) for _ in range(24)]
    wanted = []
    for number in range(80):
        own = [chance.randrange(256) for _ in range(chance.randrange(1, 60))]
        prompt = [*common, *own] if number % 3 == 0 else own
        one = spec(prompt, chance.randrange(4, 60), seed=number, priority=chance.randrange(3) * (number // 40))
        if number % 4 == 1:
            one = with_history(one)
        if number % 4 >= 2:
            one = with_feedback(one, number % 3)
        wanted.append(one)
    return wanted


async def learn_short_outputs(running: Cluster) -> None:
    """Let many requests end early, so that the router expects short outputs and admits too many requests."""
    short = [spec([number], 3) for number in range(20)]
    await asyncio.gather(*(run(running.engine, one) for one in short))


async def preemptions(running: Cluster) -> dict[str, float]:
    return {
        how: await running.metric(f'caravan_request_preemptions_total{{how="{how}"}}') for how in ("swap", "recompute")
    }


async def check_flood(running: Cluster) -> None:
    """Submit half of the requests at once, the others one by one. Check that each gets the same tokens as alone."""
    wanted = demand(random.Random(5))
    assert sum(len(one.prompt) + one.stopping.max_new_tokens for one in wanted) > 10 * CELLS

    async def later(number: int, one: GenerationSpec) -> list[int]:
        await asyncio.sleep(max(0, number - 40) * 0.01)
        return await run(running.engine, one)

    got = await asyncio.gather(*(later(number, one) for number, one in enumerate(wanted)))
    assert got == [undisturbed(one) for one in wanted]
    await running.wait_until_at_rest()


async def test_scarce_cells_with_room_to_swap() -> None:
    async with cluster(scarce()) as running:
        await learn_short_outputs(running)
        await check_flood(running)
        assert (await preemptions(running))["swap"] > 0


async def test_scarce_cells_and_scarce_room_to_swap() -> None:
    """What there is no room for is not saved, or makes way, and is computed again."""
    async with cluster(scarce(saved_bytes=60 * CELL_BYTES)) as running:
        await learn_short_outputs(running)
        await check_flood(running)
        assert sum((await preemptions(running)).values()) > 0


async def test_scarce_cells_without_room_to_swap() -> None:
    async with cluster(scarce(saved_bytes=0)) as running:
        await learn_short_outputs(running)
        await check_flood(running)
        counts = await preemptions(running)
        assert counts["swap"] == 0
        assert counts["recompute"] > 0


@pytest.mark.parametrize("saved_bytes", [1 << 20, 0])
async def test_scarce_sequence_ids_of_a_split_cache(saved_bytes: int) -> None:
    """In the split layout, higher priorities take the sequence ids of lower ones."""
    config = scarce(layout=KvLayout.SPLIT, max_sequences=4, saved_bytes=saved_bytes)
    async with cluster(config) as running:
        await check_flood(running)
        assert (await preemptions(running))["swap" if saved_bytes else "recompute"] > 0


def swapped_requests(running: Cluster) -> set[int]:
    return {s.request.request_id for s in running.engine.scheduler.waiting if s.saved_on}


async def swap_out(running: Cluster) -> tuple[list[RequestStream], list[GenerationSpec]]:
    """Fill the shard with low priorities, then submit higher ones. Return when some requests are swapped out."""
    (address,) = running.addresses
    wanted = [spec([number] * 40, 50, seed=number) for number in range(10)]
    streams = [running.engine.submit(one) for one in wanted]
    await eventually(lambda: len(running.engine.scheduler.shards[address].stays.decoding) >= 4, "they decode")
    more = [spec([100 + number] * 40, 80, seed=number, priority=1) for number in range(4)]
    streams += [running.engine.submit(one) for one in more]
    await eventually(lambda: bool(swapped_requests(running)), "some are swapped out")
    assert running.saved_runs(address)
    return streams, wanted + more


async def test_a_shard_lost_with_swapped_sequences_costs_a_pause() -> None:
    async with cluster(scarce(step_s=0.01)) as running:
        (address,) = running.addresses
        streams, wanted = await swap_out(running)
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await running.stop_shard(address)
        await running.wait_until_up(0)
        assert not any(sequence.saved_on for sequence in running.engine.scheduler.waiting)
        await running.start_shard(address)
        assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
        await running.wait_until_at_rest()


@pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
async def test_clients_that_leave_while_swapped_out_leave_nothing(layout: KvLayout) -> None:
    config = scarce(step_s=0.01, layout=layout, max_sequences=16 if layout is KvLayout.UNIFIED else 4)
    async with cluster(config) as running:
        streams, wanted = await swap_out(running)
        gone = [number - 1 for number in swapped_requests(running)]  # request ids start at 1
        for number in gone:
            streams[number].close()
        stay = [number for number in range(len(streams)) if number not in gone]
        got = await asyncio.gather(*(read(streams[number]) for number in stay))
        assert got == [undisturbed(wanted[number]) for number in stay]
        await running.wait_until_at_rest()


async def test_all_leave_at_once() -> None:
    """The requests run, wait, are swapped out or are being swapped out."""
    log = StepLog()
    async with cluster(scarce(step_s=0.01, hook=log)) as running:
        streams, _ = await swap_out(running)
        async with log.held():
            for stream in streams:
                stream.close()
        await running.wait_until_at_rest()
        assert await run(running.engine, spec([1], 5)) == undisturbed(spec([1], 5))

"""How many prompt tokens a step carries, when decodes wait for prompts, and who may claim the target."""

from typing import Any

import pytest

from caravan_proto.messages.commands import Prefill
from caravan_scheduler.actions import Joins
from caravan_scheduler.config import JoinReason, PrefillMode, SchedulerConfig
from caravan_scheduler.planning.chunking import (
    MIN_CHUNK_TOKENS,
    Riders,
    Step,
    chunk_budget,
    step_after,
    step_seconds,
)
from caravan_scheduler.prefix_tree import NO_MATCH
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import Claims
from caravan_scheduler.shard.costs import FAST_CHUNK_TOKENS, ShardCosts
from caravan_scheduler.shard.resident import Resident
from caravan_testing.ledgers import ledger, limits_of
from caravan_testing.requests import prompt_of, request
from caravan_testing.simulation import Simulation, simulation


def costs(*, fast_pair_s: float = 1e-5) -> ShardCosts:
    """Return costs of 30 ms for decodes and 4 ms for a token, and 10 us for each of its context in small chunks."""
    made = ShardCosts()
    made.observe_decodes(4, 0.03)
    for tokens, pair_s in ((128, fast_pair_s), (40, 1e-5)):
        for context in range(0, 2000, tokens):
            seconds = 0.03 + tokens * (0.004 + pair_s * context)
            made.observe_chunks(tokens, context, riders=4, seconds=seconds)
    return made


def budget(
    known: ShardCosts,
    seconds: float,
    *,
    riders: int = 4,
    context: int = 0,
    remaining: int | None = None,
    **config: Any,
) -> int:
    step = Step(seconds=seconds, riders=riders)
    return chunk_budget(SchedulerConfig(**config), known, step, context=context, remaining=remaining)


def test_the_budget_is_whole_tiles_and_never_zero() -> None:
    assert budget(costs(), 0.0) == MIN_CHUNK_TOKENS
    assert budget(costs(), 0.22) == 40
    assert budget(costs(), 0.22, context=500) == MIN_CHUNK_TOKENS
    assert budget(costs(), 100.0, max_batch_prefill_tokens=100) == 100
    assert budget(ShardCosts(), 0.22, riders=0) >= MIN_CHUNK_TOKENS


def test_a_size_that_was_not_measured_gets_less_time_beside_decodes() -> None:
    """What a chunk costs beside four streams may differ from what chunks alone have cost."""
    guessed = ShardCosts()
    guessed.observe_decodes(4, 0.03)
    guessed.observe_chunks(256, 0, riders=0, seconds=256 * 0.004)
    assert budget(guessed, 0.23) == 32, "40 would fit"
    assert budget(guessed, 0.2, riders=0) == 48
    for _ in range(8):
        guessed.observe_chunks(40, 0, riders=4, seconds=0.03 + 40 * 0.004)
    assert budget(guessed, 0.23) == 48


def test_decodes_pause_where_they_should() -> None:
    assert budget(costs(), 0.22, mode=PrefillMode.PAUSE) == 0
    assert budget(costs(), 0.22, riders=0, mode=PrefillMode.PAUSE) > 0


def test_a_chunk_is_large_enough_for_fast_attention_where_that_speeds_the_prompt_up_most() -> None:
    tiled = costs(fast_pair_s=1e-6)
    assert budget(tiled, 0.22) < FAST_CHUNK_TOKENS, "without context small chunks are nearly as fast, and smoother"
    assert budget(tiled, 0.22, context=1500) == FAST_CHUNK_TOKENS
    assert budget(costs(), 0.22, context=1500) == MIN_CHUNK_TOKENS, "the larger chunk is as slow"


def test_a_step_is_not_stretched_for_what_larger_chunks_save_apart_from_attention() -> None:
    """A pass that reads the weights for 20 tokens takes nearly as long as one for 70, with any attention."""
    heavy = ShardCosts()
    heavy.observe_decodes(4, 0.1)
    for tokens in (16, 72):
        for context in range(0, 2000, tokens):
            heavy.observe_chunks(tokens, context, riders=4, seconds=0.15 + 0.003 * tokens)
    assert heavy.seconds(FAST_CHUNK_TOKENS, riders=4, context=0) < 2 * heavy.seconds(16, riders=4, context=0)
    assert budget(heavy, 0.22) < FAST_CHUNK_TOKENS
    assert budget(heavy, 0.22, context=1500) < FAST_CHUNK_TOKENS


def test_no_small_chunk_is_left_over_where_small_chunks_are_slow() -> None:
    tiled = costs(fast_pair_s=1e-6)
    assert budget(tiled, 0.22, context=1500, remaining=72 * 3 + 20) == 79
    assert budget(tiled, 0.22, context=1500, remaining=84) == 84
    assert budget(tiled, 0.22, context=1500, remaining=100) == 72, "the step would take half as long again"
    assert budget(tiled, 0.22, context=1500, remaining=40) == MIN_CHUNK_TOKENS, "too few for a large chunk"


def seconds(config: SchedulerConfig, *, prompts: int, riders: int, decode_s: float, claim: bool = True) -> float:
    return step_seconds(config, prompts=prompts, riders=Riders(count=riders, seconds=decode_s, claim=claim))


def test_a_step_is_stretched_as_prompts_outnumber_its_decodes() -> None:
    config = SchedulerConfig(target_itl_s=0.2, idle_step_s=1.0)
    assert seconds(config, prompts=1, riders=4, decode_s=0.03) == 0.2
    assert seconds(config, prompts=4, riders=4, decode_s=0.03) == 0.2
    assert seconds(config, prompts=6, riders=4, decode_s=0.03) == pytest.approx(0.3)
    assert seconds(config, prompts=7, riders=1, decode_s=0.03) == 1.0, "bounded as a step without decodes is"
    assert seconds(config, prompts=7, riders=0, decode_s=0.0) == 1.0


def test_where_decodes_fill_the_target_prompts_get_their_share_of_the_time() -> None:
    config = SchedulerConfig(target_itl_s=0.2, idle_step_s=1.0)
    assert seconds(config, prompts=1, riders=1, decode_s=0.18) == pytest.approx(0.36)
    assert seconds(config, prompts=1, riders=9, decode_s=0.18) == pytest.approx(0.2), "many streams: the target"
    assert seconds(config, prompts=1, riders=1, decode_s=0.7) == 1.0
    slow = SchedulerConfig(target_itl_s=2.0, idle_step_s=1.0)
    assert seconds(slow, prompts=8, riders=1, decode_s=0.1) == 2.0, "never less than the target"


def test_where_decodes_fill_the_target_prompts_behind_the_first_weigh_as_many_decodes_as_tgi_stops_for_them() -> None:
    config = SchedulerConfig(target_itl_s=0.2, idle_step_s=1.0, waiting_served_ratio=0.25)
    assert seconds(config, prompts=6, riders=21, decode_s=0.15) == pytest.approx(0.15 * (1 + (1 + 5 * 4) / 21))
    assert seconds(config, prompts=4, riders=4, decode_s=0.04) == 0.2, "decodes take little of the target"
    never = SchedulerConfig(target_itl_s=0.2, idle_step_s=1.0, waiting_served_ratio=0.0)
    assert seconds(never, prompts=2, riders=30, decode_s=0.15) == 1.0
    assert seconds(never, prompts=0, riders=30, decode_s=0.15) == 0.2


def test_a_step_beside_decodes_that_all_came_with_its_prompts_takes_as_long_as_one_without() -> None:
    config = SchedulerConfig(target_itl_s=0.2, idle_step_s=1.0)
    assert seconds(config, prompts=1, riders=7, decode_s=0.04, claim=False) == 1.0
    slow = SchedulerConfig(target_itl_s=2.0, idle_step_s=1.0)
    assert seconds(slow, prompts=1, riders=7, decode_s=0.04, claim=False) == 2.0, "never less than the target"


def test_small_chunks_are_taken_for_slow_behind_a_context_until_one_was_measured() -> None:
    """Chunks of 128 tokens tell nothing about those of 64, of which llama.cpp may compute the tokens one by one."""
    known = ShardCosts()
    known.observe_decodes(4, 0.03)
    for context in range(0, 1000, 128):
        known.observe_chunks(128, context, riders=4, seconds=0.03 + 128 * (0.002 + 1e-6 * context))
    assert not known.knows_small_chunks
    assert budget(known, 0.15) == 40
    assert budget(known, 0.15, context=1000) == MIN_CHUNK_TOKENS
    for _ in range(2):
        known.observe_chunks(16, 1000, riders=4, seconds=0.03 + 16 * (0.002 + 1e-6 * 1000))
    assert known.knows_small_chunks
    assert budget(known, 0.15, context=1000) > MIN_CHUNK_TOKENS


def test_a_small_chunk_behind_a_context_tells_at_once_that_small_chunks_are_slow() -> None:
    known = ShardCosts()
    known.observe_decodes(4, 0.03)
    for context in range(0, 1000, 128):
        known.observe_chunks(128, context, riders=4, seconds=0.03 + 128 * (0.002 + 1e-6 * context))
    known.observe_chunks(16, 1000, riders=4, seconds=0.03 + 16 * (0.002 + 1e-5 * 1000))
    assert known.seconds(40, riders=4, context=1000) == pytest.approx(0.03 + 40 * 0.012, rel=0.2)
    assert budget(known, 0.22, context=1000) == FAST_CHUNK_TOKENS


def test_a_chunk_takes_no_rest_with_it_that_decodes_would_wait_long_for() -> None:
    """80 tokens take 0.2 s."""
    known = ShardCosts()
    known.observe_decodes(4, 0.03)
    for tokens in (128, 96, 72, 40):
        for _ in range(8):
            known.observe_chunks(tokens, 0, riders=4, seconds=0.03 + tokens * 0.0021)
    assert budget(known, 0.22, remaining=80 + 48) == 80
    assert budget(known, 0.22, remaining=80 + 16) == 96
    assert budget(known, 0.22, riders=0, remaining=100 + 30) == 130, "nobody waits"


def test_what_decodes_have_waited_for_is_taken_off_the_step() -> None:
    config = SchedulerConfig(target_itl_s=0.2)
    riders = Riders(count=4, seconds=0.03, claim=True)
    assert step_after(config, 0.2, riders=riders, waited_s=0.0) == Step(seconds=0.2, riders=4)
    assert step_after(config, 0.2, riders=riders, waited_s=0.04).seconds == pytest.approx(0.16)
    late = step_after(config, 0.2, riders=riders, waited_s=0.06)
    assert late.is_late
    assert chunk_budget(config, costs(), late, context=0) == 0
    burst = Riders(count=4, seconds=0.03, claim=False)
    assert step_after(config, 1.0, riders=burst, waited_s=0.5) == Step(seconds=1.0, riders=4)


def streams(count: int, *, tokens: int = 1) -> list[Resident]:
    """Return residents that have streamed ``tokens``."""
    shard = ledger()
    made = [shard.place(Sequence(request(seed, prompt_of(9, seed), 50)), NO_MATCH, 0) for seed in range(1, count + 1)]
    for resident in made:
        resident.sequence.output.extend(range(tokens))
    return made


def no_one(resident: Resident) -> int:
    """Say that ``resident`` overtook no prompt."""
    return 0


def test_a_stream_gives_way_to_as_many_prompts_as_there_were_when_it_began() -> None:
    claims, (stream,) = Claims(), streams(1)
    assert not claims.any_of([stream], 2, no_one)
    claims.note_prompt()
    assert not claims.any_of([stream], 5, no_one), "one is complete, and more have come"
    claims.note_prompt()
    assert claims.any_of([stream], 5, no_one)


def test_a_stream_gives_way_to_no_more_prompts_than_are_left() -> None:
    claims, (stream,) = Claims(), streams(1)
    assert not claims.any_of([stream], 3, no_one)
    assert claims.any_of([stream], 0, no_one)
    assert claims.any_of([stream], 3, no_one), "these came later"


def test_a_stream_gives_way_to_no_prompts_that_it_overtook() -> None:
    claims, (stream,) = Claims(), streams(1)
    assert claims.any_of([stream], 2, lambda resident: 2)
    claims, (stream,) = Claims(), streams(1)
    assert not claims.any_of([stream], 2, lambda resident: 1)
    claims.note_prompt()
    assert claims.any_of([stream], 1, no_one), "what it overtook is counted when it is first seen"


def test_one_stream_that_claims_the_target_is_enough() -> None:
    claims, (early, late) = Claims(), streams(2)
    assert claims.any_of([early], 0, no_one)
    assert claims.any_of([early, late], 2, no_one)
    assert not claims.any_of([late], 2, no_one)
    assert not claims.any_of([], 2, no_one)


def test_a_stream_that_comes_back_claims_the_target_at_once() -> None:
    claims, (stream,) = Claims(), streams(1, tokens=7)
    assert claims.any_of([stream], 3, no_one)


def test_mixed_mode_carries_decodes_along_with_a_long_prompt() -> None:
    sim = simulation(target_itl_s=0.05)
    running = sim.submit(prompt_of(10), 60, ignore_eos=True)
    sim.advance("a", 5)
    sim.submit(prompt_of(200), 5)
    before = len(sim.received[running])
    sim.advance("a")  # the decode that was running yields
    prefills = 0
    while any(resident.prefilling for resident in sim.scheduler.shards["a"].stays.residents.values()):
        sim.advance("a")
        prefills += 1
    assert prefills >= 4
    assert len(sim.received[running]) == before + 1 + prefills, "the running request had a token in every step"


def test_mixed_budget_follows_the_target() -> None:
    def largest_chunk(target_s: float) -> int:
        sim = simulation(target_itl_s=target_s, limits=limits_of(cells=4000, cells_per_sequence=4000))
        sim.submit(prompt_of(10), 200, ignore_eos=True)
        sim.advance("a", 40)
        sim.complete(prompt_of(1500), 5)
        sizes = [sum(len(chunk.token_ids) for chunk in action.chunks) for action in sim.sent(Prefill) if action.ride]
        return max(sizes[4:-1])  # after it has learnt

    # The model shard takes 5 ms + 1 ms per token.
    assert 16 <= largest_chunk(0.04) <= 35
    assert 64 <= largest_chunk(0.1) <= 115


def test_pause_mode_prefills_alone_while_decodes_wait() -> None:
    sim = simulation(mode=PrefillMode.PAUSE)
    running = sim.submit(prompt_of(10), 60, ignore_eos=True)
    sim.advance("a")
    sim.advance("a")
    sim.submit(prompt_of(100), 5)
    sim.advance("a")
    before = len(sim.received[running])
    while any(resident.prefilling for resident in sim.scheduler.shards["a"].stays.residents.values()):
        sim.advance("a")
    prefills = sim.sent(Prefill)
    assert all(prefill.ride == () for prefill in prefills)
    assert len(sim.received[running]) == before


def test_pause_mode_waits_for_the_ratio_or_the_steps() -> None:
    sim = simulation(mode=PrefillMode.PAUSE, waiting_served_ratio=2.0, max_waiting_tokens=10)
    sim.submit(prompt_of(10), 60, ignore_eos=True)
    sim.advance("a")
    waiting = sim.submit(prompt_of(10), 3)
    for _ in range(9):
        sim.advance("a")
        assert len(sim.scheduler.waiting) == 1, "one waiting is less than twice one running"
    sim.advance("a")
    sim.advance("a")
    assert len(sim.scheduler.waiting) == 0, "after max_waiting_tokens steps it starts"
    assert joins(sim) == [JoinReason.WAIT_EXCEEDED]
    sim.run()
    assert waiting in sim.finished

    eager = simulation(mode=PrefillMode.PAUSE, waiting_served_ratio=2.0, max_waiting_tokens=10)
    eager.submit(prompt_of(10), 60, ignore_eos=True)
    eager.advance("a")
    eager.submit(prompt_of(10), 3)
    eager.submit(prompt_of(10), 3)
    assert len(eager.scheduler.waiting) == 0, "two waiting reach the ratio"
    assert joins(eager) == [JoinReason.BACKPRESSURE]


def joins(sim: Simulation) -> list[JoinReason]:
    return [action.reason for action in sim.sent(Joins)]

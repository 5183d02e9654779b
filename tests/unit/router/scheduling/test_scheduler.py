"""One behaviour per test, on model shards that hold the scheduler to the contract."""

import dataclasses
import math

import pytest

from caravan_router.core.generation import GenerationState
from caravan_router.scheduling.actions import Decode, FailureReason, FilterBatch, Load, Prefill, Start
from caravan_router.scheduling.config import JoinReason, PrefillMode, SchedulerConfig
from caravan_router.scheduling.events import (
    Cancelled,
    CommandEnded,
    LayoutSet,
    Loaded,
    Saved,
    ShardDraining,
    ShardJoined,
    ShardLimits,
    StepOutcome,
    Stepped,
    Submitted,
)
from caravan_testing.ledgers import SAVING, limits_of
from caravan_testing.model_shard import expected_output
from caravan_testing.requests import request
from caravan_testing.simulation import Simulation

LIMITS = limits_of(cells=400, cells_per_sequence=400, max_sequences=4, max_batch_tokens=128)


def simulation(*shards: str, limits: ShardLimits = LIMITS, **config: object) -> Simulation:
    result = Simulation(SchedulerConfig(**config))  # type: ignore[arg-type]
    for name in shards or ("a",):
        result.join(name, limits)
    return result


def prompt(tokens: int, seed: int = 1) -> tuple[int, ...]:
    return tuple((seed * 7 + position) % 90 + 1 for position in range(tokens))


def test_a_request_is_prefilled_decoded_and_released() -> None:
    sim = simulation(prefix_caching=False)
    request_id = sim.submit(prompt(10), 5, ignore_eos=True)
    sim.run()
    sim.check_at_rest()
    assert sim.received[request_id] == expected_output(sim.requests[request_id].spec)
    kinds = [type(action) for action in sim.actions if isinstance(action, Prefill | Decode | FilterBatch | Start)]
    assert kinds == [Start, Prefill, Decode, FilterBatch]


def test_requests_of_one_instant_share_a_step() -> None:
    sim = simulation()
    requests = [request(number, prompt(20, number), 3) for number in range(1, 4)]
    actions = sim.scheduler.handle([Submitted(one) for one in requests], 0.0)
    (prefill,) = (action for action in actions if isinstance(action, Prefill))
    assert [len(chunk.token_ids) for chunk in prefill.chunks] == [20, 20, 20]
    assert all(chunk.last and chunk.setup is not None for chunk in prefill.chunks)


def test_endings_of_one_context_compute_it_once_and_each_gets_all_prompt_logprobs() -> None:
    sim = simulation(limits=limits_of(max_prompt_logprob_tokens=128))
    for number in range(8):
        sim.submit((*prompt(100), 200 + number, 300 + number), 1, prompt_logprobs=True)
    sim.run()
    sim.check_at_rest()
    chunks = [chunk for action in sim.actions if isinstance(action, Prefill) for chunk in action.chunks]
    # The context and an ending, then of each other ending its two tokens and the one before them.
    assert sum(len(chunk.token_ids) for chunk in chunks) == 102 + 7 * 3


def test_a_later_ending_starts_from_what_was_saved_of_the_context() -> None:
    sim = simulation(limits=limits_of(max_prompt_logprob_tokens=128, **SAVING))
    sim.submit((*prompt(96), 200), 1, prompt_logprobs=True)
    sim.run()
    for _ in range(3):  # an idle shard saves what it holds
        sim.tick(0.5)
        sim.run()
    for number in range(4):  # others take its cells
        sim.submit(prompt(90, 30 + 20 * number), 1)
    sim.run()
    before = len(sim.actions)
    sim.submit((*prompt(96), 201, 202), 1, prompt_logprobs=True)
    sim.run()
    sim.check_at_rest()
    chunks = [chunk for action in sim.actions[before:] if isinstance(action, Prefill) for chunk in action.chunks]
    assert sum(len(chunk.token_ids) for chunk in chunks) < 98
    assert any(isinstance(action, Load) for action in sim.actions[before:]) or chunks[0].start > 0


def test_prompt_logprobs_are_complete_after_preemptions_failures_and_losses() -> None:
    sim = simulation("a", "b", limits=limits_of(cells=150, max_prompt_logprob_tokens=16))
    for number in range(6):
        sim.submit((*prompt(60), 200 + number, *prompt(8, number)), 12, prompt_logprobs=True, ignore_eos=True)
    for step in range(12):
        sim.advance("a" if step % 2 else "b")
        if step == 5:
            sim.shards["a"].fail_next_step = StepOutcome.ABORTED
        if step == 8:
            sim.submit(prompt(90), 20, priority=1, ignore_eos=True)
    sim.lose("b")
    sim.join("b", limits_of(cells=150, max_prompt_logprob_tokens=16))
    sim.run()
    sim.check_at_rest()
    assert not sim.failed


def test_mixed_mode_carries_decodes_along_with_a_long_prompt() -> None:
    sim = simulation(target_itl_s=0.05)
    running = sim.submit(prompt(10), 60, ignore_eos=True)
    for _ in range(5):
        sim.advance("a")
    sim.submit(prompt(200), 5)
    before = len(sim.received[running])
    sim.advance("a")  # the decode that was running yields
    prefills = 0
    while any(resident.prefilling for resident in sim.scheduler.shards["a"].residents.values()):
        sim.advance("a")
        prefills += 1
    assert prefills >= 4
    assert len(sim.received[running]) == before + 1 + prefills, "the running request had a token in every step"


def test_mixed_budget_follows_the_target() -> None:
    def largest_chunk(target_s: float) -> int:
        sim = simulation(target_itl_s=target_s, limits=limits_of(cells=4000, cells_per_sequence=4000))
        sim.submit(prompt(10), 200, ignore_eos=True)
        for _ in range(40):
            sim.advance("a")
        sim.submit(prompt(1500), 5)
        sim.run()
        sizes = [
            sum(len(chunk.token_ids) for chunk in action.chunks)
            for action in sim.actions
            if isinstance(action, Prefill) and action.ride
        ]
        return max(sizes[4:-1])  # after it has learnt

    # The model shard takes 5 ms + 1 ms per token.
    assert 16 <= largest_chunk(0.04) <= 35
    assert 64 <= largest_chunk(0.1) <= 95


def test_pause_mode_prefills_alone_while_decodes_wait() -> None:
    sim = simulation(mode=PrefillMode.PAUSE)
    running = sim.submit(prompt(10), 60, ignore_eos=True)
    sim.advance("a")
    sim.advance("a")
    sim.submit(prompt(100), 5)
    sim.advance("a")
    before = len(sim.received[running])
    while any(resident.prefilling for resident in sim.scheduler.shards["a"].residents.values()):
        sim.advance("a")
    prefills = [action for action in sim.actions if isinstance(action, Prefill)]
    assert all(prefill.ride == () for prefill in prefills)
    assert len(sim.received[running]) == before


def test_pause_mode_waits_for_the_ratio_or_the_steps() -> None:
    sim = simulation(mode=PrefillMode.PAUSE, waiting_served_ratio=2.0, max_waiting_tokens=10)
    sim.submit(prompt(10), 60, ignore_eos=True)
    sim.advance("a")
    waiting = sim.submit(prompt(10), 3)
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
    eager.submit(prompt(10), 60, ignore_eos=True)
    eager.advance("a")
    eager.submit(prompt(10), 3)
    eager.submit(prompt(10), 3)
    assert len(eager.scheduler.waiting) == 0, "two waiting reach the ratio"
    assert joins(eager) == [JoinReason.BACKPRESSURE]


def joins(sim: Simulation) -> list[JoinReason]:
    return [action.joins for action in sim.actions if isinstance(action, Prefill) and action.joins is not None]


def test_a_cancelled_request_is_released_with_the_very_next_command() -> None:
    sim = simulation(prefix_caching=False)
    kept = sim.submit(prompt(10), 50, ignore_eos=True)
    gone = sim.submit(prompt(10), 50, ignore_eos=True)
    for _ in range(4):
        sim.advance("a")
    assert len(sim.shards["a"].held) == 2
    sim.cancel(gone)
    sim.advance("a")  # the running Decode yields
    sim.advance("a")
    assert len(sim.shards["a"].held) == 1
    sim.run()
    sim.check_at_rest()
    assert kept in sim.finished


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancelling_the_only_request_leaves_the_shard_empty(steps: int) -> None:
    sim = simulation()
    request_id = sim.submit(prompt(200), 50, ignore_eos=True)
    for _ in range(steps):
        sim.advance("a")
    sim.cancel(request_id)
    sim.run()
    sim.check_at_rest()


def test_cancelling_a_waiting_request_sends_nothing() -> None:
    sim = simulation(limits=limits_of(max_sequences=1))
    sim.submit(prompt(10), 20)
    waiting = sim.submit(prompt(10), 20)
    sim.actions.clear()
    sim.cancel(waiting)
    assert sim.actions == []
    assert len(sim.scheduler.waiting) == 0


def test_cells_are_never_promised_twice() -> None:
    sim = simulation(limits=limits_of(cells=100, cells_per_sequence=100, max_sequences=8, max_batch_tokens=64))
    for number in range(10):
        sim.submit(prompt(20, number), 30, ignore_eos=True)
    for _ in range(5):
        sim.advance("a")
    assert len(sim.scheduler.shards["a"].residents) == 2, "49 cells each"
    sim.run()
    sim.check_at_rest()
    assert len(sim.finished) == 10


def test_small_requests_pass_a_large_one_but_not_for_ever() -> None:
    sim = simulation(
        limits=limits_of(cells=100, cells_per_sequence=100, max_sequences=8, max_batch_tokens=64), max_bypass=3
    )
    first = sim.submit(prompt(20), 31, ignore_eos=True)
    large = sim.submit(prompt(60), 40, ignore_eos=True)
    small = [sim.submit(prompt(5, number), 5, ignore_eos=True) for number in range(12)]
    sim.run()
    order = [action.request_id for action in sim.actions if isinstance(action, Start)]
    assert order.index(first) < order.index(large)
    assert order.index(large) <= 5, f"three may pass it, then it is its turn: {order}"
    assert set(order) == {first, large, *small}


def test_a_request_that_fits_no_shard_fails_at_once() -> None:
    sim = simulation()
    request_id = sim.submit(prompt(300), 200)
    assert sim.failed == {request_id: FailureReason.DOES_NOT_FIT}


def test_waiting_requests_that_do_not_fit_fail_when_a_shard_joins() -> None:
    sim = Simulation(SchedulerConfig())
    request_id = sim.submit(prompt(300), 200)
    assert sim.failed == {}
    sim.join("a", LIMITS)
    assert sim.failed == {request_id: FailureReason.DOES_NOT_FIT}


def test_waiting_requests_that_only_the_lost_shard_could_hold_end_with_their_error() -> None:
    sim = Simulation(SchedulerConfig(max_bypass=0))
    sim.join("small", limits_of(max_sequences=1))
    sim.join("large", limits_of(cells=1000, cells_per_sequence=1000, max_sequences=1, max_batch_tokens=128))
    running = sim.submit(prompt(500), 100)
    waiting = sim.submit(prompt(600), 100)
    behind = [sim.submit(prompt(10, number), 10, ignore_eos=True) for number in range(3)]
    sim.lose("large")
    assert sim.failed == dict.fromkeys((running, waiting), FailureReason.DOES_NOT_FIT)
    sim.run()
    sim.check_at_rest()
    assert sim.finished == set(behind)


def test_a_request_that_fits_a_remaining_shard_survives_the_loss_of_another() -> None:
    sim = simulation("a", "b", limits=limits_of(max_sequences=1))
    ids = {sim.submit(prompt(300, number), 50, ignore_eos=True) for number in range(3)}
    sim.lose("a")
    assert sim.failed == {}
    sim.run()
    assert sim.finished == ids


def test_placement_prefers_the_emptier_shard() -> None:
    sim = simulation("a", "b")
    for number in range(4):
        sim.submit(prompt(10, number), 20, ignore_eos=True)
    sim.advance("a")
    sim.advance("b")
    assert {name: len(shard.residents) for name, shard in sim.scheduler.shards.items()} == {"a": 2, "b": 2}


def test_a_request_starts_where_room_appears_first() -> None:
    sim = simulation("a", "b", limits=limits_of(max_sequences=1))
    sim.submit(prompt(10), 60, ignore_eos=True)
    sim.submit(prompt(10), 5, ignore_eos=True)
    third = sim.submit(prompt(10), 5, ignore_eos=True)
    busy = "a" if sim.scheduler.shards["a"].residents[0].sequence.request_id == 1 else "b"
    other = "b" if busy == "a" else "a"
    while third not in sim.finished:
        sim.advance(other)
    assert third in sim.finished


def test_no_token_is_lost_with_a_shard() -> None:
    sim = simulation("a", "b")
    ids = [sim.submit(prompt(30, number), 40, ignore_eos=True) for number in range(4)]
    for _ in range(10):
        sim.advance("a")
        sim.advance("b")
    sim.lose("a")
    sim.run()
    sim.check_at_rest()
    assert set(ids) == sim.finished


def test_a_draining_shard_serves_its_sequences_and_takes_no_others() -> None:
    sim = simulation("a", "b", limits=limits_of(max_sequences=2))
    first = [sim.submit(prompt(10, number), 40, ignore_eos=True) for number in range(2)]
    for _ in range(3):
        sim.advance("a")
        sim.advance("b")
    sim.handle(ShardDraining("a"))
    later = [sim.submit(prompt(10, number), 10, ignore_eos=True) for number in range(4)]
    while not set(first) <= sim.finished:
        assert len(sim.scheduler.shards["a"].residents) <= 1
        sim.advance("a")
        sim.advance("b")
    sim.run()
    sim.check_at_rest()
    assert {*first, *later} == sim.finished


def test_results_of_an_earlier_life_of_a_shard_are_ignored() -> None:
    sim = simulation()
    request_id = sim.submit(prompt(10), 10, ignore_eos=True)
    (prefill,) = (action for action in sim.actions if isinstance(action, Prefill))
    sim.lose("a")
    late = Stepped(shard="a", command_id=prefill.command_id, outcome=StepOutcome.OK, tokens=(), seconds=0.1)
    assert sim.handle(late, CommandEnded("a", prefill.command_id)) == []
    sim.join("a", LIMITS)
    sim.run()
    assert request_id in sim.finished


def test_a_shard_that_joins_again_is_empty() -> None:
    sim = simulation()
    request_id = sim.submit(prompt(10), 10, ignore_eos=True)
    sim.advance("a")
    sim.shards["a"].held.clear()
    sim.shards["a"].commands.clear()
    sim.handle(ShardJoined("a", LIMITS))
    sim.run()
    sim.check_at_rest()
    assert request_id in sim.finished


def test_without_any_shard_requests_fail_after_the_grace() -> None:
    sim = simulation(no_shard_grace_s=10.0)
    running = sim.submit(prompt(10), 10, ignore_eos=True)
    sim.advance("a")
    sim.lose("a")
    sim.tick(9.0)
    assert sim.failed == {}
    sim.tick(2.0)
    assert sim.failed == {running: FailureReason.NO_SHARD}
    late = sim.submit(prompt(10), 10)
    sim.tick(9.0)
    assert late not in sim.failed, "a shard may be starting for it"
    sim.tick(2.0)
    assert sim.failed[late] is FailureReason.NO_SHARD
    sim.join("a", LIMITS)
    served = sim.submit(prompt(10), 10)
    sim.run()
    assert served in sim.finished


def test_a_request_whose_shards_are_lost_again_and_again_fails() -> None:
    sim = simulation(max_losses=2)
    request_id = sim.submit(prompt(200), 10)
    for _ in range(3):
        sim.lose("a")
        sim.join("a", LIMITS)
    assert sim.failed == {request_id: FailureReason.NO_PROGRESS}


def test_a_request_in_whose_step_two_shards_are_lost_fails() -> None:
    sim = simulation(max_batch_prefill_tokens=64)
    poisoned = sim.submit(prompt(200), 10)
    sim.lose("a")
    assert sim.failed == {}
    sim.join("a", LIMITS)
    sim.lose("a")
    assert sim.failed == {poisoned: FailureReason.NO_PROGRESS}


def test_a_shard_that_was_only_slow_counts_against_no_request() -> None:
    sim = simulation(max_batch_prefill_tokens=64)
    slow = sim.submit(prompt(200), 10)
    for _ in range(3):
        sim.lose("a")
        sim.join("a", LIMITS, survived=True)
    assert sim.failed == {}
    # It is not tried forever.
    sim.lose("a")
    assert sim.failed == {slow: FailureReason.NO_PROGRESS}


def test_a_loss_elsewhere_is_not_forgiven_by_a_shard_that_was_only_slow() -> None:
    sim = simulation(max_batch_prefill_tokens=64)
    poisoned = sim.submit(prompt(200), 10)
    sim.lose("a")
    sim.join("b", LIMITS)
    sim.join("a", LIMITS, survived=True)
    assert sim.scheduler.sequences[poisoned].fatal_losses == 0
    sim.lose("b")
    sim.join("b", LIMITS)
    sim.join("c", LIMITS, survived=True)
    assert sim.scheduler.sequences[poisoned].fatal_losses == 1


def test_requests_of_a_lost_shard_start_apart_so_that_only_the_one_that_kills_is_ended() -> None:
    sim = simulation()
    innocent = [sim.submit(prompt(20, start), 10) for start in (1000, 2000)]
    poisoned = sim.submit(prompt(20, 3000), 10)
    sim.advance("a")
    kills = 0
    while sim.scheduler.sequences:
        step = sim.scheduler.shards["a"].positions_under_way
        running = [sim.scheduler.shards["a"].residents[sequence_id].request_id for sequence_id in step]
        if poisoned in running:
            kills += 1
            sim.lose("a")
            sim.join("a", LIMITS)
        else:
            sim.advance("a")
    assert kills == 2
    assert sim.failed == {poisoned: FailureReason.NO_PROGRESS}
    assert sorted(sim.finished) == innocent


def test_shards_that_are_lost_while_they_compute_others_are_no_fault_of_a_request() -> None:
    """It loses its cells at one position after the other."""
    sim = simulation(max_batch_prefill_tokens=64)
    request_id = sim.submit(prompt(200), 10)
    for steps in range(3):
        for _ in range(steps):
            sim.advance("a")
        sim.lose("a")
        sim.join("a", LIMITS)
    assert sim.failed == {}
    sim.run()
    assert request_id in sim.finished


def test_a_full_cache_takes_back_the_newest_request_and_admits_none_in_that_step() -> None:
    sim = simulation(limits=limits_of(max_sequences=2))
    old = sim.submit(prompt(10), 20, ignore_eos=True)
    new = sim.submit(prompt(10), 20, ignore_eos=True)
    third = sim.submit(prompt(10), 20, ignore_eos=True)
    for _ in range(3):
        sim.advance("a")
    sim.shards["a"].fail_next_step = StepOutcome.NO_KV
    (failed, *rest) = sim.shards["a"].advance()
    actions = sim.handle(failed)
    assert not any(isinstance(action, Start | Prefill) for action in actions)
    assert [sequence.request_id for sequence in sim.scheduler.waiting] == [new, third]
    sim.handle(*rest)
    sim.run()
    sim.check_at_rest()
    assert {old, new, third} == sim.finished


def test_an_aborted_step_is_repeated() -> None:
    sim = simulation()
    request_id = sim.submit(prompt(10), 10, ignore_eos=True)
    sim.shards["a"].fail_next_step = StepOutcome.ABORTED
    sim.run()
    sim.check_at_rest()
    assert request_id in sim.finished


def test_the_state_of_a_request_through_its_life() -> None:
    sim = simulation(limits=limits_of(max_sequences=1, **SAVING))
    low = sim.submit(prompt(200), 60, ignore_eos=True)
    waiting = sim.submit(prompt(20, 2), 3)
    state_of = sim.scheduler.state_of
    assert (state_of(low), state_of(waiting)) == (GenerationState.PREFILLING, GenerationState.QUEUED)
    for _ in range(4):
        sim.advance("a")
    assert state_of(low) is GenerationState.RUNNING
    high = sim.submit(prompt(20, 2), 30, priority=1, ignore_eos=True)
    # First on its way out, then saved.
    seen = [state_of(low)]
    while state_of(high) is GenerationState.QUEUED:
        sim.advance("a")
        seen.append(state_of(low))
    assert seen[-1] is GenerationState.SWAPPED, seen
    sim.run()
    assert sim.finished == {low, waiting, high}


def test_late_replies_to_commands_of_an_earlier_life_are_ignored() -> None:
    sim = simulation()
    late = (
        Saved(shard="a", command_id=99, saved=(True,), sizes_bytes=(1,), seconds=0.1),
        Loaded(shard="b", command_id=99, loaded=(True,), bad_runs=(), seconds=0.1),
        LayoutSet(shard="a", command_id=99, layout=LIMITS.layout, lost=(), seconds=0.1),
        ShardDraining("b"),
        Cancelled(99),
    )
    assert sim.handle(*late) == []


def test_deadlines_end_requests_that_have_not_started_or_not_ended() -> None:
    sim = simulation(limits=limits_of(max_sequences=1))
    requests = [
        dataclasses.replace(request(number, prompt(10, number), 300), start_by_s=1.0, end_by_s=end_by_s)
        for number, end_by_s in ((1, 2.0), (2, math.inf))
    ]
    for one in requests:
        sim.requests[one.request_id] = one
        sim.received[one.request_id] = []
    sim.handle(*(Submitted(one) for one in requests))
    sim.tick(0.5)
    assert sim.failed == {}
    sim.tick(1.0)
    assert sim.failed == {2: FailureReason.QUEUE_TIMEOUT}, "the first has started"
    sim.tick(1.0)
    assert sim.failed == {2: FailureReason.QUEUE_TIMEOUT, 1: FailureReason.DEADLINE}

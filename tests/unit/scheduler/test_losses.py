"""Requests outlive the shards that computed them, failed steps, and the scheduler that had them."""

import math
from dataclasses import replace
from typing import Any

import pytest

from caravan_proto.messages.commands import Prefill
from caravan_proto.messages.results import LayoutSet, Loaded, Saved, StepOutcome
from caravan_scheduler.actions import Deliver, FailureReason, Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import BeamSearch, EarlyStopping, GenerationState
from caravan_scheduler.core.tokens import Alternative
from caravan_scheduler.events import Cancelled, CommandEnded, ShardDraining, ShardJoined, Stepped
from caravan_testing.ledgers import LIMITS, limits_of
from caravan_testing.model_outputs import expected_output
from caravan_testing.requests import prompt_of
from caravan_testing.simulation import Simulation, expected_beam, simulation


def test_waiting_requests_that_only_the_lost_shard_could_hold_end_with_their_error() -> None:
    sim = Simulation(SchedulerConfig(max_bypass=0))
    sim.join("small", limits_of(max_sequences=1))
    sim.join("large", limits_of(cells=1000, cells_per_sequence=1000, max_sequences=1, max_batch_tokens=128))
    running = sim.submit(prompt_of(500), 100)
    waiting = sim.submit(prompt_of(600), 100)
    behind = [sim.submit(prompt_of(10, number), 10, ignore_eos=True) for number in range(3)]
    sim.lose("large")
    assert sim.failed == dict.fromkeys((running, waiting), FailureReason.DOES_NOT_FIT)
    sim.settle()
    assert sim.finished == set(behind)


def test_a_request_that_fits_a_remaining_shard_survives_the_loss_of_another() -> None:
    sim = simulation("a", "b", limits=limits_of(max_sequences=1))
    ids = {sim.submit(prompt_of(300, number), 50, ignore_eos=True) for number in range(3)}
    sim.lose("a")
    assert sim.failed == {}
    sim.run()
    assert sim.finished == ids


def test_no_token_is_lost_with_a_shard() -> None:
    sim = simulation("a", "b")
    ids = [sim.submit(prompt_of(30, number), 40, ignore_eos=True) for number in range(4)]
    for _ in range(10):
        sim.advance("a")
        sim.advance("b")
    sim.lose("a")
    sim.settle()
    assert set(ids) == sim.finished


def test_results_of_an_earlier_life_of_a_shard_are_ignored() -> None:
    sim = simulation()
    request_id = sim.submit(prompt_of(10), 10, ignore_eos=True)
    (prefill,) = sim.sent(Prefill)
    sim.lose("a")
    late = Stepped(shard="a", command_id=prefill.command_id, outcome=StepOutcome.OK, tokens=(), seconds=0.1)
    assert sim.handle(late, CommandEnded("a", prefill.command_id)) == []
    sim.join("a", LIMITS)
    sim.run()
    assert request_id in sim.finished


def test_a_shard_that_joins_again_is_empty() -> None:
    sim = simulation()
    request_id = sim.submit(prompt_of(10), 10, ignore_eos=True)
    sim.advance("a")
    sim.shards["a"].held.clear()
    sim.shards["a"].commands.clear()
    sim.handle(ShardJoined("a", LIMITS))
    sim.settle()
    assert request_id in sim.finished


def test_without_any_shard_requests_fail_after_the_grace() -> None:
    sim = simulation(no_shard_grace_s=10.0)
    running = sim.submit(prompt_of(10), 10, ignore_eos=True)
    sim.advance("a")
    sim.lose("a")
    sim.tick(9.0)
    assert sim.failed == {}
    sim.tick(2.0)
    assert sim.failed == {running: FailureReason.NO_SHARD}
    late = sim.submit(prompt_of(10), 10)
    sim.tick(9.0)
    assert late not in sim.failed, "a shard may be starting for it"
    sim.tick(2.0)
    assert sim.failed[late] is FailureReason.NO_SHARD
    sim.join("a", LIMITS)
    served = sim.complete(prompt_of(10), 10)
    assert served in sim.finished


def test_a_request_whose_shards_are_lost_again_and_again_fails() -> None:
    sim = simulation(max_losses=2)
    request_id = sim.submit(prompt_of(200), 10)
    for _ in range(3):
        sim.lose("a")
        sim.join("a", LIMITS)
    assert sim.failed == {request_id: FailureReason.NO_PROGRESS}


def test_a_request_in_whose_step_two_shards_are_lost_fails() -> None:
    sim = simulation(max_batch_prefill_tokens=64)
    poisoned = sim.submit(prompt_of(200), 10)
    sim.lose("a")
    assert sim.failed == {}
    sim.join("a", LIMITS)
    sim.lose("a")
    assert sim.failed == {poisoned: FailureReason.NO_PROGRESS}


def test_a_shard_that_was_only_slow_counts_against_no_request() -> None:
    sim = simulation(max_batch_prefill_tokens=64)
    slow = sim.submit(prompt_of(200), 10)
    for _ in range(3):
        sim.lose("a")
        sim.join("a", LIMITS, survived=True)
    assert sim.failed == {}
    # It is not tried forever.
    sim.lose("a")
    assert sim.failed == {slow: FailureReason.NO_PROGRESS}


def test_a_loss_elsewhere_is_not_forgiven_by_a_shard_that_was_only_slow() -> None:
    sim = simulation(max_batch_prefill_tokens=64)
    poisoned = sim.submit(prompt_of(200), 10)
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
    innocent = [sim.submit(prompt_of(20, start), 10) for start in (1000, 2000)]
    poisoned = sim.submit(prompt_of(20, 3000), 10)
    sim.advance("a")
    kills = 0
    while sim.scheduler.sequences:
        step = sim.scheduler.shards["a"].commands.positions_under_way
        running = [sim.scheduler.shards["a"].stays.residents[sequence_id].request_id for sequence_id in step]
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
    request_id = sim.submit(prompt_of(200), 10)
    for steps in range(3):
        sim.advance("a", steps)
        sim.lose("a")
        sim.join("a", LIMITS)
    assert sim.failed == {}
    sim.run()
    assert request_id in sim.finished


def test_a_full_cache_takes_back_the_newest_request_and_admits_none_in_that_step() -> None:
    sim = simulation(limits=limits_of(max_sequences=2))
    old = sim.submit(prompt_of(10), 20, ignore_eos=True)
    new = sim.submit(prompt_of(10), 20, ignore_eos=True)
    third = sim.submit(prompt_of(10), 20, ignore_eos=True)
    sim.advance("a", 3)
    sim.shards["a"].fail_next_step = StepOutcome.NO_KV
    (failed, *rest) = sim.shards["a"].advance()
    actions = sim.handle(failed)
    assert not any(isinstance(action, Start | Prefill) for action in actions)
    assert [sequence.request_id for sequence in sim.scheduler.waiting] == [new, third]
    sim.handle(*rest)
    sim.settle()
    assert {old, new, third} == sim.finished


def test_an_aborted_step_is_repeated() -> None:
    sim = simulation()
    request_id = sim.submit(prompt_of(10), 10, ignore_eos=True)
    sim.shards["a"].fail_next_step = StepOutcome.ABORTED
    sim.settle()
    assert request_id in sim.finished


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


def _advance(sim: Simulation, **changes: Any) -> None:
    """Let the shard run a step whose report is changed so; ``changes`` of the first request's sequence id 0."""
    sim.now += 0.01
    for event in sim.shards["a"].advance():
        sim.handle(replace(event, **changes) if isinstance(event, Stepped) else event)


def test_a_request_without_logits_fails_and_its_cells_are_not_kept() -> None:
    sim = simulation()
    bad = sim.submit(prompt_of(40), 8, ignore_eos=True)
    _advance(sim, tokens=(), without_logits=(0,))
    assert sim.failed == {bad: FailureReason.NO_LOGITS}
    sim.run()
    assert not sim.scheduler.shards["a"].stays.parked
    assert sim.scheduler.shards["a"].cells.held == 0
    good = sim.complete(prompt_of(40), 8, ignore_eos=True)
    assert sim.finished == {good}


def test_prompt_logprobs_without_numbers_are_neither_delivered_nor_known_to_others() -> None:
    sim = simulation()
    bad = sim.submit(prompt_of(40), 8, prompt_logprobs=True)
    _advance(sim, without_logits=(0,))
    assert sim.failed == {bad: FailureReason.NO_LOGITS}
    assert not sim.sent(Deliver)
    assert sim.scheduler._state.known_logprobs.size == 0


@pytest.mark.parametrize(
    "likeliest", [(), (Alternative(5, b"x", False, math.nan),), (Alternative(5, b"x", False, math.inf),)]
)
def test_a_beam_search_without_logits_fails_as_a_whole(likeliest: tuple[Alternative, ...]) -> None:
    sim = simulation()
    ends = frozenset(range(0, 97, 7))
    search = BeamSearch(width=2, index=0, length_penalty=1.0, early_stopping=EarlyStopping.NO, eos_token_ids=ends)
    ids = sim.submit_beams(prompt_of(8), 6, search)
    (name,) = sim.shards
    for event in sim.shards[name].advance():
        if isinstance(event, Stepped):
            assert event.outcome is StepOutcome.OK
            event = replace(event, evaluations=tuple((key, likeliest) for key, _ in event.evaluations))
        sim.handle(event)
    assert sim.failed == dict.fromkeys(ids, FailureReason.NO_LOGITS)
    sim.run()


def test_a_beam_search_whose_next_tokens_all_end_it_ends() -> None:
    sim = simulation()
    search = BeamSearch(
        width=2, index=0, length_penalty=1.0, early_stopping=EarlyStopping.NO, eos_token_ids=frozenset(range(97))
    )
    ids = sim.submit_beams(prompt_of(8), 6, search)
    sim.run()
    assert sim.finished == set(ids)


def test_what_waits_and_what_has_begun_goes_on_in_the_other_scheduler() -> None:
    sim = simulation(limits=limits_of(max_sequences=2))
    ids = [sim.submit(prompt_of(10, number), 12, ignore_eos=True) for number in range(1, 5)]
    sim.advance("a", 4)
    begun = {request_id: list(sim.received[request_id]) for request_id in ids}
    assert [bool(begun[request_id]) for request_id in ids] == [True, True, False, False]
    sim.replace_scheduler()
    assert [sequence.request_id for sequence in sim.scheduler.waiting] == ids
    assert {sim.scheduler.standing_of(request_id).state for request_id in ids} == {GenerationState.QUEUED}
    sim.join("b", LIMITS)
    sim.settle()
    for request_id in ids:
        assert sim.received[request_id] == expected_output(sim.requests[request_id].spec)
        assert sim.received[request_id][: len(begun[request_id])] == begun[request_id]


def test_a_beam_search_moves_as_a_whole() -> None:
    search = BeamSearch(width=3, index=0)
    sim = simulation()
    ids = sim.submit_beams(prompt_of(10), 8, search, ignore_eos=True)
    sim.advance("a", 3)
    sim.replace_scheduler()
    assert [sequence.request_id for sequence in sim.scheduler.waiting] == ids[:1]
    sim.join("b", LIMITS)
    sim.settle()
    assert [sim.received[request_id] for request_id in ids] == [
        expected_beam(sim.requests[request_id].spec) for request_id in ids
    ]


def test_a_request_that_no_new_shard_could_hold_fails_there() -> None:
    sim = simulation()
    large, small = (sim.submit(prompt_of(length), 4, ignore_eos=True) for length in (60, 5))
    sim.replace_scheduler()
    sim.join("b", limits_of(cells=32, cells_per_sequence=32))
    sim.run()
    assert sim.failed == {large: FailureReason.DOES_NOT_FIT}
    assert sim.received[small] == expected_output(sim.requests[small].spec)


def test_deadlines_go_along() -> None:
    sim = simulation()
    request_id = sim.submit(prompt_of(5), 4, end_by_s=1.0)
    sim.replace_scheduler()
    sim.tick(2.0)
    assert sim.failed == {request_id: FailureReason.DEADLINE}


def test_nothing_leaves_a_scheduler_without_requests() -> None:
    sim: Simulation = simulation()
    sim.replace_scheduler()
    sim.check_at_rest()

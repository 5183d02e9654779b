"""One behaviour per test, on model shards that hold the scheduler to the contract."""

import dataclasses
import math

import pytest

from caravan_proto.messages.commands import Decode, FilterBatch, Load, Prefill
from caravan_proto.messages.constraint import Thought
from caravan_proto.messages.results import StepOutcome
from caravan_scheduler.actions import Deliver, FailureReason, Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import GenerationState
from caravan_scheduler.core.tokens import GeneratedToken, PromptToken
from caravan_scheduler.events import ShardDraining, Submitted
from caravan_scheduler.outbox import Outbox
from caravan_testing.ledgers import LIMITS, SAVING, limits_of
from caravan_testing.model_outputs import expected_output
from caravan_testing.requests import prompt_of, request
from caravan_testing.simulation import Simulation, simulation


def test_a_request_is_prefilled_decoded_and_released() -> None:
    sim = simulation(prefix_caching=False)
    request_id = sim.submit(prompt_of(10), 5, ignore_eos=True)
    sim.settle()
    assert sim.received[request_id] == expected_output(sim.requests[request_id].spec)
    kinds = [type(action) for action in sim.sent(Prefill, Decode, FilterBatch, Start)]
    assert kinds == [Start, Prefill, Decode, FilterBatch]


def test_requests_of_one_instant_share_a_step() -> None:
    sim = simulation()
    requests = [request(number, prompt_of(20, number), 3) for number in range(1, 4)]
    actions = sim.scheduler.handle([Submitted(one) for one in requests], 0.0)
    (prefill,) = (action for action in actions if isinstance(action, Prefill))
    assert [len(chunk.token_ids) for chunk in prefill.chunks] == [20, 20, 20]
    assert all(chunk.last and chunk.setup is not None for chunk in prefill.chunks)


def test_endings_of_one_context_compute_it_once_and_each_gets_all_prompt_logprobs() -> None:
    sim = simulation(limits=limits_of(max_prompt_logprob_tokens=128))
    for number in range(8):
        sim.submit((*prompt_of(100), 200 + number, 300 + number), 1, prompt_logprobs=True)
    sim.settle()
    chunks = [chunk for action in sim.sent(Prefill) for chunk in action.chunks]
    # The context and an ending, then of each other ending its two tokens and the one before them.
    assert sum(len(chunk.token_ids) for chunk in chunks) == 102 + 7 * 3


def test_a_later_ending_starts_from_what_was_saved_of_the_context() -> None:
    sim = simulation(limits=limits_of(max_prompt_logprob_tokens=128, **SAVING))
    sim.complete((*prompt_of(96), 200), 1, prompt_logprobs=True)
    for _ in range(3):  # an idle shard saves what it holds
        sim.tick(0.5)
        sim.run()
    for number in range(4):  # others take its cells
        sim.submit(prompt_of(90, 30 + 20 * number), 1)
    sim.run()
    before = len(sim.actions)
    sim.submit((*prompt_of(96), 201, 202), 1, prompt_logprobs=True)
    sim.settle()
    chunks = [chunk for action in sim.sent(Prefill, since=before) for chunk in action.chunks]
    assert sum(len(chunk.token_ids) for chunk in chunks) < 98
    assert sim.sent(Load, since=before) or chunks[0].start > 0


def test_prompt_logprobs_are_complete_after_preemptions_failures_and_losses() -> None:
    sim = simulation("a", "b", limits=limits_of(cells=150, max_prompt_logprob_tokens=16))
    for number in range(6):
        sim.submit((*prompt_of(60), 200 + number, *prompt_of(8, number)), 12, prompt_logprobs=True, ignore_eos=True)
    for step in range(12):
        sim.advance("a" if step % 2 else "b")
        if step == 5:
            sim.shards["a"].fail_next_step = StepOutcome.ABORTED
        if step == 8:
            sim.submit(prompt_of(90), 20, priority=1, ignore_eos=True)
    sim.lose("b")
    sim.join("b", limits_of(cells=150, max_prompt_logprob_tokens=16))
    sim.settle()
    assert not sim.failed


def test_a_cancelled_request_is_released_with_the_very_next_command() -> None:
    sim = simulation(prefix_caching=False)
    kept = sim.submit(prompt_of(10), 50, ignore_eos=True)
    gone = sim.submit(prompt_of(10), 50, ignore_eos=True)
    sim.advance("a", 4)
    assert len(sim.shards["a"].held) == 2
    sim.cancel(gone)
    sim.advance("a")  # the running Decode yields
    sim.advance("a")
    assert len(sim.shards["a"].held) == 1
    sim.settle()
    assert kept in sim.finished


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cancelling_the_only_request_leaves_the_shard_empty(steps: int) -> None:
    sim = simulation()
    request_id = sim.submit(prompt_of(200), 50, ignore_eos=True)
    sim.advance("a", steps)
    sim.cancel(request_id)
    sim.settle()


def test_cancelling_a_waiting_request_sends_nothing() -> None:
    sim = simulation(limits=limits_of(max_sequences=1))
    sim.submit(prompt_of(10), 20)
    waiting = sim.submit(prompt_of(10), 20)
    sim.actions.clear()
    sim.cancel(waiting)
    assert sim.actions == []
    assert len(sim.scheduler.waiting) == 0


def test_cells_are_never_promised_twice() -> None:
    sim = simulation(limits=limits_of(cells=100, cells_per_sequence=100, max_sequences=8, max_batch_tokens=64))
    for number in range(10):
        sim.submit(prompt_of(20, number), 30, ignore_eos=True)
    sim.advance("a", 5)
    assert len(sim.scheduler.shards["a"].stays.residents) == 2, "49 cells each"
    sim.settle()
    assert len(sim.finished) == 10


def test_small_requests_pass_a_large_one_but_not_for_ever() -> None:
    sim = simulation(
        limits=limits_of(cells=100, cells_per_sequence=100, max_sequences=8, max_batch_tokens=64), max_bypass=3
    )
    first = sim.submit(prompt_of(20), 31, ignore_eos=True)
    large = sim.submit(prompt_of(60), 40, ignore_eos=True)
    small = [sim.submit(prompt_of(5, number), 5, ignore_eos=True) for number in range(12)]
    sim.run()
    order = [action.request_id for action in sim.sent(Start)]
    assert order.index(first) < order.index(large)
    assert order.index(large) <= 5, f"three may pass it, then it is its turn: {order}"
    assert set(order) == {first, large, *small}


def test_a_request_that_fits_no_shard_fails_at_once() -> None:
    sim = simulation()
    request_id = sim.submit(prompt_of(300), 200)
    assert sim.failed == {request_id: FailureReason.DOES_NOT_FIT}


def test_waiting_requests_that_do_not_fit_fail_when_a_shard_joins() -> None:
    sim = Simulation(SchedulerConfig())
    request_id = sim.submit(prompt_of(300), 200)
    assert sim.failed == {}
    sim.join("a", LIMITS)
    assert sim.failed == {request_id: FailureReason.DOES_NOT_FIT}


def test_placement_prefers_the_emptier_shard() -> None:
    sim = simulation("a", "b")
    for number in range(4):
        sim.submit(prompt_of(10, number), 20, ignore_eos=True)
    sim.advance("a")
    sim.advance("b")
    assert {name: len(shard.stays.residents) for name, shard in sim.scheduler.shards.items()} == {"a": 2, "b": 2}


def test_a_request_starts_where_room_appears_first() -> None:
    sim = simulation("a", "b", limits=limits_of(max_sequences=1))
    sim.submit(prompt_of(10), 60, ignore_eos=True)
    sim.submit(prompt_of(10), 5, ignore_eos=True)
    third = sim.submit(prompt_of(10), 5, ignore_eos=True)
    busy = "a" if sim.scheduler.shards["a"].stays.residents[0].sequence.request_id == 1 else "b"
    other = "b" if busy == "a" else "a"
    while third not in sim.finished:
        sim.advance(other)
    assert third in sim.finished


def test_a_draining_shard_serves_its_sequences_and_takes_no_others() -> None:
    sim = simulation("a", "b", limits=limits_of(max_sequences=2))
    first = [sim.submit(prompt_of(10, number), 40, ignore_eos=True) for number in range(2)]
    for _ in range(3):
        sim.advance("a")
        sim.advance("b")
    sim.handle(ShardDraining("a"))
    later = [sim.submit(prompt_of(10, number), 10, ignore_eos=True) for number in range(4)]
    while not set(first) <= sim.finished:
        assert len(sim.scheduler.shards["a"].stays.residents) <= 1
        sim.advance("a")
        sim.advance("b")
    sim.settle()
    assert {*first, *later} == sim.finished


def test_the_state_of_a_request_through_its_life() -> None:
    sim = simulation(limits=limits_of(max_sequences=1, **SAVING))
    low = sim.submit(prompt_of(200), 60, ignore_eos=True)
    waiting = sim.submit(prompt_of(20, 2), 3)

    def state_of(request_id: int) -> GenerationState:
        return sim.scheduler.standing_of(request_id).state

    assert (state_of(low), state_of(waiting)) == (GenerationState.PREFILLING, GenerationState.QUEUED)
    sim.advance("a", 4)
    assert state_of(low) is GenerationState.RUNNING
    high = sim.submit(prompt_of(20, 2), 30, priority=1, ignore_eos=True)
    # First on its way out, then saved.
    seen = [state_of(low)]
    while state_of(high) is GenerationState.QUEUED:
        sim.advance("a")
        seen.append(state_of(low))
    assert seen[-1] is GenerationState.SWAPPED, seen
    sim.run()
    assert sim.finished == {low, waiting, high}


def test_how_far_a_prompt_is_computed() -> None:
    sim = simulation(max_batch_prefill_tokens=64)
    request_id = sim.submit(prompt_of(150), 2, ignore_eos=True)
    seen = [sim.scheduler.standing_of(request_id).computed]
    while request_id not in sim.finished:
        sim.advance("a")
        seen.append(sim.scheduler.standing_of(request_id).computed)
    # What is not resident any more has nothing computed.
    assert seen == [*sorted(seen[:-1]), 0]
    assert {0, 64, 128, 150} <= set(seen)


def test_deadlines_end_requests_that_have_not_started_or_not_ended() -> None:
    sim = simulation(limits=limits_of(max_sequences=1))
    requests = [
        dataclasses.replace(request(number, prompt_of(10, number), 300), start_by_s=1.0, end_by_s=end_by_s)
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


A, B, C = (GeneratedToken(key, b"x", False, None, (), None) for key in (1, 2, 3))


def test_each_request_gets_its_token_of_a_step() -> None:
    outbox = Outbox()
    outbox.deliver_tokens([(7, A), (5, B)])
    actions = outbox.drain()
    assert actions == [Deliver(7, (), (A,)), Deliver(5, (), (B,))]
    assert all(type(action) is Deliver for action in actions)
    assert outbox.drain() == []


def test_a_request_gets_all_of_its_tokens_at_once() -> None:
    outbox = Outbox()
    outbox.deliver_tokens([(7, A), (7, B), (5, A)])
    outbox.deliver_tokens([(7, C)])
    assert outbox.drain() == [Deliver(7, (), (A, B, C)), Deliver(5, (), (A,))]


def test_prompt_logprobs_stay_before_the_first_token() -> None:
    outbox, logprobs = Outbox(), (PromptToken(None, ()),)
    outbox.deliver_prompt_logprobs(7, logprobs)
    outbox.deliver_tokens([(7, A)])
    assert outbox.drain() == [Deliver(7, logprobs, (A,))]


def test_an_ended_thought_begins_another_stay_with_what_is_computed_and_no_more_tokens() -> None:
    sim = simulation()
    thought = Thought(closings=(b".",), ending=(7, 8))
    request_id = sim.submit(prompt_of(20), 12, ignore_eos=True, thought=thought)
    sim.advance("a", 4)
    known, before = len(sim.received[request_id]), len(sim.actions)
    assert known
    sim.end_thought(request_id)
    sim.end_thought(request_id)  # it ends there already
    sim.settle()
    (chunk,) = (chunk for action in sim.sent(Prefill, since=before) for chunk in action.chunks)
    assert chunk.setup is not None
    assert chunk.setup.thought == dataclasses.replace(thought, max_tokens=known)
    assert (chunk.start, len(chunk.token_ids)) == (20 + known - 1, 1)
    assert sim.received[request_id] == expected_output(sim.requests[request_id].spec)


@pytest.mark.parametrize(
    "thought", [None, Thought(closings=(b".",)), Thought(closings=(b".",), ending=(7,), max_tokens=1)]
)
def test_nothing_happens_where_no_thought_can_be_ended(thought: Thought | None) -> None:
    sim = simulation()
    request_id = sim.submit(prompt_of(20), 12, ignore_eos=True, thought=thought)
    sim.advance("a", 4)
    before = len(sim.actions)
    sim.end_thought(request_id)
    sim.end_thought(99)
    sim.settle()
    assert not sim.sent(Prefill, since=before)


def test_what_is_left_of_an_ended_sequence_leaves_the_cells_once_nothing_waits() -> None:
    sim = simulation(limits=limits_of(**SAVING), max_batch_size=2)
    sim.submit(prompt_of(150), 5, ignore_eos=True)
    sim.submit(prompt_of(100, 2), 60, ignore_eos=True)
    for seed in (3, 4):  # the first one starts while the second one waits
        sim.submit(prompt_of(150, seed), 20, ignore_eos=True)
    sim.run()
    commands: list[Prefill | Decode | Load] = [*sim.sent(Prefill), *sim.sent(Decode), *sim.sent(Load)]
    parked = [length for command in commands for _, length in command.header.park]
    assert any(length < 154 for length in parked), "none was cut back"
    for _ in range(3):
        sim.tick(0.5)
        sim.run()
    shard = sim.scheduler.shards["a"]
    assert (shard.cells.held, sim.shards["a"].used_cells) == (0, 0)
    sim.check_at_rest()

"""Requests that move from one scheduler to another, whose shards have other weights."""

from caravan_scheduler.actions import FailureReason
from caravan_scheduler.core.generation import BeamSearch, GenerationState
from caravan_testing.ledgers import LIMITS, limits_of
from caravan_testing.model_outputs import expected_output
from caravan_testing.requests import prompt_of
from caravan_testing.simulation import Simulation, expected_beam, simulation


def test_what_waits_and_what_has_begun_goes_on_in_the_other_scheduler() -> None:
    sim = simulation(limits=limits_of(max_sequences=2))
    ids = [sim.submit(prompt_of(10, number), 12, ignore_eos=True) for number in range(1, 5)]
    for _ in range(4):
        sim.advance("a")
    begun = {request_id: list(sim.received[request_id]) for request_id in ids}
    assert [bool(begun[request_id]) for request_id in ids] == [True, True, False, False]
    sim.replace_scheduler()
    assert [sequence.request_id for sequence in sim.scheduler.waiting] == ids
    assert {sim.scheduler.standing_of(request_id).state for request_id in ids} == {GenerationState.QUEUED}
    sim.join("b", LIMITS)
    sim.run()
    sim.check_at_rest()
    for request_id in ids:
        assert sim.received[request_id] == expected_output(sim.requests[request_id].spec)
        assert sim.received[request_id][: len(begun[request_id])] == begun[request_id]


def test_a_beam_search_moves_as_a_whole() -> None:
    search = BeamSearch(width=3, index=0)
    sim = simulation()
    ids = sim.submit_beams(prompt_of(10), 8, search, ignore_eos=True)
    for _ in range(3):
        sim.advance("a")
    sim.replace_scheduler()
    assert [sequence.request_id for sequence in sim.scheduler.waiting] == ids[:1]
    sim.join("b", LIMITS)
    sim.run()
    sim.check_at_rest()
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

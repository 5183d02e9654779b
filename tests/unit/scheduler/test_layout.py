"""When a shard changes the layout of its cells."""

import dataclasses

import pytest

from caravan_proto.messages.commands import Decode, Load, Prefill, Save, SetLayout
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_scheduler.actions import FailureReason
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits
from caravan_testing.simulation import Simulation

SPLIT = LayoutLimits(cells=400, cells_per_sequence=100, layout=KvLayout.SPLIT, saving=Saving.ANY)
UNIFIED = LayoutLimits(cells=400, cells_per_sequence=400, saving=Saving.ANY)
LIMITS = ShardLimits(layout=SPLIT, other_layout=UNIFIED, max_sequences=4, max_batch_tokens=128, memory_bytes=10_000)


def simulation(limits: ShardLimits = LIMITS) -> Simulation:
    sim = Simulation(SchedulerConfig())
    sim.join("a", limits)
    return sim


def layouts(sim: Simulation) -> list[bool]:
    """Return whether cells were shared after each change of the layout."""
    return [action.layout is KvLayout.UNIFIED for action in sim.sent(SetLayout)]


def prompt(length: int, number: int = 1) -> tuple[int, ...]:
    return tuple((number * 31 + place) % 90 + 1 for place in range(length))


def computed_by_prompts(sim: Simulation) -> int:
    return sum(len(chunk.token_ids) for step in sim.sent(Prefill) for chunk in step.chunks)


def test_requests_that_fit_change_nothing() -> None:
    sim = simulation()
    for number in range(6):
        sim.submit(prompt(50, number), 40, ignore_eos=True)
    sim.settle()
    assert layouts(sim) == []


def test_a_long_prompt_gets_all_cells_and_the_faster_layout_comes_back() -> None:
    sim = simulation()
    sim.submit(prompt(300), 20, ignore_eos=True)
    sim.settle()
    assert layouts(sim) == [True, False]


def test_running_sequences_move_without_losing_a_token() -> None:
    sim = simulation()
    running = [sim.submit(prompt(20, number), 60, ignore_eos=True) for number in range(2)]
    sim.advance("a", 10)
    before = {request_id: len(sim.received[request_id]) for request_id in running}
    sim.actions.clear()
    sim.submit(prompt(200, 5), 20, ignore_eos=True)
    sim.settle()
    assert layouts(sim)[:1] == [True]
    assert all(before.values())
    restarted = [chunk for action in sim.sent(Prefill) for chunk in action.chunks if chunk.setup]
    assert len(restarted) == 1, "only the long one was computed"


def test_sequences_that_moved_share_their_equal_beginnings() -> None:
    sim = simulation()
    for number in range(3):
        sim.submit((*prompt(50), *prompt(5, number + 7)), 40, ignore_eos=True)
    sim.advance("a", 10)
    shard, cells = sim.shards["a"], sim.scheduler.shards["a"].cells
    apart = shard.used_cells
    sim.submit(prompt(200, 5), 20, ignore_eos=True)
    while shard.layout.layout is KvLayout.SPLIT:
        sim.advance("a")
    assert shard.used_cells < apart - 90
    assert cells.held == shard.used_cells
    sim.settle()
    sim.check_at_rest()


def test_a_shard_of_an_earlier_version_shares_no_beginnings_and_is_not_counted_on_for_it() -> None:
    sim = simulation()
    sim.shards["a"].shares_beginnings = False
    for number in range(3):
        sim.submit((*prompt(50), *prompt(5, number + 7)), 40, ignore_eos=True)
    sim.advance("a", 10)
    shard, cells = sim.shards["a"], sim.scheduler.shards["a"].cells
    sim.submit(prompt(150, 5), 20, ignore_eos=True)
    while shard.layout.layout is KvLayout.SPLIT:
        sim.advance("a")
    assert cells.held == shard.used_cells > 3 * 55
    sim.settle()


def test_a_long_conversation_keeps_its_cells_while_it_is_expected_back() -> None:
    sim = simulation(dataclasses.replace(LIMITS, memory_bytes=0))
    first = sim.complete(prompt(200), 20, session="long")
    conversation = (*prompt(200), *sim.received[first])
    for number in range(3):
        sim.tick(1.0)
        sim.complete(prompt(30, 5 + number), 5)
    assert layouts(sim) == [True]
    sim.actions.clear()
    sim.complete((*conversation, *prompt(10, 9)), 5, session="long")
    assert computed_by_prompts(sim) < 20
    sim.tick(600.0)
    assert layouts(sim) == [False], "it does not come back"
    sim.settle()


@pytest.mark.parametrize("saving", [Saving.ANY, Saving.NOTHING])
def test_ended_sequences_move_if_they_cannot_be_saved(saving: Saving) -> None:
    both = [dataclasses.replace(layout, saving=saving) for layout in (SPLIT, UNIFIED)]
    sim = simulation(dataclasses.replace(LIMITS, layout=both[0], other_layout=both[1], memory_bytes=0))
    sim.complete(prompt(60), 5)
    sim.complete(prompt(200, 5), 20)
    sim.settle()
    assert layouts(sim) == [True, False], "only the short one fits the layout that comes back"
    sim.actions.clear()
    sim.complete((*prompt(60), 7, 8), 5)
    assert computed_by_prompts(sim) == (2 if saving is Saving.ANY else 62)
    sim.check_at_rest()


def test_an_output_that_grows_too_long_moves_its_shard() -> None:
    sim = simulation()
    sim.submit(prompt(60), 200, ignore_eos=True)
    sim.settle()
    assert layouts(sim) == [True, False]


def test_a_sequence_that_cannot_be_moved_is_computed_again() -> None:
    sim = simulation()
    first = sim.submit(prompt(20), 60, ignore_eos=True)
    sim.advance("a", 5)
    sim.shards["a"].lose_next_moved = True
    sim.submit(prompt(200, 5), 20, ignore_eos=True)
    sim.settle()
    assert first in sim.finished


def test_a_shard_that_cannot_change_is_not_asked_again() -> None:
    sim = simulation()
    short = sim.submit(prompt(20), 60, ignore_eos=True)
    growing = sim.submit(prompt(20, 3), 200, ignore_eos=True)
    sim.shards["a"].refuse_next_layout = True
    sim.settle()
    assert layouts(sim) == [True]
    assert short in sim.finished
    assert sim.failed[growing] is FailureReason.DOES_NOT_FIT


def test_ended_sequences_are_saved_before_the_layout_changes() -> None:
    sim = simulation()
    sim.complete(prompt(60), 5, ignore_eos=True)
    sim.actions.clear()
    sim.complete(prompt(200, 5), 20, ignore_eos=True)
    kinds = [type(action) for action in sim.sent(Save, SetLayout)]
    assert kinds[:2] == [Save, SetLayout]
    sim.actions.clear()
    sim.complete((*prompt(60), 7, 8), 5, ignore_eos=True)
    assert sim.sent(Load)
    sim.check_at_rest()


def test_a_request_that_fits_no_layout_is_refused() -> None:
    sim = simulation()
    request_id = sim.submit(prompt(300), 200, ignore_eos=True)
    assert request_id in sim.failed


def test_only_one_shard_changes_for_a_long_request() -> None:
    sim = simulation()
    sim.join("b", LIMITS)
    for number in range(2):
        sim.submit(prompt(20, number), 30, ignore_eos=True)
    sim.submit(prompt(300, 9), 5, ignore_eos=True)
    sim.settle()
    changes = [action.shard for action in sim.sent(SetLayout) if action.layout is KvLayout.UNIFIED]
    assert len(changes) == 1


def test_a_fixed_layout_stays() -> None:
    sim = simulation(dataclasses.replace(LIMITS, layout=UNIFIED, other_layout=None))
    sim.submit(prompt(300), 20, ignore_eos=True)
    sim.settle()
    assert layouts(sim) == []
    assert sim.sent(Decode)


def test_sequences_that_need_a_refused_layout_continue_elsewhere() -> None:
    split = LayoutLimits(cells=75, cells_per_sequence=25, layout=KvLayout.SPLIT)
    unified = LayoutLimits(cells=75, cells_per_sequence=75)
    small = ShardLimits(layout=split, other_layout=unified, max_sequences=3, max_batch_tokens=32)
    sim = Simulation(SchedulerConfig())
    sim.join("a", small)
    request_id = sim.submit(tuple(range(10)), 40, ignore_eos=True)
    sim.advance("a")
    sim.join("b", ShardLimits(layout=unified, max_sequences=1, max_batch_tokens=32))
    sim.shards["a"].refuse_next_layout = True
    sim.run()
    assert sim.finished == {request_id}
    sim.check_at_rest()

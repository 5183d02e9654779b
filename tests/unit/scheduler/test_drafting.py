"""How many draft tokens a Decode may carry, and what its steps may take until they are reported."""

from dataclasses import replace
from itertools import pairwise

import pytest

from caravan_proto.messages.commands import Decode
from caravan_proto.messages.limits import KvLayout, LayoutLimits
from caravan_proto.messages.results import DraftSource
from caravan_scheduler.actions import Deliver, Drafted
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.planning.step_plan import draft_plan
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.command import UNSEEN_STEPS
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_testing.ledgers import decode, ledger, run
from caravan_testing.model_outputs import expected_output
from caravan_testing.requests import request
from caravan_testing.simulation import Simulation


def limits(cells: int = 400, *, shares_cells: bool = True, max_draft_tokens: int = 16, batch: int = 128) -> ShardLimits:
    return ShardLimits(
        layout=LayoutLimits(
            cells=cells, cells_per_sequence=cells, layout=(KvLayout.SPLIT, KvLayout.UNIFIED)[shares_cells]
        ),
        max_sequences=4,
        max_batch_tokens=batch,
        max_draft_tokens=max_draft_tokens,
    )


def drafting(request_id: int, most: int, prompt: int = 10) -> Sequence:
    return Sequence(request(request_id, tuple(range(1, prompt + 1)), 100, max_draft_tokens=most))


def planned(shard: ShardLedger, steps: int = 64) -> tuple[int, int]:
    return draft_plan(shard, list(shard.stays.residents.values()), steps)


def send(shard: ShardLedger, steps: int, drafts: int) -> None:
    residents = list(shard.stays.residents.values())
    command = Decode(
        shard=shard.name,
        command_id=9,
        header=shard.header.message,
        sequence_ids=tuple(one.sequence_id for one in residents),
        max_steps=steps,
        max_draft_tokens=drafts,
    )
    shard.send(command, residents)


def test_sequences_get_what_they_want_within_the_limits_of_the_shard() -> None:
    shard = ledger(limits=limits())
    run(shard, drafting(1, 0))
    assert planned(shard) == (64, 0)
    run(shard, drafting(2, 6))
    assert planned(shard) == (64, 6)
    run(shard, drafting(3, 20))
    assert planned(shard) == (64, 16)
    small = ledger(limits=limits(batch=10))
    run(small, drafting(1, 20))
    assert planned(small) == (64, 9)
    recurrent = ledger(limits=limits(max_draft_tokens=0))
    run(recurrent, drafting(1, 8))
    assert planned(recurrent) == (64, 0)


def test_there_are_no_drafts_in_a_layout_whose_sequences_cannot_be_cut_back() -> None:
    either = limits()
    shard = ledger(limits=replace(either, layout=replace(either.layout, whole_only=True)))
    run(shard, drafting(1, 8))
    assert planned(shard) == (64, 0)


def test_drafts_need_cells_that_are_free_beyond_the_growth_of_all() -> None:
    shard = ledger(limits=limits(cells=10 + 8 + UNSEEN_STEPS + 3))
    run(shard, drafting(1, 8))
    assert planned(shard) == (UNSEEN_STEPS + 3, 8)
    shard = ledger(limits=limits(cells=10 + 8 + UNSEEN_STEPS))
    run(shard, drafting(1, 8))
    assert planned(shard, 12) == (12, 0)


def test_parked_cells_are_not_free_for_drafts() -> None:
    shard = ledger(limits=limits(cells=60))
    parked = run(shard, drafting(1, 8, prompt=30))
    shard.finish(parked)
    run(shard, Sequence(request(2, tuple(range(100, 120)), 100, max_draft_tokens=8)))
    assert planned(shard, 10) == (10, 0)
    shard.evict_all()
    assert planned(shard, 10) == (10, 8)


def test_cells_of_its_own_are_enough_for_the_drafts_of_each_sequence() -> None:
    shard = ledger(limits=limits(cells=100, shares_cells=False))
    run(shard, drafting(1, 8, prompt=90))
    assert planned(shard, 10) == (10, 8)


def test_what_a_decode_may_take_is_promised_until_it_is_reported() -> None:
    shard = ledger(limits=limits())
    resident = run(shard, drafting(1, 8))
    free = shard.cells.free
    send(shard, steps=20, drafts=8)
    assert free - shard.cells.free == 20, "no more than one token for each of its steps"
    (command,) = shard.commands.in_flight
    for tokens in (9, 1, 4):
        shard.apply_step(command, 0.01, tokens=tokens, drafted=8)
        decode(shard, resident, tokens)
        assert free - shard.cells.free == 20
    assert command.coming_cells == 6
    shard.commands.end(command)
    assert free - shard.cells.free == 14
    send(shard, steps=64, drafts=8)
    assert shard.commands.in_flight[0].coming_cells == UNSEEN_STEPS * 9
    assert shard.commands.positions_under_way == {resident.sequence_id: range(24, 24 + UNSEEN_STEPS * 9)}


def test_the_cost_of_a_step_with_drafts_counts_for_its_tokens() -> None:
    shard = ledger(limits=limits())
    run(shard, drafting(1, 8))
    send(shard, steps=20, drafts=8)
    for _ in range(20):
        shard.apply_step(shard.commands.in_flight[0], 0.09, tokens=1, drafted=8)
    assert shard.costs.decode_s(9) == pytest.approx(0.09, rel=0.1)
    assert shard.costs.decode_s(1) < 0.08


def test_drafts_change_no_output_and_save_steps() -> None:
    def steps_of(most: int) -> int:
        simulation = Simulation(SchedulerConfig())
        simulation.join("a", limits(cells=1000))
        for number in range(4):
            simulation.submit((1, 2, number), 60, ignore_eos=True, max_draft_tokens=most)
        before = simulation.now
        simulation.run()
        simulation.check_at_rest()
        assert len(simulation.finished) == 4
        return round((simulation.now - before) / 0.01)

    assert steps_of(8) < 0.6 * steps_of(0)


def test_requests_hear_of_their_drafts_before_the_last_token() -> None:
    simulation = Simulation(SchedulerConfig())
    simulation.join("a", limits())
    request_id = simulation.submit((1, 2, 3), 20, ignore_eos=True, max_draft_tokens=4)
    simulation.run()
    kinds = [type(action) for action in simulation.actions if isinstance(action, Drafted | Deliver)]
    assert Drafted in kinds
    assert all(after is Deliver for before, after in pairwise(kinds) if before is Drafted)
    counts = simulation.drafts[request_id]
    assert all(count.source is DraftSource.CONTEXT for count in counts)
    steps = sum(isinstance(action, Deliver) for action in simulation.actions) - 1
    assert sum(count.accepted for count in counts) + steps == 19
    assert simulation.received[request_id] == expected_output(simulation.requests[request_id].spec)


def test_drafts_preempt_nobody() -> None:
    def preemptions(most: int) -> int:
        simulation = Simulation(SchedulerConfig())
        simulation.join("a", limits(cells=100))
        for number in range(4):
            simulation.submit((1, 2, number), 20, ignore_eos=True, max_draft_tokens=most)
        simulation.run()
        simulation.check_at_rest()
        return sum(type(action).__name__ == "Preempt" for action in simulation.actions)

    assert preemptions(8) == preemptions(0) == 0

"""What the next command of a shard carries, drafts among it."""

import dataclasses
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from caravan_proto.messages.commands import Decode, FilterBatch, Load, Prefill, PrefixCopy
from caravan_proto.messages.limits import KvLayout, LayoutLimits
from caravan_proto.messages.results import DraftSource
from caravan_scheduler.actions import Deliver, Drafted, Start
from caravan_scheduler.config import JoinReason, PrefillMode, SchedulerConfig
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.step_plan import PlanInput, StepPlan, draft_plan, parameters_of
from caravan_scheduler.prefix_tree import NO_MATCH
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.command import UNSEEN_STEPS
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import find_match, saved_prefix, shared_by_load
from caravan_scheduler.shard.saved_runs import NO_PREFIX
from caravan_testing.ledgers import (
    SAVING,
    decode,
    ledger,
    limits_of,
    loaded,
    run,
    send_decode,
    sequence,
    succeed,
    swap_out,
)
from caravan_testing.model_outputs import expected_output
from caravan_testing.requests import request
from caravan_testing.simulation import Simulation

PAUSE = SchedulerConfig(mode=PrefillMode.PAUSE)


def plan(
    shard: ShardLedger, *, waiting: int = 1, adapter: str | None = "", config: SchedulerConfig | None = None
) -> StepPlan:
    given = PlanInput(
        config=config or SchedulerConfig(),
        lengths=OutputLengths(),
        now=0.0,
        waiting=waiting,
        urgent=waiting,
        bulk_step_s=0.02,
        is_fleet_idle=False,
        adapter=adapter,
    )
    return StepPlan(shard, given)


def chunks(command: object) -> list[tuple[int, int, bool]]:
    """Sequence id, number of tokens, and whether it is the last, of each chunk."""
    assert isinstance(command, Prefill)
    return [(chunk.sequence_id, len(chunk.token_ids), chunk.last) for chunk in command.chunks]


def test_an_empty_shard_with_nothing_to_do_gets_no_command() -> None:
    assert plan(ledger(), waiting=0, adapter=None).send(1) is None


def test_prompts_are_computed_in_chunks_within_the_budget() -> None:
    shard = ledger()
    first = plan(shard)
    first.admit(sequence(1, range(200)), NO_MATCH)
    assert not first.is_open, "the budget is used up"
    command = first.send(1)
    assert chunks(command) == [(0, 128, False)]
    succeed(shard, shard.commands.in_flight[-1])
    assert chunks(plan(shard).send(2)) == [(0, 72, True)]


def test_prompts_that_have_started_come_first_and_decodes_ride() -> None:
    shard = ledger()
    run(shard, sequence(1))
    halfway = plan(shard)
    halfway.admit(sequence(2, range(100, 160)), NO_MATCH)
    ((_, computed, _),) = chunks(halfway.send(1))
    succeed(shard, shard.commands.in_flight[-1], seconds=1e-3)
    both = plan(shard)
    both.admit(sequence(3, range(200, 210)), NO_MATCH)
    assert both.join_reason is JoinReason.CHUNKING
    command = both.send(2)
    assert chunks(command) == [(1, 60 - computed, True), (2, 10, True)]
    assert isinstance(command, Prefill)
    assert command.ride == (0,)


def test_a_first_chunk_carries_the_spec_and_the_copy_and_later_ones_do_not() -> None:
    shard = ledger(limits=limits_of(max_batch_tokens=40))
    run(shard, sequence(1, range(10)))
    new = sequence(2, range(70))
    first = plan(shard)
    first.admit(new, find_match(shard, new))
    command = first.send(1)
    assert isinstance(command, Prefill)
    (chunk,) = command.chunks
    assert (chunk.setup, chunk.copy, chunk.start) == (parameters_of(new), PrefixCopy(0, 10), 10)
    computed = 10 + len(chunk.token_ids)
    succeed(shard, shard.commands.in_flight[-1])
    command = plan(shard).send(2)
    assert isinstance(command, Prefill)
    (chunk,) = command.chunks
    assert (chunk.setup, chunk.copy, chunk.start) == (None, None, computed)


def test_prompt_logprobs_have_a_budget_of_their_own() -> None:
    shard = ledger(limits=limits_of(max_prompt_logprob_tokens=30))
    step = plan(shard)
    step.admit(sequence(1, range(20), prompt_logprobs=True), NO_MATCH)
    second = sequence(2, range(20), prompt_logprobs=True)
    assert step.can_admit(second, NO_MATCH)
    step.admit(second, NO_MATCH)
    assert not step.can_admit(sequence(3, prompt_logprobs=True), NO_MATCH)
    assert step.can_admit(sequence(4), NO_MATCH)
    command = step.send(1)
    assert chunks(command) == [(0, 20, True), (1, 10, False)]
    assert isinstance(command, Prefill)
    assert all(chunk.setup is not None and chunk.setup.prompt_logprobs for chunk in command.chunks)


def test_a_step_has_one_adapter() -> None:
    shard = ledger()
    run(shard, sequence(1, adapter="x"))
    step = plan(shard, adapter="x")
    assert step.adapter == "x"
    assert step.can_admit(sequence(2, adapter="x"), NO_MATCH)
    assert not step.can_admit(sequence(3), NO_MATCH)


def test_a_plan_is_idle_if_all_residents_have_other_adapters() -> None:
    shard = ledger()
    run(shard, sequence(1, adapter="x"))
    while not shard.commands.turn.is_over:
        shard.commands.turn.count_step()
    assert plan(shard, adapter="y").is_idle
    assert not plan(shard, adapter=None).is_idle


def test_adapters_that_take_turns_decode_for_one_turn_at_most() -> None:
    shard = ledger()
    run(shard, sequence(1, adapter="x"))
    run(shard, sequence(2, adapter="y"))
    command = plan(shard, waiting=0, adapter=None).send(1)
    assert isinstance(command, Decode)
    assert command.sequence_ids == (1,)
    assert command.max_steps < SchedulerConfig().run_ahead_steps


@pytest.mark.parametrize(
    ("step_s", "within_s", "steps"),
    [(0.05, 1.0, 64), (0.002, 0.2, 100), (0.002, 0.1, 64), (1e-6, 1.0, 4096)],
)
def test_a_decode_has_more_steps_where_they_take_little_time(step_s: float, within_s: float, steps: int) -> None:
    shard = ledger(limits=limits_of(cells=10_000, cells_per_sequence=10_000))
    run(shard, sequence(1, max_new_tokens=9_000))
    shard.costs.observe_decodes(1, step_s)
    command = plan(shard, waiting=0, config=SchedulerConfig(run_ahead_s=within_s)).send(1)
    assert isinstance(command, Decode)
    assert command.max_steps == steps


def test_a_decode_has_no_more_steps_than_cells_are_free() -> None:
    shard = ledger(limits=limits_of(cells=200))
    run(shard, sequence(1))
    shard.costs.observe_decodes(1, 0.001)
    free = shard.cells.free
    command = plan(shard, waiting=0).send(1)
    assert isinstance(command, Decode)
    assert 64 < command.max_steps <= free


def test_in_pause_mode_decodes_wait_for_prompts() -> None:
    shard = ledger(config=PAUSE)
    run(shard, sequence(1))
    step = plan(shard, config=PAUSE)
    step.admit(sequence(2, range(20, 40)), NO_MATCH)
    command = step.send(1)
    assert isinstance(command, Prefill)
    assert command.ride == ()


def test_in_pause_mode_nothing_joins_before_it_may() -> None:
    shard = ledger(config=PAUSE)
    run(shard, sequence(1))
    patient = dataclasses.replace(PAUSE, waiting_served_ratio=2.0, max_waiting_tokens=10)
    assert not plan(shard, config=patient).is_open
    assert plan(shard, waiting=2, config=patient).is_open
    shard.commands.steps_since_prefill = 10
    assert plan(shard, config=patient).is_open


def test_nobody_is_admitted_without_cells_for_the_expected_output() -> None:
    shard = ledger()
    run(shard, sequence(1, range(10), max_new_tokens=300))
    step = plan(shard)
    assert step.can_admit(sequence(2, range(20, 30), max_new_tokens=20), NO_MATCH)
    assert not step.can_admit(sequence(3, range(20, 30), max_new_tokens=300), NO_MATCH)


def test_a_decode_runs_ahead_as_far_as_cells_are_free() -> None:
    shard = ledger()
    run(shard, sequence(1, range(370)))
    command = plan(shard, waiting=0, adapter=None).send(1)
    assert isinstance(command, Decode)
    assert command.max_steps == 30


def test_parked_sequences_make_room_for_a_decode() -> None:
    shard = ledger()
    shard.finish(run(shard, sequence(1, range(200))))
    run(shard, sequence(2, range(200, 390)))
    command = plan(shard, waiting=0, adapter=None).send(1)
    assert isinstance(command, Decode)
    assert command.header.park == ((0, 136),)
    assert command.max_steps == 64


def test_a_running_decode_is_left_alone_if_nothing_is_to_change() -> None:
    shard = ledger()
    resident = run(shard, sequence(1))
    send_decode(shard, resident)
    assert plan(shard, waiting=0, adapter=None).send(1) is None


def test_a_cancelled_sequence_is_released_though_nothing_else_is_to_do() -> None:
    shard = ledger()
    kept, gone = run(shard, sequence(1)), run(shard, sequence(2, range(20, 30)))
    shard.finish(kept)
    shard.take_back(gone)
    command = plan(shard, waiting=0, adapter=None).send(1)
    assert isinstance(command, FilterBatch)
    assert (command.header.release, command.keep) == ((1,), (0,))


def test_a_saved_sequence_comes_back_ahead_of_the_step_and_without_newcomers() -> None:
    shard = ledger(limits=limits_of(**SAVING))
    back = sequence(1, range(10))
    swap_out(shard, run(shard, back))
    step = plan(shard)
    assert step.can_load(back, NO_MATCH)
    step.load(back, NO_MATCH, shard.runs.find(back.keys, 10))
    assert not step.can_admit(sequence(2, range(20, 30)), NO_MATCH)
    command = step.send(1)
    assert isinstance(command, Load)
    (entry,) = command.entries
    assert (entry.sequence_id, entry.token_ids) == (0, tuple(range(10)))
    assert [(piece.start, piece.end) for piece in entry.slices] == [(0, 10)]


def test_a_saved_sequence_comes_back_behind_cells_of_another() -> None:
    shard = ledger(limits=limits_of(**SAVING))
    back = sequence(1, range(70))
    swap_out(shard, run(shard, back))
    run(shard, sequence(2, [*range(40), 99, 98]))
    step, match = plan(shard), shared_by_load(shard, back, find_match(shard, back), NO_PREFIX)
    assert step.can_load(back, match)
    step.load(back, match, saved_prefix(shard, back, match))
    command = step.send(1)
    assert isinstance(command, Load)
    (entry,) = command.entries
    assert (entry.sequence_id, entry.token_ids) == (1, tuple(range(40, 70)))
    assert entry.copy == PrefixCopy(0, 40)
    assert [(piece.start, piece.end) for piece in entry.slices] == [(40, 70)]


def test_the_first_chunk_of_a_loaded_sequence_takes_over_what_was_loaded() -> None:
    shard = ledger(limits=limits_of(**SAVING))
    back = sequence(1, range(10))
    swap_out(shard, run(shard, back))
    step = plan(shard)
    step.load(back, NO_MATCH, shard.runs.find(back.keys, 10))
    step.send(1)
    command = shard.commands.in_flight[-1]
    assert shard.apply_load(command, loaded(True)) == []
    shard.commands.end(command)
    prefill = plan(shard).send(2)
    assert isinstance(prefill, Prefill)
    (chunk,) = prefill.chunks
    assert (chunk.start, chunk.token_ids, chunk.copy) == (10, (50,), PrefixCopy(0, 10))
    assert chunk.setup == parameters_of(back)


def test_a_saved_sequence_waits_for_the_next_command_if_a_newcomer_is_in_this_one() -> None:
    shard = ledger(limits=limits_of(**SAVING))
    back = sequence(1, range(10))
    swap_out(shard, run(shard, back))
    step = plan(shard)
    step.admit(sequence(2, range(20, 30)), NO_MATCH)
    assert not step.can_load(back, NO_MATCH)


@pytest.mark.parametrize("max_batch_tokens", [16, 23, 128])
def test_no_prompt_has_a_chunk_of_one_token_and_every_request_that_starts_has_a_chunk(max_batch_tokens: int) -> None:
    limits = limits_of(cells=4000, cells_per_sequence=4000, max_sequences=8, max_batch_tokens=max_batch_tokens)
    sim = Simulation(SchedulerConfig(prefix_caching=False))
    sim.join("a", limits)
    source = random.Random(max_batch_tokens)
    lengths = [source.choice([2, 3, 4, 15, 16, 17, 18, source.randrange(2, 120)]) for _ in range(60)]
    for length in lengths:
        sim.submit(tuple(source.randrange(200) for _ in range(length)), source.randrange(1, 6), ignore_eos=True)
    sim.run()
    started = 0
    for action in sim.actions:
        if isinstance(action, Start):
            started += 1
        if isinstance(action, Prefill):
            assert sum(chunk.setup is not None for chunk in action.chunks) == started
            assert all(len(chunk.token_ids) > 1 for chunk in action.chunks), action
            started = 0
    assert started == 0
    assert len(sim.finished) == len(lengths)


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
        simulation.settle()
        assert len(simulation.finished) == 4
        return round((simulation.now - before) / 0.01)

    assert steps_of(8) < 0.6 * steps_of(0)


def test_requests_hear_of_their_drafts_before_the_last_token() -> None:
    simulation = Simulation(SchedulerConfig())
    simulation.join("a", limits())
    request_id = simulation.complete((1, 2, 3), 20, ignore_eos=True, max_draft_tokens=4)
    kinds = [type(action) for action in simulation.sent(Drafted, Deliver)]
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
        simulation.settle()
        return sum(type(action).__name__ == "Preempt" for action in simulation.actions)

    assert preemptions(8) == preemptions(0) == 0

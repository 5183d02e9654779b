"""What the ledger of a shard knows after each operation."""

import dataclasses
import random
from collections.abc import Iterable

import pytest

from caravan_proto.messages.commands import FilterBatch, Header
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.results import LayoutSet
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.tokens import GeneratedToken, PromptToken
from caravan_scheduler.planning.planner import to_save
from caravan_scheduler.prefix_tree import NO_MATCH, Match
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.command import InFlight
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import find_match, has_id_for, saved_prefix
from caravan_scheduler.shard.resident import TRANSITIONS, Resident, Status
from caravan_testing.ledgers import (
    LIMITS,
    SAVING,
    cells_of,
    decode,
    ledger,
    limits_of,
    run,
    send_decode,
    send_prefill,
    sequence,
    start,
    succeed,
    swap_out,
)
from caravan_testing.simulation import Simulation, simulation

SAVES = limits_of(**SAVING)
SPLIT = limits_of(layout=KvLayout.SPLIT, cells=1600)


SAVING_SPLIT = limits_of(cells=1600, layout=KvLayout.SPLIT, **SAVING)


def test_a_placed_sequence_has_the_lowest_id_and_the_promise_of_its_cells() -> None:
    shard = ledger()
    resident = start(shard, sequence(1, range(10)))
    assert (resident.sequence_id, resident.status) == (0, Status.STARTING)
    assert cells_of(shard) == (0, 0, 390)


def test_computed_prompts_and_decoded_tokens_are_in_cells() -> None:
    shard = ledger()
    resident = run(shard, sequence(1, range(10)))
    assert resident.status is Status.RUNNING
    assert cells_of(shard) == (10, 10, 390)
    decode(shard, resident)
    assert cells_of(shard) == (11, 11, 389)


def test_a_token_is_taken_for_a_live_resident_and_what_it_followed_is_in_a_cell_if_it_was_decoded() -> None:
    shard = ledger()
    decoding, cancelled = run(shard, sequence(1, range(10))), run(shard, sequence(2, range(50, 60)))
    shard.cancel(cancelled)
    prefilled = start(shard, sequence(3, range(90, 100)))
    command = InFlight(shard.commands.in_flight[-1].command, [decoding, cancelled, prefilled])
    shard.apply_step(command, 0.1)
    tokens = [GeneratedToken(key, b"x", False, None, (), None) for key in (7, 8, 9)]
    taken = shard.take_tokens(command, list(zip(command.residents, tokens, strict=True)))
    assert taken == [(decoding.sequence, tokens[0]), (prefilled.sequence, tokens[2])]
    assert [decoding.computed, cancelled.computed, prefilled.computed] == [11, 10, 10]


def test_a_resident_is_incomplete_until_its_prompt_is_computed_or_its_stay_ends() -> None:
    shard = ledger()
    first, second = start(shard, sequence(1, range(10))), start(shard, sequence(2, range(50, 60)))
    assert shard.stays.prefilling == [first, second]
    assert shard.stays.decoding == []
    shard.apply_step(shard.commands.in_flight[0], 0.1)
    assert shard.stays.prefilling == [second]
    assert shard.stays.decoding == [first]
    shard.cancel(second)
    assert shard.stays.prefilling == []
    assert shard.stays.decoding == [first]


def test_a_decode_under_way_is_promised_the_cells_of_a_few_steps() -> None:
    shard = ledger()
    first, second = run(shard, sequence(1)), run(shard, sequence(2, range(20, 30)))
    command = send_decode(shard, first, second, max_steps=64)
    assert shard.cells.promised == 2 * 4
    command.steps_left = 1
    assert shard.cells.promised == 2


def test_a_finished_sequence_is_parked_with_its_output() -> None:
    shard = ledger()
    resident = run(shard, sequence(1, range(10)), output=5)
    shard.finish(resident)
    assert resident.status is Status.PARKED
    assert cells_of(shard) == (0, 15, 385)
    assert shard.cells.available == 400
    assert shard.header.message == Header(), "the shard knows that it finished"


def test_without_prefix_caching_a_finished_sequence_is_released() -> None:
    shard = ledger(config=SchedulerConfig(prefix_caching=False))
    resident = run(shard, sequence(1))
    shard.finish(resident)
    assert (resident.status, shard.header.message) == (Status.RELEASING, Header(release=(0,)))
    shard.send(FilterBatch(shard="a", command_id=9, header=shard.header.message, keep=()), [])
    assert not resident.is_live
    assert sorted(shard.stays.free_ids) == [0, 1, 2, 3]


def test_a_cancelled_sequence_that_decodes_is_parked_at_its_known_length() -> None:
    shard = ledger()
    resident = run(shard, sequence(1, range(10)), output=2)
    shard.cancel(resident)
    assert resident.status is Status.PARKED
    assert shard.header.message == Header(park=((0, 12),))
    assert shard.header.is_urgent


def test_a_cancelled_sequence_whose_length_is_not_known_is_released() -> None:
    shard = ledger(limits=limits_of(whole_only=True))
    resident = run(shard, sequence(1))
    shard.cancel(resident)
    assert shard.header.message == Header(release=(0,))


def test_a_sequence_cancelled_while_it_starts_is_released_if_it_started() -> None:
    shard = ledger()
    resident = start(shard, sequence(1))
    shard.cancel(resident)
    assert resident.status is Status.RELEASING
    succeed(shard, shard.commands.in_flight[-1])
    assert shard.header.message == Header(release=(0,))


def test_a_sequence_cancelled_while_it_starts_is_not_released_if_it_never_started() -> None:
    shard = ledger()
    resident = start(shard, sequence(1))
    shard.cancel(resident)
    assert shard.fail_step(shard.commands.in_flight[-1]) == []
    assert resident.status is Status.GONE
    assert not shard.header.is_needed


def test_a_failed_step_ends_stays_that_had_not_begun_and_no_others() -> None:
    shard = ledger()
    running, new = run(shard, sequence(1)), sequence(2, range(20, 30))
    starting = shard.place(new, NO_MATCH, 0)
    command = send_prefill(shard, starting, running)
    assert shard.fail_step(command) == [starting]
    assert (running.status, starting.status) == (Status.RUNNING, Status.GONE)
    assert cells_of(shard) == (10, 10, 390)


def test_a_sequence_starts_from_the_prefix_that_another_holds() -> None:
    shard = ledger()
    run(shard, sequence(1, range(10)))
    longer = sequence(2, range(15))
    assert find_match(shard, longer) == Match(10, 10, (0,))
    resident = start(shard, longer)
    assert (resident.source_id, resident.shared, resident.computed) == (0, 10, 10)
    assert shard.cells.promised == 5


def scored(request_id: int, prompt: Iterable[int], known: int = 0) -> Sequence:
    """Return a sequence that needs prompt logprobs, of which the first ``known`` are there."""
    made = sequence(request_id, prompt, prompt_logprobs=True)
    made.add_prompt_logprobs(0, [PromptToken(-float(place) if place else None, ()) for place in range(known)])
    return made


def test_a_prompt_whose_logprobs_are_wanted_starts_from_a_prefix_whose_logprobs_are_known() -> None:
    shard = ledger()
    run(shard, sequence(1, range(10)))
    assert find_match(shard, scored(2, range(15))) == NO_MATCH
    assert find_match(shard, scored(3, range(15), known=1)) == NO_MATCH
    # The logprob of the first token that is computed must be known.
    assert find_match(shard, scored(4, range(15), known=4)).length == 3
    resident = start(shard, scored(5, range(15), known=14))
    assert (resident.shared, resident.source_id) == (10, 0)
    assert resident.sequence.needs_prompt_logprobs


def test_whole_sequences_cannot_be_cut_to_the_logprobs_that_are_known() -> None:
    shard = ledger(limits=limits_of(whole_only=True))
    shard.finish(run(shard, sequence(1, range(10))))
    assert find_match(shard, scored(2, range(15), known=10)) == NO_MATCH
    assert find_match(shard, scored(3, range(15), known=11)).length == 10


def test_what_is_saved_serves_as_far_as_its_logprobs_are_known() -> None:
    shard = ledger(limits=SAVES)
    swap_out(shard, run(shard, sequence(1, range(64))))
    assert saved_prefix(shard, scored(2, range(80)), NO_MATCH).length == 0
    assert saved_prefix(shard, scored(3, range(80), known=41), NO_MATCH).length <= 40
    assert saved_prefix(shard, scored(4, range(80), known=65), NO_MATCH).length == 64


def test_a_sequence_that_is_starting_cannot_be_copied_yet() -> None:
    shard = ledger()
    start(shard, sequence(1, range(10)))
    assert find_match(shard, sequence(2, range(15))) == NO_MATCH


def test_a_parked_sequence_is_taken_over_where_nothing_of_it_is_lost() -> None:
    shard = ledger()
    parked = run(shard, sequence(1, range(10)))
    shard.finish(parked)
    resident = start(shard, sequence(2, range(15)))
    assert resident.takes_over
    assert (parked.status, resident.sequence_id) == (Status.GONE, 0)
    assert not shard.stays.parked


def test_a_parked_sequence_is_copied_where_taking_it_over_would_lose_tokens() -> None:
    shard = ledger()
    shard.finish(run(shard, sequence(1, range(10)), output=5))
    resident = start(shard, sequence(2, range(8)))
    assert (resident.sequence_id, resident.source_id) == (1, 0)
    assert list(shard.stays.parked) == [0]


def test_a_failed_step_releases_the_id_that_was_taken_over() -> None:
    shard = ledger()
    shard.finish(run(shard, sequence(1, range(10))))
    resident = start(shard, sequence(2, range(15)))
    assert shard.fail_step(shard.commands.in_flight[-1]) == [resident]
    assert shard.header.message == Header(release=(0,)), "the shard still holds the parked sequence"


def test_a_short_prefix_is_not_copied_where_copying_moves_all_cells() -> None:
    shard = ledger(limits=SPLIT)
    run(shard, sequence(1, range(10)))
    assert start(shard, sequence(2, range(12))).shared == 0


def test_parked_sequences_are_evicted_least_recently_used_first() -> None:
    shard = ledger()
    for number in range(3):
        shard.finish(run(shard, sequence(number, range(100 * number, 100 * number + 100))))
    start(shard, sequence(9, [*range(50), 999]))  # copies from the first
    succeed(shard, shard.commands.in_flight[-1])
    shard.make_free(250)
    assert list(shard.stays.parked) == [2, 0]
    assert shard.header.message.release == (1,)
    # The last one gives up no more than is needed, and no less than 64.
    assert shard.header.message.park == ((2, 36),)
    assert shard.stays.parked[2].computed == 36


def test_a_sequence_that_cannot_be_cut_back_is_evicted() -> None:
    shard = ledger(limits=limits_of(whole_only=True))
    shard.finish(run(shard, sequence(1, range(200))))
    shard.make_free(250)
    assert not shard.stays.parked


def test_what_the_next_command_copies_is_not_evicted_before_it_is_sent() -> None:
    shard = ledger()
    shard.finish(run(shard, sequence(1, range(100)), output=10))
    resident = shard.place(sequence(2, range(50)), Match(49, 0, (0,)), 0)
    shard.make_free(400)
    assert list(shard.stays.parked) == [0]
    send_prefill(shard, resident)
    shard.make_free(400)
    assert not shard.stays.parked


def test_an_id_is_available_unless_it_holds_what_is_to_be_copied() -> None:
    shard = ledger(limits=limits_of(max_sequences=1))
    shard.finish(run(shard, sequence(1)))
    assert has_id_for(shard, NO_MATCH)
    assert not has_id_for(shard, Match(5, 0, (0,)))
    shard.drain.begin(0.0)
    assert not has_id_for(shard, NO_MATCH)


def test_with_cells_of_their_own_sequences_share_nothing() -> None:
    shard = ledger(limits=SPLIT)
    prompt = range(100)
    run(shard, sequence(1, prompt))
    start(shard, sequence(2, prompt))
    succeed(shard, shard.commands.in_flight[-1])
    assert cells_of(shard) == (200, 200, 1400)
    assert shard.capacity.is_bounded_by_sequence


def test_cells_and_residents_are_limited_by_the_configuration() -> None:
    shard = ledger(config=SchedulerConfig(max_batch_total_tokens=50, max_batch_size=1))
    assert shard.capacity.cells == 50
    assert not shard.capacity.could_ever_hold(sequence(1, range(40), max_new_tokens=12))
    run(shard, sequence(2))
    assert shard.stays.free_sequences == 0


def test_a_prefill_completes_the_prompts_that_it_computes_to_their_end() -> None:
    shard = ledger()
    assert not shard.commands.completes_prefill
    first = start(shard, sequence(1, range(10)))
    assert shard.commands.completes_prefill
    command = shard.commands.in_flight[-1]
    shard.apply_step(command, 0.1)
    assert shard.commands.completes_prefill, "until the command has ended"
    shard.commands.end(command)
    send_decode(shard, first)
    assert not shard.commands.completes_prefill


def test_what_a_running_sequence_has_generated_is_found_by_a_request_that_begins_with_it() -> None:
    shard = ledger()
    running = run(shard, sequence(1, range(10)), output=5)
    known = [*range(10), *running.sequence.output]
    assert find_match(shard, sequence(2, [*known, 7, 8, 9])) == Match(15, 15, (0,)), "its last token is not computed"
    assert cells_of(shard) == (15, 15, 385)
    decode(shard, running)
    running.sequence.output.append(51)
    forked = start(shard, sequence(3, [*known, 51, 7, 8, 9]))
    assert (forked.source_id, forked.cached) == (0, 16)
    assert cells_of(shard) == (16, 16, 384 - 4)
    succeed(shard, shard.commands.in_flight[-1])
    shard.finish(running)
    assert cells_of(shard) == (20, 20, 380), "the fork has it all"
    shard.finish(forked)
    assert shard.cells.held == 20


def test_outputs_are_entered_only_for_a_request_that_may_begin_with_them() -> None:
    shard = ledger()
    run(shard, sequence(1, range(10)), output=5)
    version = shard.cells.tree.version
    assert find_match(shard, sequence(2, range(10))).length == 8
    assert find_match(shard, sequence(3, [*range(9), 77, 78, 79])).length == 9
    assert shard.cells.tree.version == version


def test_no_output_is_found_where_memory_can_only_be_copied_whole() -> None:
    shard = ledger(limits=limits_of(whole_only=True))
    running = run(shard, sequence(1, range(10)), output=5)
    assert find_match(shard, sequence(2, [*range(10), *running.sequence.output, 7, 8])) == NO_MATCH


def test_a_change_of_the_layout_gives_every_sequence_cells_of_its_own() -> None:
    split = LayoutLimits(cells=400, cells_per_sequence=100, layout=KvLayout.SPLIT)
    shard = ledger(limits=dataclasses.replace(LIMITS, other_layout=split))
    first = run(shard, sequence(1, range(50)))
    second = run(shard, sequence(2, [*range(50), 60, 61]))
    third = run(shard, sequence(3, range(200, 230)))
    assert shard.cells.live == 82
    lost = shard.apply_layout(LayoutSet(shard="a", command_id=5, layout=split, lost=(third.sequence_id,), seconds=0.2))
    assert (lost, third.status) == ([third], Status.GONE)
    assert (shard.layout, shard.capacity.limits.other_layout) == (split, LIMITS.layout)
    assert (shard.cells.live, first.own_cells, second.own_cells) == (102, 50, 52)


def test_a_full_cache_takes_a_sequence_back_at_once() -> None:
    shard = ledger()
    resident = run(shard, sequence(1))
    shard.take_back(resident)
    assert shard.header.is_urgent
    assert (shard.cells.live, shard.header.message) == (0, Header(release=(0,)))


def test_commands_carry_the_header_of_their_moment() -> None:
    shard = ledger()
    stale = shard.header.message
    shard.take_back(run(shard, sequence(1)))
    with pytest.raises(AssertionError, match="is not Header"):
        shard.send(FilterBatch(shard="a", command_id=1, header=stale, keep=()), [])


def test_only_a_lone_decode_yields_to_the_next_command() -> None:
    shard = ledger()
    assert shard.commands.can_begin
    resident = start(shard, sequence(1))
    assert not shard.commands.can_begin
    succeed(shard, shard.commands.in_flight[-1])
    send_decode(shard, resident)
    assert shard.commands.can_begin
    send_decode(shard, resident)
    assert not shard.commands.can_begin


def test_an_id_may_be_another_sequences_when_late_results_arrive() -> None:
    shard = ledger(limits=limits_of(max_sequences=1))
    old = run(shard, sequence(1))
    late = send_decode(shard, old)
    shard.take_back(old)
    new = shard.place(sequence(2, range(20, 30)), NO_MATCH, 0)
    send_prefill(shard, new)
    assert old.sequence_id == new.sequence_id
    assert late.residents[0] is old
    assert not old.is_live


def test_a_status_is_never_skipped() -> None:
    shard = ledger()
    resident = start(shard, sequence(1))
    with pytest.raises(AssertionError, match="0 from starting to parked"):
        shard.finish(resident)


def test_every_status_but_the_last_leads_on_and_is_reached() -> None:
    assert set(TRANSITIONS) == set(Status)
    assert [status for status in Status if not TRANSITIONS[status]] == [Status.GONE]
    assert {after for targets in TRANSITIONS.values() for after in targets} == set(Status) - {Status.STARTING}


def test_a_resident_owns_the_cells_that_it_did_not_share() -> None:
    resident = Resident(sequence(1, range(10)), 0, None, 0, cached=6, shared=4)
    assert resident.own_cells == 6, "those of its prompt to come are counted"
    resident.computed = 15
    assert resident.own_cells == 11


def runs_on(shard: ShardLedger, number: int) -> Resident:
    return run(shard, sequence(number, range(100 * number, 100 * number + 40)))


def passes(ids: list[int]) -> int:
    """Return into how many runs of neighbours ``ids`` fall."""
    return sum(one - 1 not in ids for one in ids)


def test_what_is_parked_below_a_running_sequence_is_saved_at_once() -> None:
    shard = ledger(limits=SAVING_SPLIT)
    first, second, third = (runs_on(shard, number) for number in range(3))
    shard.finish(second)
    shard.finish(first)
    assert to_save(shard, 0.0, 0) == [first], "the lowest first"
    shard.finish(third)
    assert to_save(shard, 0.0, 0) == [], "nothing runs"


def test_a_long_sequence_is_not_saved_for_the_sake_of_neighbours() -> None:
    shard = ledger(limits=SAVING_SPLIT)
    long, _ = (runs_on(shard, number) for number in range(2))
    shard.finish(long)
    shard.costs.copy_cell_s = 0.01
    assert to_save(shard, 0.0, 0) == []


def test_the_id_of_a_sequence_that_is_not_saved_is_not_taken() -> None:
    shard = ledger(limits=SAVING_SPLIT)
    residents = [runs_on(shard, number) for number in range(3)]
    shard.finish(residents[0])
    assert start(shard, sequence(7)).sequence_id == 3, "what is not saved stays"
    shard.save(to_save(shard, 0.0, 0), release=False)
    assert start(shard, sequence(8)).sequence_id == 0


def test_while_nothing_runs_a_free_id_is_taken_first() -> None:
    shard = ledger(limits=SAVING_SPLIT)
    shard.finish(runs_on(shard, 0))
    shard.save(to_save(shard, 10.0, 0), release=False)
    assert start(shard, sequence(7)).sequence_id == 1


def test_beside_others_an_id_next_to_theirs_is_taken() -> None:
    shard = ledger(limits=SAVING_SPLIT)
    residents = [runs_on(shard, number) for number in range(2)]
    for one in residents:
        shard.finish(one)
        shard.save(to_save(shard, 10.0, 0), release=False)
    assert start(shard, sequence(7)).sequence_id == 2, "free"
    assert start(shard, sequence(8)).sequence_id == 3, "free, and beside it"
    assert start(shard, sequence(9)).sequence_id == 1, "saved, and beside it"


def many_ids(saving: Saving) -> Simulation:
    limits = limits_of(cells=16 * 400, max_sequences=16, memory_bytes=1 << 20, layout=KvLayout.SPLIT, saving=saving)
    return simulation("a", limits=limits)


@pytest.mark.parametrize("requests", [2, 4, 7])
def test_requests_that_come_at_once_have_neighbouring_ids(requests: int) -> None:
    sim = many_ids(Saving.ANY)
    draw = random.Random(3)
    for _ in range(20):
        for _ in range(requests):
            sim.submit(tuple(draw.randrange(1, 10_000) for _ in range(40)), 20, ignore_eos=True)
        sim.advance("a", 10)
        assert passes(list(sim.scheduler.shards["a"].stays.residents)) == 1
        sim.run()
        # What has ended is saved, one after another.
        for _ in range(16):
            sim.tick(1.0)
            sim.run()
    sim.check_at_rest()


def mean_passes(saving: Saving) -> float:
    """Return how many passes a step takes on average of four clients of a shard with sixteen ids."""
    sim = many_ids(saving)
    draw = random.Random(3)
    asked, steps, total = 0, 0, 0
    while asked < 160:
        while asked - len(sim.finished) < 4:
            prompt = tuple(draw.randrange(1, 10_000) for _ in range(draw.randrange(20, 60)))
            sim.submit(prompt, draw.randrange(5, 60), ignore_eos=True)
            asked += 1
        sim.advance("a")
        if asked > 40:  # each id has been used
            total += passes(list(sim.scheduler.shards["a"].stays.residents))
            steps += 1
    return total / steps


def test_four_clients_of_sixteen_ids_have_neighbouring_ones() -> None:
    """Where nothing can be saved, what has ended is kept in cells instead, and the ids scatter."""
    assert mean_passes(Saving.ANY) < 1.5 < 2.5 < mean_passes(Saving.NOTHING)

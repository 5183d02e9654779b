"""What the ledger of a shard knows of what is saved, dropped and loaded, and which ended sequences are saved when."""

import pytest

from caravan_proto.messages.commands import Header, Load, LoadEntry, RunNote, Save
from caravan_proto.messages.limits import KvLayout, Saving
from caravan_scheduler.events import SavedRun, ShardLimits
from caravan_scheduler.planning.planner import to_save
from caravan_scheduler.prefix_tree import NO_MATCH, Match
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import find_match, shared_by_load
from caravan_scheduler.shard.resident import Resident, Status
from caravan_scheduler.shard.saved_runs import NO_PREFIX, SavedPrefix
from caravan_testing.ledgers import (
    SAVING,
    cells_of,
    ledger,
    limits_of,
    loaded,
    run,
    saved,
    send_prefill,
    send_save,
    sequence,
    succeed,
    swap_out,
)

SAVES = limits_of(**SAVING)


COMMON = range(32)
LATER = 10.0
SPLIT = limits_of(cells=1600, layout=KvLayout.SPLIT, max_sequences=2, **SAVING)


def test_a_sequence_keeps_its_cells_until_they_are_saved() -> None:
    shard = ledger(limits=SAVES)
    resident = run(shard, sequence(1, range(40)), output=2)
    command = send_save(shard, resident)
    assert isinstance(command.command, Save)
    (entry,) = command.command.entries
    keys = resident.sequence.keys
    assert (entry.start, entry.cuts) == (0, ((16, keys.at(16)), (32, keys.at(32)), (42, keys.at(42))))
    assert (resident.status, shard.cells.live, len(shard.stays.free_ids)) == (Status.LEAVING, 42, 3)
    assert shard.apply_save(command, saved(True)) == [(resident, True)]
    assert (resident.status, shard.cells.live, len(shard.stays.free_ids)) == (Status.GONE, 0, 4)
    assert shard.runs.find(keys, 41).length == 32, "it can be cut"
    assert shard.runs.find(keys, 42).length == 42


def test_a_sequence_that_could_not_be_saved_is_released_all_the_same() -> None:
    shard = ledger(limits=SAVES)
    resident = run(shard, sequence(1))
    command = send_save(shard, resident)
    assert shard.apply_save(command, saved(False)) == [(resident, False)]
    assert (len(shard.runs.keys), resident.status) == (0, Status.GONE)


def test_what_was_saved_of_a_request_that_ended_meanwhile_stays() -> None:
    shard = ledger(limits=SAVES)
    resident = run(shard, sequence(1))
    command = send_save(shard, resident)
    shard.cancel(resident)
    assert resident.status is Status.DROPPED
    assert shard.apply_save(command, saved(True)) == []
    assert len(shard.runs.keys) == 1


def test_a_save_that_a_flush_overtakes_is_dropped() -> None:
    shard = ledger(limits=SAVES)
    resident = run(shard, sequence(1))
    command = send_save(shard, resident)
    shard.flush()
    shard.apply_save(command, saved(True))
    assert (len(shard.runs.keys), shard.header.message) == (0, Header(drop_runs=(resident.sequence.keys.at(10),)))


def test_only_what_is_new_is_saved() -> None:
    shard = ledger(limits=SAVES)
    swap_out(shard, run(shard, sequence(1, range(40))))
    second = run(shard, sequence(2, range(70)))
    command = send_save(shard, second, release=False)
    assert isinstance(command.command, Save)
    (entry,) = command.command.entries
    assert (entry.start, [place for place, _ in entry.cuts]) == (40, [48, 64, 70])
    assert second.is_expendable


def test_of_runs_from_elsewhere_those_behind_make_way_first() -> None:
    shard = ledger(limits=SAVES)
    first = SavedRun(start=0, cuts=((20, b"first"),), size_bytes=1)
    shard.saves.note_runs(
        [first, SavedRun(start=20, cuts=((40, b"second"),), size_bytes=1, note=RunNote(before=b"first"))]
    )
    assert shard.runs.keys == (b"second", b"first")


def test_a_parked_sequence_of_which_nothing_is_new_needs_no_save() -> None:
    shard = ledger(limits=SAVES)
    swap_out(shard, run(shard, sequence(1, range(40))))
    again = run(shard, sequence(2, range(40)))
    shard.finish(again)
    assert shard.save([again], release=False) == []
    assert again.is_expendable


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_saved_sequence_comes_back_or_waits_again(is_loaded: bool) -> None:
    shard = ledger(limits=SAVES)
    back = sequence(1, range(10))
    swap_out(shard, run(shard, back, output=2))
    prefix = shard.runs.find(back.keys, back.known_tokens - 1)
    resident = shard.load(back, NO_MATCH, prefix, 0)
    assert cells_of(shard) == (12, 12, 388 - 1), "one token is left to compute"
    entry = LoadEntry(sequence_id=0, token_ids=back.tokens(0, 12), slices=prefix.slices, adapter="")
    shard.send(Load(shard="a", command_id=4, header=shard.header.message, entries=(entry,)), [resident])
    bad = () if is_loaded else (prefix.slices[0].key,)
    lost = shard.apply_load(shard.commands.in_flight[-1], loaded(is_loaded, bad_runs=bad))
    assert lost == ([] if is_loaded else [resident])
    assert resident.status is (Status.LOADED if is_loaded else Status.GONE)
    assert shard.cells.live == (12 if is_loaded else 0)
    assert len(shard.runs.keys) == (1 if is_loaded else 0), "a run that cannot be loaded is forgotten"


def with_a_longer_prefix_saved(limits: ShardLimits) -> tuple[ShardLedger, Sequence]:
    """Return a shard with a running sequence, and a waiting one that begins alike, of which more is saved."""
    shard = ledger(limits=limits)
    back = sequence(1, [*COMMON, *range(100, 140)])
    swap_out(shard, run(shard, back))
    run(shard, sequence(2, [*COMMON, 99]))
    return shard, back


def load(shard: ShardLedger, back: Sequence) -> Resident:
    match = shared_by_load(shard, back, find_match(shard, back), NO_PREFIX)
    resident = shard.load(back, match, shard.runs.find(back.keys, back.known_tokens, back.most_cached), 0)
    shard.send(Load(shard="a", command_id=4, header=shard.header.message, entries=()), [resident])
    return resident


def test_a_saved_sequence_comes_back_behind_the_cells_that_another_holds() -> None:
    shard, back = with_a_longer_prefix_saved(SAVES)
    resident = load(shard, back)
    assert (resident.shared, resident.cached, resident.computed) == (32, 72, 72)
    assert cells_of(shard) == (33 + 40, 33 + 40, 400 - 33 - 40 - 1)
    assert resident.own_cells == 41, "with the token that is to be computed"
    shard.apply_load(shard.commands.in_flight[-1], loaded(True))
    assert shard.cells.live == 33 + 40
    shard.take_back(resident)
    assert shard.cells.live == 33


def test_what_could_not_be_loaded_leaves_the_cells_of_the_other_sequence() -> None:
    shard, back = with_a_longer_prefix_saved(SAVES)
    resident = load(shard, back)
    assert shard.apply_load(shard.commands.in_flight[-1], loaded(False)) == [resident]
    assert cells_of(shard) == (33, 33, 400 - 33)


def test_what_is_loaded_is_found_by_others_once_its_first_chunk_is_computed() -> None:
    shard, back = with_a_longer_prefix_saved(SAVES)
    resident, third = load(shard, back), sequence(3, [*COMMON, *range(100, 150)])
    shard.apply_load(shard.commands.in_flight[-1], loaded(True))
    shard.commands.end(shard.commands.in_flight[-1])
    assert find_match(shard, third) == Match(32, 32, (0,))
    succeed(shard, send_prefill(shard, resident))
    assert find_match(shard, third) == Match(72, 72, (1,))


def test_cells_that_cannot_be_shared_are_loaded_too() -> None:
    shard = ledger(limits=limits_of(**{**SAVING, "layout": KvLayout.SPLIT, "cells": 1600}))
    assert shared_by_load(shard, sequence(1, range(64)), Match(32, 32, (0,)), NO_PREFIX) == NO_MATCH


def test_what_is_loaded_with_its_state_shares_cells_with_a_sequence_that_goes_on_otherwise() -> None:
    shard = ledger(limits=limits_of(**{**SAVING, "whole_only": True, "saving": Saving.WITH_STATE}))
    run(shard, sequence(1, [*COMMON, 98, 97]))
    longer = sequence(2, range(64))
    match = find_match(shard, longer)
    assert match == NO_MATCH, "the state of the other is not that of a beginning"
    for length, shared in ((40, 32), (20, 19)):
        assert shared_by_load(shard, longer, match, SavedPrefix(length)) == Match(shared, shared, (0,))


def test_the_only_id_is_taken_for_what_is_loaded_though_it_holds_the_prefix() -> None:
    shard = ledger(limits=limits_of(max_sequences=1, **SAVING))
    shard.finish(run(shard, sequence(1, COMMON)))
    longer = sequence(2, range(64))
    assert shared_by_load(shard, longer, find_match(shard, longer), NO_PREFIX) == NO_MATCH


def test_a_parked_sequence_that_has_to_make_room_is_not_shared_by_what_is_loaded() -> None:
    shard = ledger(limits=limits_of(cells=100, cells_per_sequence=100, **SAVING))
    shard.finish(run(shard, sequence(1, [*COMMON, *range(200, 230)])))
    fits, longer = sequence(2, [*COMMON, *range(100, 138)]), sequence(3, [*COMMON, *range(100, 139)])
    assert shared_by_load(shard, fits, find_match(shard, fits), NO_PREFIX) == Match(32, 0, (0,))
    assert shared_by_load(shard, longer, find_match(shard, longer), NO_PREFIX) == NO_MATCH
    # With what a running sequence holds, nothing has to be kept.
    run(shard, sequence(4, [*COMMON, 98, 97]))
    shard.evict_all()
    assert shared_by_load(shard, longer, find_match(shard, longer), NO_PREFIX) == Match(32, 32, (1,))


def ended(shard: ShardLedger, number: int) -> None:
    shard.finish(run(shard, sequence(number, range(100 * number, 100 * number + 40))))


def numbers(shard: ShardLedger, now: float = LATER, waiting: int = 0) -> list[int]:
    return [resident.request_id for resident in to_save(shard, now, waiting)]


def test_where_cells_are_shared_they_are_saved_at_once() -> None:
    shard = ledger(limits=limits_of(**SAVING))
    run(shard, sequence(1))
    ended(shard, 2)
    ended(shard, 3)
    assert numbers(shard, 0.0) == [2, 3]
    assert numbers(shard, waiting=1) == [], "a request that waits may start from them"


def test_where_they_cost_nothing_they_stay_while_there_is_a_free_id() -> None:
    shard = ledger(limits=limits_of(cells=1600, layout=KvLayout.SPLIT, max_sequences=3, **SAVING))
    run(shard, sequence(1))
    ended(shard, 2)
    assert numbers(shard) == []
    ended(shard, 3)
    assert numbers(shard) == [2], "the one whose id the next request takes"


def test_an_idle_shard_saves_one_after_another() -> None:
    shard = ledger(limits=SPLIT)
    ended(shard, 1)
    assert numbers(shard, 0.1) == [], "its client may ask again at once"
    assert numbers(shard) == [1]
    shard.save(to_save(shard, LATER, 0), release=False)
    assert numbers(shard) == []


@pytest.mark.parametrize("limits", [limits_of(), limits_of(memory_bytes=1, saving=Saving.NOTHING)])
def test_nothing_is_saved_where_it_cannot_be(limits: object) -> None:
    shard = ledger(limits=limits)  # type: ignore[arg-type]
    ended(shard, 1)
    assert numbers(shard) == []

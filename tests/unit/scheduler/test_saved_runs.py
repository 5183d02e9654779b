"""Keys of prefixes; what a shard has saved, how a prefix is found in it, what makes way, and what an operator drops."""

from collections.abc import Sequence
from typing import Any

import pytest

from caravan_proto.messages.commands import RunNote, RunSlice, Save
from caravan_scheduler.config import Clock
from caravan_scheduler.events import SavedRun
from caravan_scheduler.prefix_keys import BLOCK_TOKENS, PrefixKeys, cuts_between, state_key
from caravan_scheduler.shard.remembered import prefixes_of, tokens_of
from caravan_scheduler.shard.saved_runs import NO_PREFIX, SavedRuns, Tier
from caravan_testing.ledgers import SAVING, limits_of
from caravan_testing.simulation import Simulation, simulation

TOKENS = list(range(100))
HELLO = tuple(range(1, 41))


def keys(tokens: Sequence[int], namespace: str = "") -> PrefixKeys:
    return PrefixKeys(namespace, lambda start, stop: tokens[start:stop])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 48])
def test_equal_prefixes_have_equal_keys_and_others_have_not(length: int) -> None:
    tokens = list(range(60))
    key = keys(tokens).at(length)
    assert len(key) == 16
    assert keys([*tokens[:length], 99]).at(length) == key, "what follows does not matter"
    assert keys(tokens, "salt").at(length) != key
    for place in (0, length - 1):
        other = [*tokens[:place], 99, *tokens[place + 1 :]]
        assert keys(other).at(length) != key
    assert len({keys(tokens).at(one) for one in range(61)}) == 61


def test_keys_are_the_same_in_every_order_of_questions() -> None:
    tokens = list(range(60))
    asked = keys(tokens)
    backwards = [asked.at(length) for length in range(60, -1, -1)]
    assert backwards[::-1] == [keys(tokens).at(length) for length in range(61)]


def test_keys_never_change_since_files_are_named_by_them() -> None:
    assert keys(list(range(40)), "alice").at(40).hex() == "7e8f6af9fd4b6f18953824700f40f9f3"


@pytest.mark.parametrize(
    ("start", "end", "cuts"), [(0, 10, [10]), (0, 16, [16]), (0, 40, [16, 32, 40]), (40, 64, [48, 64]), (16, 17, [17])]
)
def test_a_run_can_be_cut_at_whole_blocks_and_its_end(start: int, end: int, cuts: list[int]) -> None:
    assert BLOCK_TOKENS == 16
    assert cuts_between(start, end) == cuts


KEYS = keys(TOKENS)


def run(start: int, end: int, of: PrefixKeys = KEYS, *, size: int = 10, on_disk: bool = False) -> SavedRun:
    cuts = tuple((cut, of.at(cut)) for cut in cuts_between(start, end))
    return SavedRun(start=start, cuts=cuts, size_bytes=size, note=RunNote(before=of.at(start)), on_disk=on_disk)


def state(end: int, of: PrefixKeys = KEYS, *, size: int = 7) -> SavedRun:
    """Return the recurrent state at the end of a prefix."""
    note = RunNote(before=of.at(end))
    return SavedRun(start=end, cuts=((end, state_key(of.at(end))),), size_bytes=size, note=note)


def having(*saved: SavedRun, memory: int = 1000, **fields: Any) -> SavedRuns:
    runs = SavedRuns(memory, **{"disk_bytes": 0, "with_state": False, **fields})
    for one in saved:
        runs.add(one)
    return runs


def test_a_prefix_is_found_up_to_the_last_block_or_the_end() -> None:
    runs = having(run(0, 40))
    for most, length in ((100, 40), (40, 40), (39, 32), (20, 16), (15, 0)):
        found = runs.find(KEYS, most)
        assert found.length == length
        assert found.slices == ((RunSlice(KEYS.at(40), 0, length),) if length else ())


def test_a_run_is_cut_where_a_request_wants_to_compute_the_rest() -> None:
    found = having(run(0, 40), run(40, 70)).find(KEYS, 48, 47)
    assert found.slices == (RunSlice(KEYS.at(40), 0, 40), RunSlice(KEYS.at(70), 40, 47))
    assert having(run(0, 40), run(40, 70)).find(KEYS, 48, 40).slices == (RunSlice(KEYS.at(40), 0, 40),)


def test_other_tokens_are_not_found_beyond_what_they_have_in_common() -> None:
    other = keys([*TOKENS[:20], 77, *TOKENS[21:]])
    assert having(run(0, 40)).find(other, 100).length == 16


def test_a_prefix_may_go_through_several_runs() -> None:
    runs = having(run(0, 40), run(40, 70))
    assert runs.find(KEYS, 100).slices == (RunSlice(KEYS.at(40), 0, 40), RunSlice(KEYS.at(70), 40, 70))
    assert runs.find(KEYS, 50).slices == (RunSlice(KEYS.at(40), 0, 40), RunSlice(KEYS.at(70), 40, 48))


def test_a_run_is_of_no_use_without_the_runs_before_it() -> None:
    runs = having(run(0, 40), run(40, 70))
    runs.forget([KEYS.at(40)])
    assert runs.find(KEYS, 100) == NO_PREFIX


def test_a_run_without_a_beginning_does_not_hide_what_is_there() -> None:
    runs = having(run(0, 40), run(45, 70))
    assert runs.find(KEYS, 100).slices == (RunSlice(KEYS.at(40), 0, 40),)
    assert runs.covered(KEYS, 100) == 40
    # A state needs all cells before it.
    assert having(run(0, 40), run(45, 70), state(70), with_state=True).find(KEYS, 100) == NO_PREFIX


def test_a_prefix_with_state_ends_where_a_state_is_saved() -> None:
    runs = having(run(0, 40), state(20), run(40, 70), state(48), with_state=True)
    assert runs.covered(KEYS, 99) == 70
    for most, length in ((99, 48), (48, 48), (47, 0)):
        # The cells of the first 20 tokens are there, but their run has no cut where the state is.
        found = runs.find(KEYS, most)
        assert found.length == length
    cells = (RunSlice(KEYS.at(40), 0, 40), RunSlice(KEYS.at(70), 40, 48))
    assert runs.find(KEYS, 99).slices == (*cells, RunSlice(state_key(KEYS.at(48)), 48, 48))
    assert runs.find(KEYS, 99).behind(45) == (
        RunSlice(KEYS.at(70), 45, 48),
        RunSlice(state_key(KEYS.at(48)), 48, 48),
    )
    assert having(run(40, 70), state(70), with_state=True).find(KEYS, 99) == NO_PREFIX


def test_a_state_is_given_up_alone_where_later_ones_need_its_cells() -> None:
    runs = having(run(0, 40), state(40), run(40, 70), state(70), with_state=True)
    assert runs.drop(KEYS.at(40)) == [state_key(KEYS.at(40))]
    assert (runs.find(KEYS, 69), runs.find(KEYS, 70).length) == (NO_PREFIX, 70)
    assert list(runs.listed) == [KEYS.at(70)]
    assert runs.used_bytes[Tier.MEMORY] == 27
    gone = runs.drop(KEYS.at(70))
    assert set(gone) == {KEYS.at(40), KEYS.at(70), state_key(KEYS.at(70))}
    assert runs.used_bytes[Tier.MEMORY] == 0


def test_cells_that_no_state_needs_are_used_for_none_but_the_next_one() -> None:
    runs = having(run(0, 40), state(32), state(40), with_state=True)
    assert runs.drop(KEYS.at(40)) == [state_key(KEYS.at(40))]
    assert (runs.find(KEYS, 99).length, runs.covered(KEYS, 99)) == (32, 32)
    for one in (run(0, 40), state(40)):  # they are saved again; the shard has the run of cells
        runs.add(one)
    assert runs.find(KEYS, 99).length == 40


def test_a_state_makes_way_before_its_cells() -> None:
    runs = having(run(0, 40), run(40, 70), state(70), memory=27, with_state=True)
    runs.use(runs.find(KEYS, 70))
    assert runs.make_room(8).dropped == (state_key(KEYS.at(70)), KEYS.at(70))


def test_what_was_used_least_recently_makes_way() -> None:
    others = [keys([number] * 50) for number in range(3)]
    runs = having(*(run(0, 40, other) for other in others), memory=30)
    runs.use(runs.find(others[0], 40))
    eviction = runs.make_room(runs.bytes_of(40))  # as large as the runs that were seen: 10 bytes
    assert (eviction.dropped, eviction.spilled) == ((others[1].at(40),), ())
    assert runs.used_bytes[Tier.MEMORY] == 20


def test_the_beginning_of_a_prefix_makes_way_last() -> None:
    runs = having(run(0, 40), run(40, 70), memory=20)
    runs.use(runs.find(KEYS, 70))
    assert runs.make_room(runs.bytes_of(20)).dropped == (KEYS.at(70),)


def test_runs_move_to_disk_and_then_make_way_there() -> None:
    others = [keys([number] * 50) for number in range(3)]
    runs = having(*(run(0, 40, other) for other in others), memory=30, disk_bytes=10)
    assert runs.make_room(runs.bytes_of(40)).spilled == (others[0].at(40),)
    assert runs.used_bytes == {Tier.MEMORY: 20, Tier.DISK: 10}
    assert runs.find(others[0], 40).length == 40, "it can be loaded from there"
    runs.add(run(0, 40, keys([9] * 50)))
    eviction = runs.make_room(runs.bytes_of(40))
    assert (eviction.spilled, eviction.dropped) == ((others[1].at(40),), (others[0].at(40),))


def test_runs_on_disk_survive_the_shard() -> None:
    runs = having(run(0, 40, on_disk=True), run(40, 70, on_disk=True), disk_bytes=100)
    assert runs.find(KEYS, 100).length == 70
    assert runs.used_bytes == {Tier.MEMORY: 0, Tier.DISK: 20}


def test_a_run_with_a_known_key_changes_nothing() -> None:
    runs = having(run(0, 40), run(0, 40, size=99))
    assert (len(runs.keys), runs.used_bytes[Tier.MEMORY]) == (1, 10)


def test_a_run_that_no_other_begins_with_goes_at_once() -> None:
    runs = having(run(0, 40), run(40, 70))
    assert runs.drop(KEYS.at(70)) == [KEYS.at(70)]
    assert list(runs.listed) == [KEYS.at(40)]
    assert runs.used_bytes[Tier.MEMORY] == 10
    assert runs.find(KEYS, 100).length == 40


def test_of_a_run_that_another_begins_with_the_rest_is_not_found_any_more() -> None:
    runs = having(run(0, 40), run(32, 70))
    assert runs.drop(KEYS.at(40)) == []
    assert list(runs.listed) == [KEYS.at(70)]
    assert runs.find(KEYS, 70).slices == (RunSlice(KEYS.at(40), 0, 32), RunSlice(KEYS.at(70), 32, 70))
    other = keys([*TOKENS[:40], 7, 7])
    assert runs.find(other, 42).length == 32, "what the other has in common with it"
    assert [one.key for one in runs.holding(KEYS.at(70))] == [KEYS.at(40), KEYS.at(70)]
    assert runs.drop(KEYS.at(70)) == [KEYS.at(70), KEYS.at(40)], "nobody needs it now"
    assert (runs.keys, runs.used_bytes[Tier.MEMORY]) == ((), 0)
    assert runs.find(KEYS, 100) == NO_PREFIX


def test_a_run_that_is_saved_again_is_wanted_again() -> None:
    runs = having(run(0, 40), run(32, 70))
    runs.drop(KEYS.at(40))
    runs.add(run(0, 40))
    assert list(runs.listed) == [KEYS.at(40), KEYS.at(70)]
    assert runs.find(KEYS, 40).length == 40
    assert runs.drop(KEYS.at(70)) == [KEYS.at(70)]


def test_a_run_stays_dropped_on_the_shard_that_fetches_it() -> None:
    source = having(run(0, 40), run(32, 70))
    source.drop(KEYS.at(40))
    target = having(*source.describe(source.keys))
    assert target.drop_unneeded() == []
    assert list(target.listed) == [KEYS.at(70)]
    assert target.find(KEYS, 70).length == 70


def test_a_run_stays_for_one_that_is_being_saved() -> None:
    runs = having(run(0, 40))
    assert runs.drop(KEYS.at(40), {KEYS.at(32)}) == []
    runs.add(run(32, 70))
    assert runs.drop_unneeded() == []
    assert runs.find(KEYS, 70).length == 70


def made(**limits: object) -> Simulation:
    return simulation("a", limits=limits_of(cells=400, **SAVING, **limits))  # type: ignore[arg-type]


def key_of(tokens: tuple[int, ...]) -> bytes:
    return keys(tokens).at(len(tokens))


def test_a_parked_prefix_is_dropped_and_another_one_keeps_its_cells() -> None:
    sim = simulation("a")
    sim.submit((*HELLO, 50, 51), 2, ignore_eos=True)
    sim.complete((*HELLO, 60, 61), 2, ignore_eos=True)
    shard = sim.scheduler.shards["a"]
    first, second = (one.key for one in prefixes_of(shard).prefixes)
    [evicted] = sim.drop(first)
    assert [(one.key, one.tokens, one.cells) for one in evicted.prefixes] == [(first, 43, 3)]
    sim.run()
    assert sim.shards["a"].used_cells == 43
    assert sim.remembered() == [second]
    sim.check_at_rest()


def test_a_saved_prefix_is_dropped_on_every_shard() -> None:
    limits = limits_of(cells=400, **SAVING)
    sim = simulation("a", "b", limits=limits)
    for name in "ab":
        sim.complete(HELLO, 2, ignore_eos=True)
        sim.tick(0.5)
        sim.run()
        if name == "a":
            sim.drain("a")
            sim.run()
    sim.join("a", limits)
    assert len(sim.remembered()) == 1
    [key] = sim.remembered()
    sim.drop(key)
    sim.run()
    assert not any(shard.runs for shard in sim.shards.values())
    sim.check_at_rest()


def test_a_prefix_that_is_being_saved_is_dropped_when_it_was() -> None:
    sim = made()
    sim.submit(HELLO, 2, ignore_eos=True)
    while not sim.sent(Save):
        sim.advance("a")
    key = key_of((*HELLO, *sim.received[1][:1]))
    sim.drop(key)
    sim.run()
    assert not sim.shards["a"].runs
    assert not sim.remembered()
    sim.check_at_rest()


def test_running_sequences_are_not_disturbed() -> None:
    sim = simulation("a")
    sim.complete(HELLO, 5, ignore_eos=True)
    [key] = sim.remembered()
    running = sim.submit((*HELLO, 50, 51), 60, ignore_eos=True)
    sim.advance("a", 5)
    sim.drop(key)
    sim.run()
    assert running in sim.finished
    sim.check_at_rest()


def test_the_tokens_of_a_prefix_are_known_wherever_it_is() -> None:
    sim = simulation("a")
    sim.complete(HELLO, 2, ignore_eos=True)
    whole = (*HELLO, *sim.received[1][:1])
    assert tokens_of(sim.scheduler.shards["a"], key_of(whole)) == whole, "in cells"
    sim = made()
    sim.complete(HELLO, 2, ignore_eos=True)
    shard = sim.scheduler.shards["a"]
    assert tokens_of(shard, key_of(whole)) == whole, "in memory"
    sim.complete((*HELLO[:36], 50, 51, 52), 2, ignore_eos=True)
    other = (*HELLO[:36], 50, 51, 52, *sim.received[2][:1])
    assert tokens_of(shard, key_of(other)) == other, "of a run that begins within another"
    assert tokens_of(shard, key_of(other[:16])) == other[:16]
    assert tokens_of(shard, key_of((9, 9, 9))) is None


def test_there_is_room_for_what_costs_no_recent_run() -> None:
    clock = Clock()
    runs = SavedRuns(30, 0, with_state=False, clock=clock)
    assert runs.has_room(1000, 60.0), "no size is known"
    runs.add(run(0, 16, size=16))
    assert runs.has_room(14, 60.0)
    assert not runs.has_room(15, 60.0)
    clock.now_s = 61.0
    assert runs.has_room(15, 60.0)

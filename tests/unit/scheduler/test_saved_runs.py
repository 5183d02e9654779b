"""What a shard has saved, how a prefix is found in it, and what makes way."""

from typing import Any

from caravan_proto.messages.commands import RunNote, RunSlice
from caravan_scheduler.events import SavedRun
from caravan_scheduler.prefix_keys import PrefixKeys, cuts_between, state_key
from caravan_scheduler.shard.saved_runs import NO_PREFIX, SavedRuns, Tier


def keys(tokens: list[int]) -> PrefixKeys:
    return PrefixKeys("", lambda start, stop: tokens[start:stop])


TOKENS = list(range(100))
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

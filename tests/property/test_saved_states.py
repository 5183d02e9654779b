"""Whatever checkpoints are saved, given up and evicted: what is found is there, and cells stay as long as states need
them.
"""

from hypothesis import given
from hypothesis import strategies as st

from caravan_proto.messages.commands import RunNote
from caravan_scheduler.events import SavedRun
from caravan_scheduler.prefix_keys import PrefixKeys, cuts_between, state_key
from caravan_scheduler.shard.saved_runs import NO_PREFIX, SavedRuns, Tier

STATE_BYTES, MOST_BYTES = 20, 600
# Conversations that have some first tokens in common.
FORKS = [[7] * 40 + [number] * 160 for number in range(3)]
FORKS.append([7] * 100 + [9] * 100)


def keys_of(tokens: list[int]) -> PrefixKeys:
    return PrefixKeys("", lambda start, stop: tokens[start:stop])


KEYS = [keys_of(tokens) for tokens in FORKS]

SAVE = st.tuples(st.just("save"), st.integers(0, 3), st.integers(16, 200))
DROP = st.tuples(st.just("drop"), st.integers(0, 3), st.integers(16, 200))
LOAD = st.tuples(st.just("load"), st.integers(0, 3), st.integers(16, 200))
FLUSH = st.tuples(st.just("flush"), st.integers(0, 3), st.just(200))


def save(runs: SavedRuns, keys: PrefixKeys, end: int) -> None:
    """Save the cells that are not saved, and the state."""
    start = runs.covered(keys, end)
    assert start <= end
    size = end - start + (0 if state_key(keys.at(end)) in runs else STATE_BYTES)
    runs.make_room(size)
    start = runs.covered(keys, end)  # some may have made way
    if start < end:
        cuts = tuple((cut, keys.at(cut)) for cut in cuts_between(start, end))
        runs.add(SavedRun(start=start, cuts=cuts, size_bytes=end - start, note=RunNote(before=keys.at(start))))
    cuts = ((end, state_key(keys.at(end))),)
    runs.add(SavedRun(start=end, cuts=cuts, size_bytes=STATE_BYTES, note=RunNote(before=keys.at(end))))
    runs.use(runs.find(keys, end))


@given(steps=st.lists(SAVE | SAVE | SAVE | DROP | LOAD | FLUSH, max_size=40))
def test_what_is_found_is_there_and_nothing_is_kept_for_nothing(steps: list[tuple[str, int, int]]) -> None:
    runs = SavedRuns(MOST_BYTES, 0, with_state=True)
    for what, number, length in steps:
        keys = KEYS[number]
        match what:
            case "save":
                save(runs, keys, length)
                assert runs.find(keys, length).length == length
            case "drop":
                before = runs.find(keys, length)
                runs.drop(keys.at(before.length))
                assert before == NO_PREFIX or runs.find(keys, length).length < before.length
            case "load":
                found = runs.find(keys, length)
                if found != NO_PREFIX:
                    runs.use(found, loads=1)
            case _:
                while (found := runs.find(keys, length)) != NO_PREFIX:
                    runs.drop(keys.at(found.length))
        check(runs)


def check(runs: SavedRuns) -> None:
    kept = {run.key: run for run in runs.describe(runs.keys)}
    assert runs.used_bytes[Tier.MEMORY] == sum(run.size_bytes for run in kept.values())
    needed = {run.note.before for run in kept.values()}
    for run in kept.values():
        if run.is_dropped:
            assert needed & {key for _, key in run.cuts}, "it is given up, and nothing begins in it"
    for keys in KEYS:
        found = runs.find(keys, 200)
        end = 0
        for piece in found.slices:
            assert kept[piece.key].start <= piece.start == end <= piece.end <= kept[piece.key].cuts[-1][0]
            end = piece.end
        assert end == found.length
        if found.length:
            assert found.slices[-1].key == state_key(keys.at(found.length))

"""The hidden states that a head has yet to read."""

from typing import Any

import numpy as np
import pytest

from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.llama.heads.states import KeptStates, state_bytes

SIZE = 4
# So large that of each of two sequences, the fewest states are kept.
HUGE = 1 << 22


def kept_states(sequences: int, *, longest: int = 256, reads_first: bool = True, lag: int = 1) -> KeptStates:
    return KeptStates(sequences, SIZE, longest, reads_first=reads_first, lag=lag)


def batch(*parts: tuple[int, range], media: Any = ()) -> TokenBatch:
    """Return the rows of sequences at positions."""
    positions = np.concatenate([np.array(rows, np.int32) for _, rows in parts])
    ids = np.concatenate([np.full(len(rows), key, np.int32) for key, rows in parts])
    return TokenBatch(positions, positions, ids, np.zeros(len(ids), np.int8), media=media)


def states_of(one: TokenBatch) -> Any:
    """Return states that tell sequences and positions apart."""
    numbers = 1000.0 * one.sequence_ids + one.positions + 1
    return np.repeat(numbers[:, None], SIZE, axis=1).astype(np.float32)


def note(kept: KeptStates, *parts: tuple[int, range], media: Any = ()) -> None:
    one = batch(*parts, media=media)
    kept.note(one, states_of(one))


def read(kept: KeptStates, key: int, positions: range) -> list[float]:
    ids = np.full(len(positions), key, np.int32)
    return [float(value) for value in kept.read(ids, np.array(positions, np.int32))[:, 0]]


def test_each_token_is_read_with_the_state_before_it() -> None:
    kept = kept_states(2)
    note(kept, (0, range(3)), (1, range(2)))
    note(kept, (0, range(3, 4)), (1, range(2, 5)))
    assert kept.readable(0) == range(5)
    assert kept.readable(1) == range(6)
    assert read(kept, 0, range(5)) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert read(kept, 1, range(4, 6)) == [1004.0, 1005.0]


def test_what_was_not_seen_cannot_be_read() -> None:
    kept = kept_states(2)
    assert kept.readable(0) == range(1)
    note(kept, (0, range(7, 9)))
    assert kept.readable(0) == range(8, 10)
    assert read(kept, 0, range(8, 10)) == [8.0, 9.0]


def test_what_is_computed_anew_replaces_what_came_later() -> None:
    kept = kept_states(2)
    note(kept, (0, range(9)))
    note(kept, (0, range(4, 6)))
    assert kept.readable(0) == range(7)
    kept.cut(0, 2)
    assert kept.readable(0) == range(3)
    note(kept, (0, range(5, 6)))
    assert kept.readable(0) == range(6, 7), "there is a gap"
    kept.forget()
    assert kept.readable(0) == range(1)


def test_the_last_ones_are_kept() -> None:
    kept = kept_states(2, longest=10)
    note(kept, (0, range(30)), (1, range(3)))
    assert kept.readable(0) == range(21, 31)
    assert read(kept, 0, range(21, 31)) == [float(number) for number in range(21, 31)]
    note(kept, (0, range(30, 31)))
    assert kept.readable(0) == range(22, 32)
    assert read(kept, 1, range(1, 4)) == [1001.0, 1002.0, 1003.0]


def test_states_of_drafts_replace_none_that_are_kept() -> None:
    kept = kept_states(1, longest=10)
    note(kept, (0, range(30)))
    drafted = batch((0, range(30, 38)))
    kept.put(drafted.sequence_ids, drafted.positions, states_of(drafted))
    assert read(kept, 0, range(21, 39)) == [float(number) for number in range(21, 39)]
    assert kept.readable(0) == range(21, 31)


def test_a_head_may_not_read_the_first_token() -> None:
    kept = kept_states(1, reads_first=False)
    assert kept.readable(0) == range(1, 1)
    note(kept, (0, range(3)))
    assert kept.readable(0) == range(1, 4)
    kept.cut(0, 2)
    note(kept, (0, range(5, 6)))
    assert kept.readable(0) == range(6, 7)


def test_a_head_may_read_each_token_with_its_own_state() -> None:
    kept = kept_states(1, reads_first=False, lag=0)
    # A draft begins with the last token, whose state is not known yet.
    assert kept.readable(0) == range(1)
    note(kept, (0, range(3)))
    assert kept.readable(0) == range(4)
    assert read(kept, 0, range(3)) == [1.0, 2.0, 3.0]
    note(kept, (0, range(3, 7)), media=("a picture",))
    assert kept.readable(0) == range(7, 8)
    note(kept, (0, range(7, 9)))
    assert read(kept, 0, range(7, 9)) == [8.0, 9.0]
    kept.cut(0, 8)
    assert kept.readable(0) == range(7, 9)


def test_states_of_drafts_are_told_apart_and_may_be_shorter() -> None:
    kept = kept_states(1)
    note(kept, (0, range(3)))
    drafted = batch((0, range(3, 5)))
    kept.put(drafted.sequence_ids, drafted.positions, states_of(drafted)[:, : SIZE - 1])
    after = batch((0, range(2, 6)))
    assert kept.are_computed(after.sequence_ids, after.positions).tolist() == [True, True, False, False]
    assert kept.read(after.sequence_ids, after.positions)[2].tolist() == [4.0] * (SIZE - 1) + [0.0]


def test_copies_begin_alike() -> None:
    kept = kept_states(2)
    note(kept, (0, range(9)))
    kept.copy(0, 1, 5)
    note(kept, (1, range(5, 6)))
    assert kept.readable(1) == range(7)
    assert read(kept, 1, range(1, 7)) == [1.0, 2.0, 3.0, 4.0, 5.0, 1006.0]


def test_reading_begins_behind_media() -> None:
    kept = kept_states(1)
    note(kept, (0, range(4)))
    note(kept, (0, range(4, 9)), media=("a picture",))
    assert kept.readable(0) == range(9, 10)
    note(kept, (0, range(9, 12)))
    assert kept.readable(0) == range(9, 13)
    assert read(kept, 0, range(9, 11)) == [9.0, 10.0]


@pytest.mark.parametrize(("size", "kept"), [(64, 256), (4096, 256), (1 << 16, 128), (HUGE, 64)])
def test_room_is_limited(size: int, kept: int) -> None:
    assert state_bytes(2, size, 256) == 4 * size * 2 * (kept + 64)

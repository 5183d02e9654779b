"""States of recurrent layers are checked before llama.cpp reads them: bytes of another form are refused."""

import struct

import numpy as np
import pytest

from caravan_shard.arrays import State
from caravan_shard.backends.llama.cell_state import MAGIC, StateError
from caravan_shard.backends.llama.recurrent_state import RecurrentFormat, find_recurrent_format

LAYERS, ROW_BYTES = 2, 24


def block(length: int, *, seed: int = 1) -> bytes:
    numbers = np.random.default_rng(seed)
    rows = b"".join(struct.pack("<iQ", 0, ROW_BYTES) + numbers.bytes(ROW_BYTES) for _ in range(2 * LAYERS))
    return struct.pack("<IiIII", 1, length - 1, 0, 0, LAYERS) + rows


def cells(length: int) -> bytes:
    """The cells of one layer that attends, in one stream."""
    heads = b"".join(struct.pack("<iIi", position, 1, 0) for position in range(length))
    rows = 2 * (struct.pack("<iQ", 1, 4) + b"abcd" * length)
    return struct.pack("<II", 1, length) + heads + struct.pack("<II", 0, 1) + rows


def state(length: int, *, attends: bool, seed: int = 1) -> State:
    head = struct.pack("<Ii", MAGIC, 0)
    return np.frombuffer(head + (cells(length) if attends else b"") + block(length, seed=seed), np.uint8).copy()


def partial(length: int) -> State:
    return np.frombuffer(struct.pack("<Ii", MAGIC, 0) + block(length), np.uint8)


def found(*, attends: bool) -> RecurrentFormat:
    form = find_recurrent_format(state(2, attends=attends), partial(2))
    assert form is not None
    return form


@pytest.mark.parametrize("attends", [True, False])
def test_states_of_any_length_and_numbers_are_taken(attends: bool) -> None:
    form = found(attends=attends)
    for length in (1, 2, 9):
        form.check(state(length, attends=attends, seed=length), length)


@pytest.mark.parametrize("attends", [True, False])
def test_no_other_bytes_are_taken_than_numbers(attends: bool) -> None:
    form, good = found(attends=attends), state(3, attends=attends)
    numbers_begin = len(good) - form.block_bytes + 20
    refused = 0
    # The magic number and the sequence id are read by llama.cpp alone.
    for place in range(8, len(good)):
        bad = good.copy()
        bad[place] ^= 1
        try:
            form.check(bad, 3)
        except StateError:
            refused += 1
            continue
        is_number = place >= numbers_begin and (place - numbers_begin) % (12 + ROW_BYTES) >= 12
        is_cell_row = attends and place < numbers_begin - 20
        assert is_number or is_cell_row, place
    assert refused >= 16 + 2 * LAYERS * 12


@pytest.mark.parametrize("attends", [True, False])
def test_truncated_and_longer_states_are_refused(attends: bool) -> None:
    form, good = found(attends=attends), state(3, attends=attends)
    for bad in (good[:-1], good[:4], good[:0], np.append(good, good[-1:]), state(3, attends=not attends)):
        with pytest.raises(StateError):
            form.check(bad, 3)
    with pytest.raises(StateError, match="length"):
        form.check(good, 4)


def test_unknown_forms_are_not_found() -> None:
    assert find_recurrent_format(state(2, attends=True), partial(3)) is None
    good = state(2, attends=False)
    for place in (8, 16, 20, 28):  # cells, sequence ids, transposed, a type
        bad = good.copy()
        bad[place] = 77
        assert find_recurrent_format(bad, bad) is None
    assert find_recurrent_format(good[:-1], good[:-1]) is None

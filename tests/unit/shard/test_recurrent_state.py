"""States of recurrent layers are checked before llama.cpp reads them: bytes of another form are refused."""

import struct

import numpy as np
import pytest

from caravan_shard.arrays import State
from caravan_shard.backends.llama.memory.cell_state import MAGIC, StateError
from caravan_shard.backends.llama.memory.recurrent_state import RecurrentFormat, find_recurrent_format

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


def recurrent(length: int, seed: int = 1) -> State:
    return np.frombuffer(block(length, seed=seed), np.uint8).copy()


def attending(length: int, *, attends: bool) -> State:
    return state(length, attends=attends)[: -len(block(length))]


@pytest.mark.parametrize("attends", [True, False])
def test_states_of_any_length_and_numbers_are_taken(attends: bool) -> None:
    form = found(attends=attends)
    for length in (1, 2, 9):
        form.check(recurrent(length, seed=length), length - 1)
        taken = form.parse(attending(length, attends=attends))
        assert [cache.positions.tolist() for cache in taken] == ([list(range(length))] if attends else [])
        assert form.cells_bytes(1, length) == len(attending(length, attends=attends))


def test_no_other_bytes_are_taken_than_numbers() -> None:
    form, good = found(attends=True), recurrent(3)
    refused = 0
    for place in range(len(good)):
        bad = good.copy()
        bad[place] ^= 1
        try:
            form.check(bad, 2)
        except StateError:
            refused += 1
            continue
        assert place >= 20, place
        assert (place - 20) % (12 + ROW_BYTES) >= 12, place
    assert refused == 20 + 2 * LAYERS * 12


@pytest.mark.parametrize("attends", [True, False])
def test_truncated_and_longer_states_are_refused(attends: bool) -> None:
    form, good, cells = found(attends=attends), recurrent(3), attending(3, attends=attends)
    for bad in (good[:-1], good[:4], good[:0], np.append(good, good[-1:])):
        with pytest.raises(StateError):
            form.check(bad, 2)
    with pytest.raises(StateError, match="length"):
        form.check(good, 3)
    for bad in (cells[:-1], cells[:4], cells[:0], np.append(cells, cells[-1:]), attending(3, attends=not attends)):
        with pytest.raises(StateError):
            form.parse(bad)


def test_unknown_forms_are_not_found() -> None:
    assert find_recurrent_format(state(2, attends=True), partial(3)) is None
    good = state(2, attends=False)
    for place in (8, 16, 20, 28):  # cells, sequence ids, transposed, a type
        bad = good.copy()
        bad[place] = 77
        assert find_recurrent_format(bad, bad) is None
    assert find_recurrent_format(good[:-1], good[:-1]) is None

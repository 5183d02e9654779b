"""llama.cpp's states of sequences, made by hand, taken apart and put together; those of another form are refused."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from caravan_shard.arrays import State
from caravan_shard.backends.llama.memory.cell_state import (
    MAGIC,
    CacheFormat,
    StateError,
    StateFormat,
    TensorFormat,
    find_format,
)
from caravan_shard.backends.llama.memory.recurrent_state import RecurrentFormat, find_recurrent_format

F16, Q8 = 1, 8
# In the place of a tensor's number.
_EXTRA = 99
BASE = CacheFormat((TensorFormat(F16, 6), TensorFormat(F16, 10)), (TensorFormat(Q8, 3), TensorFormat(Q8, 4)))
WINDOW = CacheFormat((TensorFormat(F16, 8),), (TensorFormat(F16, 2),))
# Some models have no values.
KEYS_ALONE = CacheFormat((TensorFormat(F16, 5), TensorFormat(F16, 5)), ())
# Positions have several dimensions.
MORE_OF_A_CELL = replace(BASE, extra_bytes=12)
FORMATS = {
    "one cache": StateFormat((BASE,)),
    "with a window": StateFormat((BASE, WINDOW)),
    "without values": StateFormat((KEYS_ALONE,)),
    "two without values": StateFormat((KEYS_ALONE, KEYS_ALONE)),
    "with more of a cell": StateFormat((MORE_OF_A_CELL,)),
    "two with more of a cell": StateFormat((MORE_OF_A_CELL, replace(KEYS_ALONE, extra_bytes=12))),
}

LAYERS, ROW_BYTES = 2, 24


def row(cache: int, tensor: int, position: int, size: int) -> bytes:
    """Return the content of a row, which is another for each cache, tensor and position."""
    return np.random.default_rng([cache, tensor, position]).bytes(size)


def cache_bytes(cache: CacheFormat, number: int, positions: list[int], streams: int, stream: int) -> bytes:
    parts = [struct.pack("<I", streams)]
    for one in range(streams):
        count = len(positions) if one == stream else 0
        parts.append(struct.pack("<I", count))
        if count == 0:
            continue
        for position in positions:
            extra = row(number, _EXTRA, position, cache.extra_bytes)
            parts.append(struct.pack("<iI", position, 1) + extra + struct.pack("<i", 5))
        parts.append(struct.pack("<II", 0, len(cache.keys)))
        for tensor, form in enumerate((*cache.keys, *cache.values)):
            parts.append(struct.pack("<iQ", form.kind, form.row_bytes))
            parts += [row(number, tensor, position, form.row_bytes) for position in positions]
    return b"".join(parts)


def state_of(form: StateFormat, *positions: list[int], streams: int = 1, stream: int = 0) -> State:
    """Make a state; ``positions`` has those of each cache, or one list for all."""
    each = positions if len(positions) > 1 else positions * len(form.caches)
    blocks = [
        cache_bytes(cache, number, held, streams, stream)
        for number, (cache, held) in enumerate(zip(form.caches, each, strict=True))
    ]
    return np.frombuffer(struct.pack("<Ii", MAGIC, 5) + b"".join(blocks), np.uint8).copy()


def joined(form: StateFormat, slices: list[tuple[State, int, int]], streams: int = 1) -> State:
    pieces = [[cells.cut(start, end) for cells in form.parse(state)] for state, start, end in slices]
    count = sum(end - start for _, start, end in slices)
    state: State = np.zeros(form.state_bytes(streams, count), np.uint8)
    form.build(list(zip(*pieces, strict=True)), streams, state)
    return state


def same_cells(form: StateFormat, state: State, positions: list[int], streams: int = 1) -> bool:
    """Whether a state is, but for the sequence id, what llama.cpp writes."""
    expected = state_of(form, positions, streams=streams)
    parsed = [form.parse(expected), form.parse(state)]
    rows = [[one.tobytes() for cells in part for one in (*cells.rows, cells.extras)] for part in parsed]
    return (
        len(state) == len(expected)
        and rows[0] == rows[1]
        and bool(np.all([np.array_equal(one.positions, positions) for one in parsed[1]]))
    )


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> StateFormat:
    """Each format in turn."""
    return FORMATS[request.param]


@pytest.mark.parametrize(("streams", "stream"), [(1, 0), (4, 0), (4, 2), (8, 7)])
def test_the_format_is_found_in_a_small_state(form: StateFormat, streams: int, stream: int) -> None:
    assert find_format(state_of(form, [0, 1], streams=streams, stream=stream)) == form


@pytest.mark.parametrize("streams", [1, 4])
def test_cells_of_several_states_become_one(form: StateFormat, streams: int) -> None:
    first = state_of(form, list(range(10)), streams=4, stream=3)
    second = state_of(form, list(range(4, 20)))
    assert same_cells(form, joined(form, [(first, 0, 10)], streams), list(range(10)), streams)
    state = joined(form, [(first, 0, 3), (first, 3, 7), (second, 7, 12)], streams)
    assert same_cells(form, state, list(range(12)), streams)
    assert same_cells(form, joined(form, [(state, 0, 1)], streams), [0], streams)


def test_cells_need_not_be_in_order(form: StateFormat) -> None:
    state = state_of(form, [7, 3, 4, 0, 6, 5, 2, 1])
    assert same_cells(form, joined(form, [(state, 0, 8)]), list(range(8)))
    assert same_cells(form, joined(form, [(state, 2, 7)]), [2, 3, 4, 5, 6])
    assert find_format(state_of(form, [1, 0])) == form


def test_missing_cells_are_noticed(form: StateFormat) -> None:
    for positions in ([0, 1, 3, 4], [4, 3, 1, 0], [1, 2, 3, 4]):
        with pytest.raises(StateError):
            joined(form, [(state_of(form, positions), 0, 5)])


@pytest.mark.parametrize("kind", [0, F16, 30])
def test_values_may_be_transposed(kind: int) -> None:
    size = 4 if kind == 0 else 2
    cache = CacheFormat((TensorFormat(Q8, 3),), (TensorFormat(kind, 6 * size),))
    form = StateFormat((cache, cache))
    state = state_of(form, list(range(9)))
    parts = [[cells] for cells in form.parse(state)]
    transposed: State = np.zeros(form.state_bytes(4, 9), np.uint8)
    form.build(parts, 4, transposed, transposes=True)
    assert find_format(transposed[: len(transposed)]) == form
    # The last value of the last row is the last element in both; of the row before, it is next to it.
    element = np.frombuffer(row(1, 1, 8, 6 * size), np.uint8)[-size:]
    end = len(transposed) - 3 * 4
    assert np.array_equal(transposed[end - size : end], element)
    before = np.frombuffer(row(1, 1, 7, 6 * size), np.uint8)[-size:]
    assert np.array_equal(transposed[end - 2 * size : end - size], before)
    # Back, in parts, and mixed with rows that were not transposed.
    assert same_cells(form, joined(form, [(transposed, 0, 4), (state, 4, 6), (transposed, 6, 9)]), list(range(9)))
    mixed: State = np.zeros(form.state_bytes(1, 7), np.uint8)
    pieces = [[cells.cut(0, 5) for cells in form.parse(transposed)], [cells.cut(5, 7) for cells in form.parse(state)]]
    form.build(list(zip(*pieces, strict=True)), 1, mixed, transposes=True)
    assert same_cells(form, joined(form, [(mixed, 0, 7)]), list(range(7)))


def test_the_window_may_hold_fewer_cells() -> None:
    form = FORMATS["with a window"]
    state = state_of(form, list(range(10)), [7, 8, 9])
    base, window = form.parse(state)
    assert base.cut(0, 10).positions.tolist() == list(range(10))
    assert window.positions.tolist() == [7, 8, 9]
    with pytest.raises(StateError):
        window.cut(6, 10)
    # A state with the cells of the window alone, as llama.cpp makes it with PARTIAL_ONLY.
    alone = StateFormat((WINDOW,))
    assert len(alone.parse(state_of(alone, [0, 1]))[0].positions) == 2
    empty = state_of(form, [0, 1], [])
    assert len(form.parse(empty)[1].positions) == 0
    assert find_format(empty) is None


def test_truncated_and_longer_states_are_refused(form: StateFormat) -> None:
    state = state_of(form, [0, 1, 2], streams=2, stream=1)
    for size in range(len(state)):
        with pytest.raises(StateError):
            form.parse(state[:size])
    with pytest.raises(StateError):
        form.parse(np.append(state, np.uint8(0)))


def test_states_of_other_models_are_refused() -> None:
    for name, form in FORMATS.items():
        for other in FORMATS:
            if name != other:
                with pytest.raises(StateError):
                    form.parse(state_of(FORMATS[other], [0, 1, 2]))


def changed(state: State, at: int, value: int) -> State:
    state = state.copy()
    state[at : at + 4].view("<u4")[:] = value
    return state


def test_unknown_formats_are_not_guessed_at() -> None:
    state = state_of(FORMATS["one cache"], [0, 1])
    # Magic, sequence ids of a cell, values that are quantized and transposed, or neither, and the number of layers.
    for at, value in ((0, 7), (20, 2), (40, 1), (40, 2), (44, 0), (44, 3)):
        assert find_format(changed(state, at, value)) is None
        with pytest.raises(StateError):
            FORMATS["one cache"].parse(changed(state, at, value))
    # Positions that are not those of the whole sequence.
    assert find_format(state_of(FORMATS["one cache"], [1, 2])) is None
    assert find_format(state[:-1]) is None
    # Cells with an extension of 12 bytes, as models with M-RoPE have them.
    extended = np.concatenate([state[:24], np.zeros(12, np.uint8), state[24:]])
    assert find_format(extended) is None
    assert find_format(np.zeros(0, np.uint8)) is None


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
def test_truncated_and_longer_recurrent_states_are_refused(attends: bool) -> None:
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

"""Into which passes a step with media is parted, where the positions of cells are, and which embeddings are kept."""

import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_shard.backends.base import TokenBatch
from caravan_shard.media import (
    NO_TOKEN,
    CellSpan,
    EncodedSlice,
    MediaRows,
    MediaStore,
    SliceSize,
    cell_count,
    position_of,
    positions_of,
    spans_before,
)

media_calls = pytest.importorskip("caravan_shard.backends.llama.media.passes")


def _piece(cells: int, *, causal: bool = True) -> EncodedSlice:
    return EncodedSlice(embeddings=np.zeros((cells, 2), np.float32), size=SliceSize(cells, cells), causal=causal)


def _batch(*sequences: str, causal: bool = True) -> TokenBatch:
    """Make a step: in each text, letters are tokens and runs of equal digits are spans. An output follows the last."""
    tokens: list[int] = []
    ids: list[int] = []
    outputs: list[int] = []
    media: list[MediaRows] = []
    for sequence_id, text in enumerate(sequences):
        for place, letter in enumerate(text):
            if letter.isdigit() and text[place - 1 : place] != letter:
                count = len(text[place:]) - len(text[place:].lstrip(letter))
                media.append(MediaRows(len(tokens), _piece(count, causal=causal), 0, count))
            tokens.append(NO_TOKEN if letter.isdigit() else ord(letter))
            ids.append(sequence_id)
            outputs.append(place == len(text) - 1)
    positions = [place for text in sequences for place in range(len(text))]
    return TokenBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        sequence_ids=np.array(ids, np.int32),
        outputs=np.array(outputs, np.int8),
        media=media,
    )


def _shown(batch: TokenBatch, *sequences: str) -> list[str]:
    """Return the rows of each pass as the letters that they were made of."""
    letters = np.array(list("".join(sequences)))
    return ["".join(letters[one.rows]) for one in media_calls.media_passes(batch)]


@pytest.mark.parametrize(
    ("sequences", "passes"),
    [
        (["11a"], ["11", "a"]),
        (["11"], ["11"]),
        (["ab11c"], ["ab", "11", "c"]),
        (["ab11c", "d"], ["ab", "11", "cd"]),
        (["a11", "b22c", "d"], ["ab", "1122", "cd"]),
        (["a11b22c", "33d", "e"], ["a", "11", "b", "2233", "cde"]),
        (["1122a"], ["11", "22", "a"]),
        (["a", "b", "11"], ["11", "ab"]),
    ],
)
def test_media_come_before_the_tokens_behind_them(sequences: list[str], passes: list[str]) -> None:
    batch = _batch(*sequences)
    assert _shown(batch, *sequences) == passes
    for one in media_calls.media_passes(batch):
        assert bool(one.batch.media) == bool((one.batch.tokens == NO_TOKEN).all())
        assert one.causal
        rows = [row for span in one.batch.media for row in range(span.row, span.row + span.cells)]
        assert not one.batch.media or rows == list(range(len(one.batch.tokens)))


def test_slices_that_see_themselves_are_alone() -> None:
    sequences = ["a11b", "22c", "d"]
    batch = _batch(*sequences, causal=False)
    assert _shown(batch, *sequences) == ["a", "11", "22", "bcd"]
    assert [one.causal for one in media_calls.media_passes(batch)] == [True, False, False, True]


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.integers(1, 4)), min_size=1, max_size=4), st.booleans())
def test_every_row_is_computed_once_and_in_order(parts: list[tuple[str, int]], causal: bool) -> None:
    text = "".join(before + str(place % 10) * count for place, (before, count) in enumerate(parts))
    sequences = [text, "xyz", f"{text}t"]
    batch = _batch(*sequences, causal=causal)
    passes = media_calls.media_passes(batch)
    assert (sum(one.rows.astype(int) for one in passes) == 1).all()
    for sequence_id in range(len(sequences)):
        order = [row for one in passes for row in np.flatnonzero(one.rows & (batch.sequence_ids == sequence_id))]
        assert order == sorted(order)
    for one in passes:
        assert np.array_equal(one.batch.positions, batch.positions[one.rows])
        assert np.array_equal(one.batch.outputs, batch.outputs[one.rows])


def _spans(draws: Sequence[tuple[int, int, int]]) -> tuple[CellSpan, ...]:
    spans, start = [], 0
    for gap, cells, positions in draws:
        start += gap
        spans.append(CellSpan(start, start + cells, min(cells, positions)))
        start += cells
    return tuple(spans)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(1, 9)), max_size=4))
def test_positions_and_cells_are_each_others_inverse(draws: list[tuple[int, int, int]]) -> None:
    spans = _spans(draws)
    length = (spans[-1].end if spans else 0) + 5
    positions = positions_of(spans, 0, length).tolist()
    assert all(0 <= later - earlier <= 9 for earlier, later in pairwise(positions))
    for cell in range(length):
        if not any(span.start <= cell < span.end for span in spans):
            assert positions[cell] == position_of(spans, cell)
        if any(span.start < cell + 1 < span.end for span in spans):
            continue  # it never ends there
        held = spans_before(spans, cell + 1)
        assert cell_count(held, positions[cell]) == cell + 1
    assert cell_count((), -1) == 0


def test_the_least_recently_used_embeddings_are_forgotten() -> None:
    store = MediaStore(3 * 80)
    for name in (b"a", b"b", b"c"):
        assert store.put(name, [_piece(10)])
    assert store.find(b"a") is not None
    assert store.put(b"d", [_piece(10)])
    assert [store.find(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert store.size == 3 * 80
    assert store.put(b"a", [_piece(5), _piece(5)])
    assert store.size == 3 * 80
    assert not store.put(b"large", [_piece(31)])
    assert store.find(b"large") is None
    assert store.put(b"all", [_piece(30)])
    assert (store.find(b"a"), store.find(b"d"), store.size) == (None, None, 240)


def test_threads_may_use_the_store_at_once() -> None:
    store = MediaStore(20 * 80)

    def use(name: bytes) -> None:
        for number in range(200):
            store.put(name + bytes([number % 10]), [_piece(1 + number % 20)])
            store.find(name + bytes([number % 7]))

    threads = [threading.Thread(target=use, args=(bytes([name]),)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [store.find(bytes([name, number])) for name in range(4) for number in range(10)]
    assert store.size == sum(one.size_bytes for slices in held if slices for one in slices) <= store.capacity

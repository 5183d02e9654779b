"""Flash attention for CPUs (`shard/kernels/src/flash_attention.c`) against attention in double precision."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from caravan_testing.c_kernels import Attention, computed, expected, row_by_row

# Sums of floats, of numbers that were stored before, differ by less. Sums in halves differ by a hundred times as much.
TOLERANCE = 2e-5
HIDDEN = -np.inf


def causal(streams: int, rows: int, cells: int, *, window: int = 0, used: int | None = None) -> NDArray[np.float16]:
    """Mask what lies behind a row, or further before it than a window. The last row sees ``used`` cells, or all."""
    ends = np.arange(rows)[:, None] + (cells if used is None else used) - rows
    places = np.arange(cells)[None]
    hidden = (places > ends) | (places <= ends - window if window else False)
    return np.broadcast_to(np.where(hidden, HIDDEN, 0.0).astype(np.float16), (streams, rows, cells)).copy()


def scattered(streams: int, rows: int, cells: int) -> NDArray[np.float16]:
    """Let each row see cells of its own among those of the others, as in the unified layout."""
    owners = np.random.default_rng(2).integers(0, rows + 1, (streams, 1, cells))
    return np.where(owners == np.arange(rows)[None, :, None], 0.0, HIDDEN).astype(np.float16)


def drawn(**shape: int) -> Attention:
    sizes = {"streams": 1, "group": 3, "heads": 2, "rows": 1, "cells": 300, "size": 64, **shape}
    return Attention.random(**sizes)


def differs(case: Attention, *, threads: int = 2) -> float:
    return float(np.abs(computed(case, threads=threads) - expected(case)).max())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["float16", "float32", "q8_0"])
@pytest.mark.parametrize("rows", [1, 2, 7, 30, 70])
def test_rows_see_the_cells_before_them(rows: int, kind: str, exact: bool) -> None:
    case = replace(drawn(rows=rows, streams=2), kind=kind, mask=causal(2, rows, 300, used=280))
    with row_by_row() if exact else nullcontext():
        assert differs(case) < TOLERANCE


@pytest.mark.parametrize("size", [32, 40, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 30])
def test_heads_of_any_size_and_number(size: int, group: int) -> None:
    case = drawn(size=size, group=group, rows=5, cells=530, heads=1)
    assert differs(replace(case, mask=causal(1, 5, 530))) < TOLERANCE


def test_all_cells_are_visible_without_a_mask() -> None:
    assert differs(drawn(rows=33, cells=70)) < TOLERANCE


def test_rows_of_other_sequences_see_other_cells() -> None:
    assert differs(replace(drawn(rows=9, cells=600), mask=scattered(1, 9, 600))) < TOLERANCE


def test_a_row_that_sees_nothing_is_zero() -> None:
    mask = causal(1, 4, 300)
    mask[0, 2] = HIDDEN
    found = computed(replace(drawn(rows=4), mask=mask))
    assert (found[0, 2] == 0).all()
    assert (found[0, 3] != 0).any()


def test_values_have_another_size_than_keys() -> None:
    case = drawn(rows=3)
    assert differs(replace(case, values=case.values[..., :48].copy(), mask=causal(1, 3, 300))) < TOLERANCE


@pytest.mark.parametrize(
    "change", [{"cap": 20.0}, {"max_bias": 8.0}, {"sinks": np.array([9, -9, 1, 0, 3, 2], "f")}], ids=str
)
def test_scores_are_capped_biased_and_have_sinks(change: dict[str, float]) -> None:
    distances = np.minimum(0, np.arange(300)[None] - 299 + np.arange(4)[:, None])
    mask = (causal(1, 4, 300) + (distances if "max_bias" in change else 0)).astype(np.float16)
    assert differs(replace(drawn(rows=4), mask=mask, **change)) < TOLERANCE  # type: ignore[arg-type]


@given(
    rows=st.integers(1, 40),
    cells=st.integers(1, 700),
    group=st.integers(1, 8),
    threads=st.integers(2, 4),
    data=st.data(),
)
def test_a_row_depends_neither_on_others_nor_on_threads(
    rows: int, cells: int, group: int, threads: int, data: st.DataObject
) -> None:
    used = data.draw(st.integers(min(rows, cells), cells))
    rows = min(rows, used)
    case = replace(drawn(rows=rows, cells=cells, group=group), mask=causal(1, rows, cells, used=used))
    together = computed(case, threads=threads)
    assert np.array_equal(together, computed(case))
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first, rows - 1)) + 1
    assert np.array_equal(together[:, first:last], computed(case.of_rows(slice(first, last))))


def test_row_by_row_a_window_changes_nothing_either() -> None:
    case = replace(drawn(rows=20, cells=600), mask=causal(1, 20, 600, window=100))
    assert differs(case) < TOLERANCE
    with row_by_row():
        together = computed(case, threads=3)
        for row in range(20):
            assert np.array_equal(together[:, row : row + 1], computed(case.of_rows(slice(row, row + 1))))

"""How many cells a shard has that no flag names: what the model was trained for, as far as the host has room."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_shard.backends.llama.devices.cells import CELL_BYTES, cell_numbers, context_line, leaves_host
from caravan_shard.config import ShardConfig
from caravan_shard.memory_need import HOST, FreeMemory, MemoryNeed, Part

CONFIG = ShardConfig(model="m.gguf")
GIB = 1 << 30
FREE = FreeMemory(host=64 * GIB)


def need(weights: int, cells: int, buffers: int = 0) -> MemoryNeed:
    return MemoryNeed(
        (
            Part(HOST, "mapped_weights", weights),
            Part(HOST, "cells", cells),
            Part(HOST, "draft_cells", cells // 4),
            Part(HOST, "compute_buffers", buffers),
        )
    )


def test_the_trained_context_comes_first_and_the_least_number_last() -> None:
    numbers = cell_numbers(CONFIG, 131_072, FREE)
    assert (numbers[0], numbers[-1]) == (131_072, 4096)
    assert all(before > after for before, after in itertools.pairwise(numbers))  # type: ignore[operator]
    # A model of short texts gets as many cells as ever, since eight sequences share them.
    assert cell_numbers(CONFIG, 2048, FREE)[0] == 8192
    assert cell_numbers(ShardConfig(model="m.gguf", rope_scale=2.0), 32_768, FREE)[0] == 65_536
    assert cell_numbers(ShardConfig(model="m.gguf", parallel=64), 8192, FREE) == [256 * 64]
    assert cell_numbers(ShardConfig(model="m.gguf", ctx_size=0), 131_072, FREE) == [None]


def test_no_number_is_tried_whose_tables_alone_are_too_large() -> None:
    free = FreeMemory(host=4 * CELL_BYTES * 100_000)
    numbers = cell_numbers(CONFIG, 1 << 20, free)
    assert max(number or 0 for number in numbers) <= 100_000
    assert numbers[-1] == 4096


@given(st.integers(0, 64 * GIB), st.integers(0, 64 * GIB), st.integers(0, GIB), st.integers(0, 128 * GIB))
def test_cells_leave_as_much_as_they_take(weights: int, cells: int, buffers: int, free: int) -> None:
    wanted = need(weights, cells, buffers)
    taken = cells + cells // 4
    assert leaves_host(wanted, free) == (free - weights - buffers - taken >= taken)


def test_the_line_says_how_large_the_context_is_and_why() -> None:
    def line(cells: int, trained: int, config: ShardConfig = CONFIG) -> str:
        return context_line(config, cells, trained, need(GIB, 4 * GIB), FreeMemory(host=18 * GIB))

    assert line(131_072, 131_072) == "context 131,072 cells (trained for 131,072; 4.0 GiB of KV on host, 18.0 GiB free)"
    assert line(8192, 131_072).startswith("context 8,192 cells (as many of the trained 131,072 as fit; ")
    assert line(512, 131_072, ShardConfig(model="m.gguf", ctx_size=512)).startswith("context 512 cells (as -c says; ")
    assert context_line(CONFIG, 8192, 8192, MemoryNeed(), FreeMemory(host=None)) == (
        "context 8,192 cells (trained for 8,192)"
    )


@pytest.mark.parametrize(("shares", "expected_mib"), [(2, 10 + 45), (4, 10 + 22)])
def test_shards_of_one_host_divide_what_the_weights_leave(tmp_path: Path, shares: int, expected_mib: int) -> None:
    from caravan_serve.shard_flags import memory_share

    own = tmp_path / "a.gguf"
    own.write_bytes(b"")
    with own.open("r+b") as file:
        file.truncate(10 << 20)
    assert memory_share([own], own, shares, 100 << 20) == {"fit_host": expected_mib}
    assert memory_share([own], own, shares, 5 << 20) == {"fit_host": 10}, "the weights are mapped once"
    assert memory_share([own, tmp_path / "missing.gguf"], own, shares, 100 << 20) == {"fit_host": expected_mib}

"""Copying, parking, taking over and swapping on real models, compared with a sequence that runs alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from caravan_shard.backends.base import Prefix, Saving
from caravan_shard.kv_layout import KvLayout
from caravan_shard.protocol.commands import SwapInEntry, SwapOutEntry
from caravan_testing.shard_builders import first_chunk
from caravan_testing.shard_models import DEMO_MODEL, WINDOW_MODEL, ModelDriver, fetched

# The default time limit is too short for fetching a model.
pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NEW_TOKENS = 10
CELLS = 3072


@dataclass
class Shard:
    """A driver, a prompt, the output that it has alone, and the position at which tests cut the prompt."""

    driver: ModelDriver
    prompt: list[int]
    other: list[int]
    expected: list[int]
    cut: int

    def check(self, sequence_id: int) -> None:
        self.driver.check_same(self.prompt, self.expected, self.driver.output[sequence_id])

    def finish(self, sequence_id: int) -> None:
        self.driver.decode([sequence_id])
        self.check(sequence_id)

    def start_behind(self, prefix: Prefix, sequence_id: int) -> None:
        """Start the prompt with a copied prefix of it."""
        rest = self.prompt[prefix.length :]
        self.driver.prefill(first_chunk(sequence_id, rest, copy=prefix, max_new=NEW_TOKENS, ignore_eos=True))

    def neighbours(self, *sequence_ids: int) -> None:
        """Start and advance other sequences."""
        for sequence_id in sequence_ids:
            self.driver.prefill_long(sequence_id, self.other[:90], max_new=NEW_TOKENS)
        self.driver.decode(sequence_ids, steps=5)


CASES = {
    "demo-unified": (DEMO_MODEL, KvLayout.UNIFIED, 120),
    "demo-split": (DEMO_MODEL, KvLayout.SPLIT, 120),
    # The prompt is longer than the window.
    "window-unified": (WINDOW_MODEL, KvLayout.UNIFIED, 600),
    "window-split": (WINDOW_MODEL, KvLayout.SPLIT, 600),
}
UNIFIED = pytest.mark.parametrize("loaded", [name for name in CASES if name.endswith("unified")], indirect=True)


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest) -> Iterator[Shard]:
    """A model in a layout, with the output of the prompt when it runs alone."""
    model, layout, length = CASES[request.param]
    driver = ModelDriver(fetched(model), ctx_size=CELLS, kv_layout=layout.value)
    prompt = driver.tokens(" ".join(f"Number {number} is followed by {number + 1}." for number in range(200)))[:length]
    other = driver.tokens(" ".join(f"My {number}. friend likes the colour blue." for number in range(200)))[:length]
    expected = driver.alone(prompt, NEW_TOKENS)
    yield Shard(driver, prompt, other, expected, cut=length * 3 // 5)
    driver.engine.close()


@pytest.fixture
def shard(loaded: Shard) -> Shard:
    """The shard, empty."""
    loaded.driver.engine.release_all()
    return loaded


def test_a_copied_part_continues_like_a_computed_one(shard: Shard) -> None:
    shard.driver.prefill_long(1, shard.prompt[: shard.cut] + shard.other[:90], max_new=NEW_TOKENS)
    shard.driver.decode([1], steps=3)
    shard.start_behind(Prefix(source_id=1, length=shard.cut), 0)
    shard.driver.keep(0)
    shard.neighbours(2)
    shard.finish(0)


def test_a_parked_prefix_serves_several(shard: Shard) -> None:
    shard.driver.prefill_long(1, shard.prompt + shard.other[:40], max_new=NEW_TOKENS)
    shard.driver.prefill(park={1: len(shard.prompt) - 1})
    shard.neighbours(2)
    shard.start_behind(Prefix(source_id=1, length=len(shard.prompt) - 1), 0)
    shard.driver.prefill(park={1: shard.cut})
    shard.start_behind(Prefix(source_id=1, length=shard.cut), 3)
    shard.driver.decode([0, 3])
    outputs = shard.driver.output[0], shard.driver.output[3]
    for output in outputs:
        shard.driver.check_same(shard.prompt, shard.expected, output)


def test_a_sequence_is_taken_over_in_place(shard: Shard) -> None:
    shard.driver.prefill_long(0, shard.prompt[: shard.cut] + shard.other[:50], max_new=NEW_TOKENS)
    shard.neighbours(1)
    shard.driver.decode([0], steps=4)
    # Another sequence copies a shorter prefix in the same step.
    short = Prefix(source_id=0, length=shard.cut - 7)
    rest = shard.prompt[shard.cut - 7 :]
    shard.driver.prefill(
        first_chunk(
            0,
            shard.prompt[shard.cut : shard.cut + 30],
            copy=Prefix(source_id=0, length=shard.cut),
            total=len(shard.prompt),
            last=False,
            max_new=NEW_TOKENS,
            ignore_eos=True,
        ),
        first_chunk(2, rest[:30], copy=short, total=len(shard.prompt), last=False, max_new=NEW_TOKENS, ignore_eos=True),
    )
    assert [shard.driver.backend.length(key) for key in (0, 2)] == [shard.cut + 30, shard.cut + 23]
    shard.driver.prefill(park={0: shard.cut + 30, 2: shard.cut + 23})
    shard.start_behind(Prefix(source_id=0, length=shard.cut + 30), 0)
    shard.start_behind(Prefix(source_id=2, length=shard.cut + 23), 2)
    shard.driver.decode([0, 2])
    output = shard.driver.output[2]
    shard.check(0)
    shard.driver.check_same(shard.prompt, shard.expected, output)


def test_a_swapped_sequence_continues_and_can_be_cut_back(shard: Shard) -> None:
    driver = shard.driver
    driver.prefill_long(0, shard.prompt, max_new=NEW_TOKENS)
    driver.decode([0], steps=3)
    saved = driver.swap_out(SwapOutEntry(sequence_id=0, handle=1)).saved
    if driver.backend.capacity.saving is Saving.NOTHING:
        assert saved == [False]
        assert driver.engine.swap_bytes == 0
        return
    shard.neighbours(1, 2)
    driver.output[3] = driver.output[0]
    assert driver.swap_in(SwapInEntry(handle=1, sequence_id=3)) == [True]
    driver.decode([1, 3])
    shard.neighbours(0)
    driver.prefill(park={3: shard.cut}, release=[1, 2])
    output = driver.output.pop(3)
    shard.start_behind(Prefix(source_id=3, length=shard.cut), 3)
    shard.finish(3)
    driver.check_same(shard.prompt, shard.expected, output)


@UNIFIED
def test_a_suffix_is_restored_behind_a_prefix(shard: Shard) -> None:
    driver = shard.driver
    driver.prefill_long(1, shard.prompt, max_new=NEW_TOKENS)
    shard.start_behind(Prefix(source_id=1, length=shard.cut), 0)
    driver.decode([0], steps=3)
    before = driver.engine.free_cells
    assert driver.swap_out(SwapOutEntry(sequence_id=0, handle=1, start=shard.cut)).saved == [True]
    driver.prefill(park={1: shard.cut})
    shard.neighbours(2)
    driver.output[3] = driver.output[0]
    entry = SwapInEntry(handle=1, sequence_id=3, copy=Prefix(source_id=1, length=shard.cut))
    assert driver.swap_in(entry) == [True]
    driver.prefill(release=[1, 2])
    assert driver.engine.free_cells == before + len(shard.prompt) - shard.cut
    driver.decode([3])
    output = driver.output.pop(3)
    # The sequence is cut back within the prefix and within the suffix, so the cells of both must be restored.
    for length in (shard.cut + 11, shard.cut - 11):
        shard.start_behind(Prefix(source_id=3, length=length), 0)
        driver.prefill(release=[0])
    shard.start_behind(Prefix(source_id=3, length=shard.cut + 11), 3)
    shard.finish(3)
    driver.check_same(shard.prompt, shard.expected, output)


@pytest.mark.parametrize(("model", "cells"), [(DEMO_MODEL, 256), (WINDOW_MODEL, 768)], ids=["demo", "window"])
def test_a_state_that_does_not_fit_is_neither_saved_nor_restored(model: Path, cells: int) -> None:
    driver = ModelDriver(fetched(model), ctx_size=cells)
    words = driver.tokens("word " * cells)[: cells - 90]
    driver.prefill_long(0, words[:100], max_new=1)
    assert driver.backend.save(0, 0, 1_000) is None
    state = driver.backend.save(0, 10, 1 << 30)
    assert state is not None
    driver.engine.release_all()
    driver.prefill_long(1, words, max_new=1)
    assert driver.backend.restore(0, state, None)
    driver.backend.trim(0, 0)
    driver.prefill(first_chunk(2, words[:1], max_new=1))
    assert not driver.backend.restore(0, state, None)
    assert driver.backend.length(0) == 0
    driver.prefill(first_chunk(0, words[:89], max_new=1))
    driver.engine.close()


@pytest.mark.parametrize("loaded", ["window-unified"], indirect=True)
def test_neighbours_take_no_cell_of_a_window(shard: Shard) -> None:
    driver = shard.driver
    # Releasing a sequence leaves a gap in front of the next one's cells, where llama.cpp searches once the gap is full.
    for sequence_id in range(3):
        driver.prefill_long(sequence_id, shard.prompt + shard.other[:60], max_new=NEW_TOKENS)
    driver.prefill(release=[0])
    driver.prefill_long(0, (shard.other * 2)[: len(shard.prompt) + 30], max_new=80)
    driver.decode([0])
    assert [driver.first_position(key) for key in range(3)] == [0, 0, 0]
    driver.prefill(park={1: shard.cut}, release=[0])
    shard.start_behind(Prefix(source_id=1, length=shard.cut), 3)
    shard.finish(3)

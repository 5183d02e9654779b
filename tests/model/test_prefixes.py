"""Copying, parking, taking over, saving and loading with llama.cpp, compared with a sequence that runs alone.

All cases run on models with random weights. Of the cases of real ones, a single one is not slow: "demo-auto".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_testing.shard_builders import first_chunk, load_entry, save_entry
from caravan_testing.shard_models import (
    DEMO_MODEL,
    PLAIN_MODEL,
    POSITIONS_MODEL,
    SMALL_WINDOW_MODEL,
    WINDOW_MODEL,
    ModelDriver,
    fetched,
)

pytestmark = pytest.mark.model

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

    def start_behind(self, prefix: PrefixCopy, sequence_id: int) -> None:
        """Start the prompt with a copied prefix of it."""
        rest = self.prompt[prefix.length :]
        self.driver.prefill(first_chunk(sequence_id, rest, copy=prefix, max_new=NEW_TOKENS, ignore_eos=True))

    def cells(self, sequence_id: int) -> list[bytes]:
        """Return the content of all cells of a sequence, by cache and tensor."""
        backend = self.driver.backend
        length = backend.length(sequence_id)
        state = backend.save(sequence_id, 0, length, 1 << 40, releasing=False)
        if self.driver.model == POSITIONS_MODEL:
            # As llama.cpp itself writes it: cells have more than a position where positions have several dimensions.
            state = backend._memory._whole_state(sequence_id)
        caches = [cache.cut(0, length) for cache in backend._memory.form.parse(state)]
        assert all(cache.extras[1:].any(axis=1).all() for cache in caches if self.driver.model == POSITIONS_MODEL)
        return [part.tobytes() for cache in caches for part in (*cache.rows, cache.extras)]

    def logits(self, sequence_id: int, tokens: list[int]) -> Floats:
        """Compute tokens behind what a sequence holds, cut it back again, and return the last logits."""
        backend = self.driver.backend
        start, count = backend.length(sequence_id), len(tokens)
        outputs = np.zeros(count, np.int8)
        outputs[-1] = 1
        positions = np.arange(start, start + count, dtype=np.int32)
        batch = TokenBatch(np.array(tokens, np.int32), positions, np.full(count, sequence_id, np.int32), outputs)
        assert backend.decode(batch) is DecodeOutcome.OK
        logits: Floats = backend.logits(1)[0].copy()
        assert backend.trim(sequence_id, start)
        return logits

    def has_room(self, sequence_id: int, cells: int) -> bool:
        """Whether llama.cpp has so many cells for a sequence that holds none. It holds none afterwards."""
        token, place = np.array(self.other[:1], np.int32), np.zeros(1, np.int32)
        batch = TokenBatch(token, place, np.full(1, sequence_id, np.int32), np.ones(1, np.int8))
        assert self.driver.backend.decode(batch) is DecodeOutcome.OK
        has_room = self.driver.backend._memory.fill_cells(sequence_id, cells)
        assert self.driver.backend.trim(sequence_id, 0)
        return bool(has_room)

    def neighbours(self, *sequence_ids: int) -> None:
        """Start and advance other sequences."""
        for sequence_id in sequence_ids:
            self.driver.prefill_long(sequence_id, self.other[:90], max_new=NEW_TOKENS)
        self.driver.decode(sequence_ids, steps=5)


# The model, its layout, whether attention is flash attention, and the tokens of the prompt.
CASES = {
    "plain-unified": (PLAIN_MODEL, KvLayout.UNIFIED, "on", 120),
    "plain-split": (PLAIN_MODEL, KvLayout.SPLIT, "on", 120),
    # Values are transposed.
    "plain-split-without-flash": (PLAIN_MODEL, KvLayout.SPLIT, "off", 120),
    # The prompt is longer than the window.
    "window-unified": (SMALL_WINDOW_MODEL, KvLayout.UNIFIED, "on", 200),
    "window-split": (SMALL_WINDOW_MODEL, KvLayout.SPLIT, "on", 200),
    "window-split-without-flash": (SMALL_WINDOW_MODEL, KvLayout.SPLIT, "off", 200),
    # A cell has more than its position, and its rows.
    "positions-unified": (POSITIONS_MODEL, KvLayout.UNIFIED, "on", 300),
    "positions-split": (POSITIONS_MODEL, KvLayout.SPLIT, "on", 300),
    "positions-split-without-flash": (POSITIONS_MODEL, KvLayout.SPLIT, "off", 300),
    "demo-unified": (DEMO_MODEL, KvLayout.UNIFIED, "on", 120),
    "demo-split": (DEMO_MODEL, KvLayout.SPLIT, "on", 120),
    "demo-split-without-flash": (DEMO_MODEL, KvLayout.SPLIT, "off", 120),
    "gemma-unified": (WINDOW_MODEL, KvLayout.UNIFIED, "on", 600),
    "gemma-split": (WINDOW_MODEL, KvLayout.SPLIT, "on", 600),
    "gemma-split-without-flash": (WINDOW_MODEL, KvLayout.SPLIT, "off", 600),
    # These begin split.
    "plain-auto": (PLAIN_MODEL, None, "on", 120),
    "plain-auto-without-flash": (PLAIN_MODEL, None, "off", 120),
    "window-auto": (SMALL_WINDOW_MODEL, None, "on", 200),
    "positions-auto": (POSITIONS_MODEL, None, "on", 300),
    "demo-auto": (DEMO_MODEL, None, "on", 120),
    "demo-auto-without-flash": (DEMO_MODEL, None, "off", 120),
    "gemma-auto": (WINDOW_MODEL, None, "on", 600),
}


def cases(*names: str) -> list[Any]:
    """Return the parameters of these cases."""
    slow = [name for name in names if name.startswith(("demo", "gemma")) and name != "demo-auto"]
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in names]


AUTOMATIC = [name for name in CASES if name.endswith("auto")]
AUTO = pytest.mark.parametrize("loaded", cases(*AUTOMATIC), indirect=True)


@pytest.fixture(scope="module", params=cases(*(name for name in CASES if name not in AUTOMATIC)))
def loaded(request: pytest.FixtureRequest) -> Iterator[Shard]:
    """A model in a layout, with the output of the prompt when it runs alone."""
    model, layout, flash_attn, length = CASES[request.param]
    kv_layout = layout.value if layout else "auto"
    driver = ModelDriver(fetched(model), ctx_size=CELLS, kv_layout=kv_layout, flash_attn=flash_attn)
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
    shard.start_behind(PrefixCopy(source_id=1, length=shard.cut), 0)
    shard.driver.keep(0)
    shard.neighbours(2)
    shard.finish(0)


def test_a_parked_prefix_serves_several(shard: Shard) -> None:
    shard.driver.prefill_long(1, shard.prompt + shard.other[:40], max_new=NEW_TOKENS)
    shard.driver.prefill(park={1: len(shard.prompt) - 1})
    shard.neighbours(2)
    shard.start_behind(PrefixCopy(source_id=1, length=len(shard.prompt) - 1), 0)
    shard.driver.prefill(park={1: shard.cut})
    shard.start_behind(PrefixCopy(source_id=1, length=shard.cut), 3)
    shard.driver.decode([0, 3])
    outputs = shard.driver.output[0], shard.driver.output[3]
    for output in outputs:
        shard.driver.check_same(shard.prompt, shard.expected, output)


def test_a_sequence_is_taken_over_in_place(shard: Shard) -> None:
    shard.driver.prefill_long(0, shard.prompt[: shard.cut] + shard.other[:50], max_new=NEW_TOKENS)
    shard.neighbours(1)
    shard.driver.decode([0], steps=4)
    # Another sequence copies a shorter prefix in the same step.
    short = PrefixCopy(source_id=0, length=shard.cut - 7)
    rest = shard.prompt[shard.cut - 7 :]
    shard.driver.prefill(
        first_chunk(
            0,
            shard.prompt[shard.cut : shard.cut + 30],
            copy=PrefixCopy(source_id=0, length=shard.cut),
            total=len(shard.prompt),
            last=False,
            max_new=NEW_TOKENS,
            ignore_eos=True,
        ),
        first_chunk(2, rest[:30], copy=short, total=len(shard.prompt), last=False, max_new=NEW_TOKENS, ignore_eos=True),
    )
    assert [shard.driver.backend.length(key) for key in (0, 2)] == [shard.cut + 30, shard.cut + 23]
    shard.driver.prefill(park={0: shard.cut + 30, 2: shard.cut + 23})
    shard.start_behind(PrefixCopy(source_id=0, length=shard.cut + 30), 0)
    shard.start_behind(PrefixCopy(source_id=2, length=shard.cut + 23), 2)
    shard.driver.decode([0, 2])
    output = shard.driver.output[2]
    shard.check(0)
    shard.driver.check_same(shard.prompt, shard.expected, output)


def test_loaded_cells_are_the_computed_ones(shard: Shard) -> None:
    """From several runs, cut at odd positions, into other cells: these hold the same bits."""
    driver, prompt = shard.driver, shard.prompt
    place = len(prompt) - 1
    driver.prefill_long(0, prompt, max_new=NEW_TOKENS)
    shard.neighbours(1)
    # A sequence that is saved and stays can continue.
    assert driver.save(save_entry(0, prompt[: shard.cut], 0, 7), save_entry(0, prompt, shard.cut // 2)) == [True, True]
    driver.prefill(park={0: place})
    cells, computed = shard.cells(0), shard.logits(0, prompt[place:])
    assert driver.save(save_entry(0, prompt[:place], place - 30, release=True)) == [True]
    shard.neighbours(0)
    thirds = (prompt[: shard.cut], shard.cut - 13), (prompt, place - 11), (prompt[:place], place)
    assert driver.load(load_entry(3, prompt[:place], *thirds)) == [True]
    driver.prefill(release=[0, 1])
    assert shard.cells(3) == cells
    loaded = shard.logits(3, prompt[place:])
    if driver.backend.capacity.current.layout is KvLayout.SPLIT:
        # The cells are in the order in which they were computed, so sums are added in order.
        assert np.array_equal(loaded, computed)
    np.testing.assert_allclose(loaded, computed, atol=4 * driver.tie_logits)
    # All cells are there: the sequence can be cut back anywhere.
    for length in (shard.cut + 11, shard.cut - 11):
        shard.start_behind(PrefixCopy(source_id=3, length=length), 2)
        shard.finish(2)
        driver.engine.release_all()
        assert driver.load(load_entry(3, prompt[:place], *thirds)) == [True]
    # The rest must fit into one step.
    few = max(5, len(prompt) - 500)
    driver.engine.release_all()
    assert driver.load(load_entry(1, prompt[:few], (prompt[: shard.cut], few))) == [True]
    shard.start_behind(PrefixCopy(source_id=1, length=few - 1), 1)
    shard.finish(1)


@pytest.mark.parametrize(
    "loaded",
    cases("plain-unified", "window-unified", "positions-unified", "demo-unified", "gemma-unified"),
    indirect=True,
)
def test_loaded_sequences_begin_with_the_cells_of_another(shard: Shard) -> None:
    driver, prompt, cut = shard.driver, shard.prompt, shard.cut
    place = len(prompt) - 1
    # Those of other tests.
    driver.engine.runs.drop([run.key for run, _ in driver.engine.runs.list_runs()])
    driver.prefill_long(0, prompt, max_new=NEW_TOKENS)
    driver.prefill(park={0: place})
    cells = shard.cells(0)
    assert driver.save(save_entry(0, prompt[:place], release=True)) == [True]
    # What the source computes behind the common part is in other cells.
    driver.prefill_long(1, prompt[:cut] + shard.other[:60], max_new=NEW_TOKENS)
    driver.decode([1], steps=3)
    held = driver.backend.length(1)
    copy = PrefixCopy(source_id=1, length=cut)
    wanted = [load_entry(key, prompt[:place], (prompt[:place], place), copy=copy) for key in (2, 3)]
    assert driver.load(*wanted) == [True, True]
    assert driver.engine.free_cells == CELLS - held - 2 * (place - cut)
    # llama.cpp counts as many cells: it has room for so many more, and no more.
    assert shard.has_room(0, driver.engine.free_cells)
    assert not shard.has_room(0, driver.engine.free_cells + 1)
    for after, before in zip(shard.cells(2), cells, strict=True):
        own = cut * len(before) // place
        assert after[own:] == before[own:]
    driver.keep(2, 3)
    shard.neighbours(0)
    shard.start_behind(PrefixCopy(source_id=2, length=place), 2)
    shard.start_behind(PrefixCopy(source_id=3, length=cut + 5), 3)
    driver.decode([2, 3])
    outputs = driver.output[2], driver.output[3]
    for output in outputs:
        driver.check_same(prompt, shard.expected, output)


@AUTO
def test_sequences_move_between_the_layouts(shard: Shard) -> None:
    driver, prompt = shard.driver, shard.prompt
    driver.prefill_long(0, prompt, max_new=NEW_TOKENS)
    driver.prefill_long(1, prompt[: shard.cut] + shard.other[:20], max_new=NEW_TOKENS)
    driver.prefill(park={1: shard.cut})
    driver.save(save_entry(1, prompt[: shard.cut]))
    cells = shard.cells(1)
    outputs = []
    for layout in (KvLayout.UNIFIED, KvLayout.SPLIT):
        driver.decode([0], steps=3)
        assert driver.set_layout(layout) == []
        assert driver.backend.capacity.current.layout is layout
        assert driver.backend.capacity.current == driver.backend._contexts.limits(layout)
        # Unified, they share their equal beginnings without the last token.
        shared = shard.cut - 1 if layout is KvLayout.UNIFIED else 0
        assert driver.engine.free_cells == CELLS - sum(driver.backend.length(key) for key in (0, 1)) + shared
        assert shard.cells(1) == cells
        # What was saved in one layout is loaded in the other.
        assert driver.load(load_entry(3, prompt[: shard.cut - 9], (prompt[: shard.cut], shard.cut - 9))) == [True]
        for source, length in ((1, shard.cut - 20), (3, shard.cut - 9)):
            shard.start_behind(PrefixCopy(source_id=source, length=length), 2)
            driver.decode([2])
            outputs.append(driver.output.pop(2))
            driver.prefill(release=[2])
        driver.prefill(release=[3])
    driver.decode([0])
    outputs.append(driver.output[0])
    for output in outputs:
        driver.check_same(prompt, shard.expected, output)


@pytest.mark.parametrize("loaded", cases("window-unified", "gemma-unified"), indirect=True)
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
    shard.start_behind(PrefixCopy(source_id=1, length=shard.cut), 3)
    shard.finish(3)

"""Models with recurrent layers, alone or beside attention: their state cannot be cut back, only copied as a whole."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Load, PrefixCopy
from caravan_proto.messages.limits import KvLayout, Saving
from caravan_shard.backends.base import CellSlice
from caravan_shard.backends.llama.memory.recurrent import RecurrentMemory
from caravan_shard.protocol.results import Refusal
from caravan_testing.shard_builders import (
    first_chunk,
    load_entry,
    next_chunk,
    row,
    save_entry,
    state_entry,
    with_state,
)
from caravan_testing.shard_models import (
    CONVOLUTION_MODEL,
    DELTA_MODEL,
    DELTA_POSITIONS_MODEL,
    HYBRID_MODEL,
    ModelDriver,
    fetched,
)
from caravan_testing.shard_tiny_mamba import write_tiny_mamba

pytestmark = pytest.mark.model

NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {"max_new": NEW_TOKENS, "ignore_eos": True}


KINDS = [(name, layout) for name in ("mamba", "granitehybrid") for layout in KvLayout]
KINDS += [("qwen3next", KvLayout.UNIFIED), ("qwen35", KvLayout.SPLIT), ("lfm2", KvLayout.UNIFIED)]
_FETCHED = {
    "granitehybrid": HYBRID_MODEL,
    "qwen3next": DELTA_MODEL,
    "qwen35": DELTA_POSITIONS_MODEL,
    "lfm2": CONVOLUTION_MODEL,
}


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1].value}")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelDriver]:
    """A shard with a tiny model, in each layout."""
    name, layout = request.param
    if name == "mamba":
        model = write_tiny_mamba(tmp_path_factory.mktemp("model") / "tiny-mamba.gguf")
    else:
        model = fetched(_FETCHED[name])
    driver = ModelDriver(model, ctx_size=1024, kv_layout=layout.value)
    assert driver.backend.facts.architecture == name
    yield driver
    driver.engine.close()


@pytest.fixture
def driver(loaded: ModelDriver) -> ModelDriver:
    """The shard, empty."""
    loaded.engine.release_all()
    return loaded


def prompt(driver: ModelDriver) -> list[int]:
    return driver.tokens("a prompt for a model that reads it once")


def save(driver: ModelDriver, sequence_id: int, tokens: list[int], start: int = 0, *, release: bool = False) -> None:
    """Save the cells of a sequence from ``start`` on, and its state."""
    entries = (save_entry(sequence_id, tokens, start), state_entry(sequence_id, tokens, release=release))
    assert driver.save(*entries) == [True, True]


def test_capacity_says_that_only_whole_sequences_are_shared(driver: ModelDriver) -> None:
    assert driver.backend.capacity.current.whole_only
    assert driver.backend.capacity.current.saving is Saving.WITH_STATE
    # The other tests need a model whose output depends on early tokens.
    tokens = prompt(driver)
    assert driver.alone(tokens, NEW_TOKENS) != driver.alone([tokens[0], tokens[1] + 1, *tokens[2:]], NEW_TOKENS)


def test_a_sequence_is_copied_whole_while_it_continues(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    tail = driver.tokens(" and a tail")[1:]
    expected = driver.alone(tokens, NEW_TOKENS)
    expected_tail = driver.alone(tokens + tail, NEW_TOKENS)
    driver.prefill(first_chunk(1, tokens, **OPTIONS))
    whole = PrefixCopy(source_id=1, length=len(tokens))
    driver.prefill(first_chunk(0, tail, copy=whole, **OPTIONS), first_chunk(3, tail, copy=whole, **OPTIONS), riders=[1])
    driver.decode([0, 1, 3])
    assert driver.output[1] == expected
    assert driver.output[0] == driver.output[3] == expected_tail


def test_a_parked_sequence_is_copied_and_taken_over_whole(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    tail = driver.tokens(" and a tail")[1:]
    expected = driver.alone(tokens + tail, NEW_TOKENS)
    driver.prefill(first_chunk(2, tokens, **OPTIONS))
    driver.prefill(park={2: len(tokens)})
    driver.prefill(first_chunk(0, driver.tokens("a neighbour"), **OPTIONS))
    whole = PrefixCopy(source_id=2, length=len(tokens))
    driver.prefill(first_chunk(2, tail, copy=whole, **OPTIONS), first_chunk(1, tail, copy=whole, **OPTIONS), riders=[0])
    driver.decode([0, 1, 2])
    assert driver.output[1] == driver.output[2] == expected


def test_a_saved_sequence_continues(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    expected = driver.alone(tokens, NEW_TOKENS)
    driver.prefill(first_chunk(2, tokens, **OPTIONS))
    driver.decode([2], steps=4)
    known = [*tokens, *expected[:5]]
    save(driver, 2, known[:-1], release=True)
    for key in (0, 2, 3):
        driver.prefill(first_chunk(key, driver.tokens("neighbours"), **OPTIONS))
    driver.decode([0, 2, 3], steps=2)
    assert driver.load(with_state(load_entry(1, known[:-1]), known[:-1])) == [True]
    whole = PrefixCopy(source_id=1, length=len(known) - 1)
    driver.prefill(first_chunk(1, known[-1:], copy=whole, max_new=NEW_TOKENS - 5, ignore_eos=True))
    driver.decode([0, 1, 2, 3])
    assert driver.output[1] == expected[5:]


def test_a_fork_and_its_source_continue_from_a_checkpoint(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    tail, other = driver.tokens(" and a tail")[1:], driver.tokens(" or another end")[1:]
    expected, expected_other = driver.alone(tokens + tail, NEW_TOKENS), driver.alone(tokens + other, NEW_TOKENS)
    # A chunk ends at the checkpoint, where the sequence is saved while it goes on.
    driver.prefill(first_chunk(2, tokens, total=len(tokens + tail), last=False, **OPTIONS))
    save(driver, 2, tokens)
    driver.prefill(next_chunk(2, len(tokens), tail))
    assert driver.load(with_state(load_entry(0, tokens), tokens)) == [True]
    whole = PrefixCopy(source_id=0, length=len(tokens))
    driver.prefill(
        first_chunk(1, tail, copy=whole, **OPTIONS), first_chunk(3, other, copy=whole, **OPTIONS), riders=[2]
    )
    driver.decode([1, 2, 3])
    assert driver.output[1] == driver.output[2] == expected
    assert driver.output[3] == expected_other


def test_what_is_saved_grows_with_what_is_new(driver: ModelDriver) -> None:
    """Cells are saved once, in runs that follow each other, and cut anywhere. Only the state is whole."""
    tokens = driver.tokens("another prompt, that is saved more than once while it is computed")
    places = [len(tokens) // 3, 2 * len(tokens) // 3, len(tokens)]
    expected = {place: driver.alone(tokens[:place], NEW_TOKENS) for place in places}
    before, start = driver.engine.runs.used.memory, 0
    for place in places:
        chunk = next_chunk(2, start, tokens[start:place], last=False)
        if not start:
            chunk = first_chunk(2, tokens[:place], total=len(tokens) + 1, last=False, **OPTIONS)
        driver.prefill(chunk)
        save(driver, 2, tokens[:place], start)
        start = place
    form = driver.backend._memory.form
    streams = driver.backend._memory._streams
    cells = [form.cells_bytes(streams, end - first) for first, end in pairwise([0, *places])]
    assert driver.engine.runs.used.memory - before == sum(cells) + 3 * form.block_bytes
    for place in places:
        runs = [(tokens[:end], end) for end in places if end <= place]
        assert driver.load(with_state(load_entry(1, tokens[:place], *runs), tokens[:place])) == [True]
        whole = PrefixCopy(source_id=1, length=place)
        driver.prefill(first_chunk(1, expected[place][:1], copy=whole, max_new=NEW_TOKENS - 1, ignore_eos=True))
        driver.decode([1])
        assert driver.output.pop(1) == expected[place][1:]
        driver.keep(2)


def test_loaded_sequences_share_cells_with_one_that_has_gone_on(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    tail, other = driver.tokens(" and a tail")[1:], driver.tokens(" or another end")[1:]
    expected = driver.alone(tokens + tail, NEW_TOKENS), driver.alone(tokens + other, NEW_TOKENS)
    driver.prefill(first_chunk(2, tokens, total=len(tokens + tail), last=False, **OPTIONS))
    save(driver, 2, tokens)
    driver.prefill(next_chunk(2, len(tokens), tail))
    driver.decode([2], steps=3)
    copy = PrefixCopy(source_id=2, length=len(tokens) - 1)
    entries = [with_state(load_entry(key, tokens, copy=copy), tokens) for key in (0, 1)]
    if driver.backend.capacity.current.layout is KvLayout.SPLIT:
        assert isinstance(driver.engine.load(Load(entries=entries), 0), Refusal)
        return
    assert driver.load(*entries) == [True, True]
    driver.decode([2], steps=2)
    for key, rest in ((0, tail), (1, other)):
        whole = PrefixCopy(source_id=key, length=len(tokens))
        driver.prefill(first_chunk(key, rest, copy=whole, **OPTIONS), riders=[2])
    # The others keep what they share with it.
    driver.keep(0, 1)
    driver.decode([0, 1])
    assert (driver.output[0], driver.output[1]) == expected


def test_the_layout_is_unified_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    driver = ModelDriver(write_tiny_mamba(tmp_path / "tiny-mamba.gguf"), ctx_size=1024)
    assert [limits.layout for limits in driver.backend.capacity.layouts] == [KvLayout.UNIFIED]
    driver.engine.close()


@pytest.mark.parametrize("shares", [False, True])
def test_nothing_is_saved_if_a_restored_state_computes_otherwise(
    shares: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restore = RecurrentMemory.restore

    def forget_the_last_numbers(
        memory: RecurrentMemory, sequence_id: int, slices: Sequence[CellSlice], shared: PrefixCopy | None = None
    ) -> bool:
        damaged = [replace(one, state=one.state.copy()) for one in slices]
        if (shared is not None) is shares:
            damaged[-1].state[-1024:] = 0
        return restore(memory, sequence_id, damaged, shared)

    monkeypatch.setattr(RecurrentMemory, "restore", forget_the_last_numbers)
    driver = ModelDriver(fetched(HYBRID_MODEL), ctx_size=1024)
    assert driver.backend.capacity.current.saving is Saving.NOTHING
    subject = "of a restored sequence of this model that has cells of another" if shares else "after a restored state"
    assert f"the logits {subject}" in caplog.text
    assert "are others than before" in caplog.text
    driver.engine.close()


def test_a_damaged_state_is_not_loaded(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    driver.prefill(first_chunk(1, tokens, **OPTIONS))
    length = len(tokens)
    cells, state = (driver.backend.save(1, start, length, 1 << 30, releasing=False) for start in (0, length))
    driver.engine.release_all()
    damaged = state.copy()
    damaged[0] += 1  # the number of cells
    for bad_cells, bad, end in (
        (cells, damaged, length),
        (cells, state, length - 1),
        (cells, state[:-1], length),
        (cells[:-1], state, length),
    ):
        slices = [
            CellSlice(state=bad_cells, first=0, start=0, end=end),
            CellSlice(state=bad, first=end, start=end, end=end),
        ]
        assert not driver.backend.restore(1, slices)
        assert driver.backend.length(1) == 0


def test_parts_are_refused_and_nothing_changes(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    expected = driver.alone(tokens, NEW_TOKENS)
    driver.prefill(first_chunk(0, tokens, **OPTIONS))
    part = PrefixCopy(source_id=0, length=len(tokens) - 1)
    answers = [
        driver.try_prefill(first_chunk(1, tokens[-1:], copy=part, **OPTIONS)),
        driver.try_prefill(first_chunk(0, tokens[-1:], copy=part, **OPTIONS)),
        driver.try_prefill(park={0: part.length}),
    ]
    errors = [answer.error for answer in answers if isinstance(answer, Refusal)]
    assert errors == [ShardError.WRONG_POSITION] * 3
    # The state of a sequence that has grown since the router decided is not saved.
    assert driver.save(save_entry(0, tokens[:-1]), state_entry(0, tokens[:-1])) == [True, False]
    driver.decode([0])
    assert driver.output[0] == expected


def test_rows_are_kept_whole_or_released(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    expected = driver.alone(tokens, NEW_TOKENS)
    driver.evaluate(row(1, tokens[:-1]))
    whole = PrefixCopy(source_id=1, length=len(tokens) - 1)
    answer = driver.try_evaluate(row(0, tokens[-1:], copy=whole, keep_length=whole.length))
    assert isinstance(answer, Refusal)
    assert answer.error is ShardError.WRONG_POSITION
    driver.evaluate(row(0, tokens[-1:], copy=whole, keep_length=0))
    assert driver.keep(1).sequence_ids == [1]
    found = driver.evaluate(row(1, tokens[-1:], whole.length, top_n_tokens=1))
    assert found.top_token_ids == expected[:1]


def test_forks_of_a_prompt_fit_where_it_fits_once() -> None:
    driver = ModelDriver(fetched(HYBRID_MODEL), ctx_size=256, kv_layout="unified")
    tokens = driver.tokens("a long prompt " * 80)[:150]
    expected = driver.alone([*tokens, tokens[0]], NEW_TOKENS)
    driver.prefill(first_chunk(2, tokens, total=len(tokens) + 1, last=False, **OPTIONS))
    save(driver, 2, tokens)
    forks = (0, 1, 3)
    copy = PrefixCopy(source_id=2, length=len(tokens) - 1)
    assert driver.load(*(with_state(load_entry(key, tokens, copy=copy), tokens) for key in forks)) == [True] * 3
    assert driver.engine.free_cells == 256 - len(tokens) - len(forks)
    whole = {key: PrefixCopy(source_id=key, length=len(tokens)) for key in forks}
    driver.prefill(*(first_chunk(key, tokens[:1], copy=whole[key], **OPTIONS) for key in forks))
    driver.decode(list(forks))
    assert [driver.output[key] for key in forks] == [expected] * 3
    driver.engine.close()


@pytest.mark.parametrize("layout", KvLayout)
def test_what_was_saved_in_one_layout_is_loaded_in_the_other(layout: KvLayout) -> None:
    here, there = (ModelDriver(fetched(HYBRID_MODEL), ctx_size=1024, kv_layout=one.value) for one in (*KvLayout,))
    if layout is KvLayout.SPLIT:
        here, there = there, here
    assert here.backend.contents.state_fingerprint == there.backend.contents.state_fingerprint
    tokens, tail = prompt(here), here.tokens(" and a tail")[1:]
    expected = there.alone(tokens + tail, NEW_TOKENS)
    here.prefill(first_chunk(3, tokens, **OPTIONS))
    save(here, 3, tokens)
    for run, _ in here.engine.runs.list_runs():
        found = here.engine.runs.peek(run.key)
        assert found is not None
        there.engine.runs.put(*found)
    assert there.load(with_state(load_entry(1, tokens), tokens)) == [True]
    there.prefill(first_chunk(1, tail, copy=PrefixCopy(source_id=1, length=len(tokens)), **OPTIONS))
    there.decode([1])
    assert there.output[1] == expected
    for driver in (here, there):
        driver.engine.close()

"""Models with recurrent layers, alone or beside attention: their state cannot be cut back, only copied as a whole."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import PrefixCopy, Save
from caravan_proto.messages.limits import KvLayout, Saving
from caravan_shard.backends.base import CellSlice
from caravan_shard.backends.llama.memory import LlamaMemory
from caravan_shard.protocol.results import Refusal
from caravan_testing.shard_builders import first_chunk, load_entry, next_chunk, row, save_entry
from caravan_testing.shard_models import HYBRID_MODEL, ModelDriver, fetched
from caravan_testing.shard_tiny_mamba import write_tiny_mamba

pytestmark = pytest.mark.model

NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {"max_new": NEW_TOKENS, "ignore_eos": True}


KINDS = [(name, layout) for name in ("mamba", "granitehybrid") for layout in KvLayout]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1].value}")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelDriver]:
    """A shard with a tiny model, in each layout."""
    name, layout = request.param
    if name == "mamba":
        model = write_tiny_mamba(tmp_path_factory.mktemp("model") / "tiny-mamba.gguf")
    else:
        model = fetched(HYBRID_MODEL)
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


def test_capacity_says_that_only_whole_sequences_are_shared_and_saved(driver: ModelDriver) -> None:
    assert driver.backend.capacity.current.whole_only
    assert driver.backend.capacity.current.saving is Saving.WHOLE_ONLY
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
    assert driver.save(save_entry(2, known[:-1], release=True)) == [True]
    for key in (0, 2, 3):
        driver.prefill(first_chunk(key, driver.tokens("neighbours"), **OPTIONS))
    driver.decode([0, 2, 3], steps=2)
    assert driver.load(load_entry(1, known[:-1])) == [True]
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
    assert driver.save(save_entry(2, tokens)) == [True]
    driver.prefill(next_chunk(2, len(tokens), tail))
    assert driver.load(load_entry(0, tokens)) == [True]
    whole = PrefixCopy(source_id=0, length=len(tokens))
    driver.prefill(
        first_chunk(1, tail, copy=whole, **OPTIONS), first_chunk(3, other, copy=whole, **OPTIONS), riders=[2]
    )
    driver.decode([1, 2, 3])
    assert driver.output[1] == driver.output[2] == expected
    assert driver.output[3] == expected_other


def test_the_layout_is_unified_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    driver = ModelDriver(write_tiny_mamba(tmp_path / "tiny-mamba.gguf"), ctx_size=1024)
    assert [limits.layout for limits in driver.backend.capacity.layouts] == [KvLayout.UNIFIED]
    driver.engine.close()


def test_nothing_is_saved_if_a_restored_state_computes_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restore = LlamaMemory.restore

    def forget_the_last_numbers(memory: LlamaMemory, sequence_id: int, slices: Sequence[CellSlice]) -> bool:
        damaged = [replace(one, state=one.state.copy()) for one in slices]
        damaged[0].state[-1024:] = 0
        return restore(memory, sequence_id, damaged)

    monkeypatch.setattr(LlamaMemory, "restore", forget_the_last_numbers)
    driver = ModelDriver(fetched(HYBRID_MODEL), ctx_size=1024)
    assert driver.backend.capacity.current.saving is Saving.NOTHING
    assert "the logits after a restored state of this model are others than before" in caplog.text
    driver.engine.close()


def test_a_damaged_state_is_not_loaded(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    driver.prefill(first_chunk(1, tokens, **OPTIONS))
    state = driver.backend.save(1, 0, len(tokens), 1 << 30, releasing=True)
    driver.engine.release_all()
    damaged = state.copy()
    damaged[-driver.backend._state_format.block_bytes] += 1  # the number of cells
    for bad, length in ((damaged, len(tokens)), (state, len(tokens) - 1), (state[:-1], len(tokens))):
        assert not driver.backend.restore(1, [CellSlice(state=bad, first=0, start=0, end=length)])
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
        driver.engine.save(Save(entries=[save_entry(0, tokens, 3)]), 0),
    ]
    errors = [answer.error for answer in answers if isinstance(answer, Refusal)]
    assert errors == [ShardError.WRONG_POSITION] * 4
    # A sequence that has grown since the router decided is not saved.
    assert driver.save(save_entry(0, tokens[:-1])) == [False]
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

"""Sequences that are swapped out and restored."""

from pathlib import Path

import pytest

from caravan_shard.backends.base import Prefix, PrefixSharing
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.kv_layout import KvLayout
from caravan_shard.protocol.commands import FilterBatch, SwapIn, SwapInEntry, SwapOut, SwapOutEntry
from caravan_shard.protocol.results import Holdings, Refusal, SwappedIn, SwappedOut
from caravan_shard.sampling.parameters import SamplingParameters
from caravan_shard.sequences.state_stores import DiskStore
from caravan_shard.sequences.swap import SwapSpace
from caravan_testing.shard_builders import EngineDriver, first_chunk, header, memory_swap, next_chunk, toy_prompt
from caravan_testing.toy_oracle import expected_output

PROMPT = toy_prompt("a prompt that is long enough")
SAMPLED = SamplingParameters(
    temperature=0.9,
    top_k=40,
    repetition_penalty=1.2,
    presence_penalty=0.2,
    dry_multiplier=0.8,
    xtc_probability=0.4,
    xtc_threshold=0.05,
    seed=11,
)
CELL_BYTES = 8


def out(sequence_id: int, handle: int, start: int = 0) -> SwapOutEntry:
    return SwapOutEntry(sequence_id=sequence_id, handle=handle, start=start)


def back(handle: int, sequence_id: int, source_id: int | None = None, length: int = 0) -> SwapInEntry:
    copy = Prefix(source_id=source_id, length=length) if source_id is not None else None
    return SwapInEntry(handle=handle, sequence_id=sequence_id, copy=copy)


@pytest.fixture(params=list(KvLayout), ids=lambda layout: layout.value)
def driver(request: pytest.FixtureRequest) -> EngineDriver:
    """Each layout in turn."""
    return EngineDriver(ToyBackend(cells=1024, layout=request.param))


@pytest.fixture
def unified() -> EngineDriver:
    """A shard with the unified layout, the only one that saves suffixes."""
    return EngineDriver(ToyBackend(cells=200))


def test_a_running_sequence_continues_under_another_id(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, sampling=SAMPLED, ignore_eos=True))
    driver.decode([0], steps=6)
    result = driver.swap_out(out(0, 77))
    assert result.saved == [True]
    assert result.written_bytes == result.used_bytes == CELL_BYTES * (len(PROMPT) + 6)
    assert driver.checked_free_cells() == 1024
    assert driver.engine.sequence_count == 0
    assert driver.engine.unfinished_count == 1
    driver.prefill(first_chunk(0, toy_prompt("meanwhile")))
    assert driver.swap_in(back(77, 5)) == [True]
    driver.checked_free_cells()
    driver.output[5] = expected_output(PROMPT, 50, sampling=SAMPLED, ignore_eos=True)[:7]
    driver.decode([0, 5])
    assert driver.output[5] == expected_output(PROMPT, 50, sampling=SAMPLED, ignore_eos=True)
    assert driver.output[0] == expected_output(toy_prompt("meanwhile"), 50)


def test_a_partly_prefilled_sequence_continues_with_its_next_chunk(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT[:9], total=len(PROMPT), last=False))
    assert driver.swap_out(out(0, 1)).saved == [True]
    assert driver.swap_in(back(1, 0)) == [True]
    driver.prefill(next_chunk(0, 9, PROMPT[9:]))
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT, 50)


def test_a_suffix_is_restored_behind_a_shared_prefix(unified: EngineDriver) -> None:
    tail = toy_prompt("its own")
    unified.prefill(first_chunk(0, PROMPT))
    unified.prefill(first_chunk(1, tail, copy=Prefix(source_id=0, length=12), ignore_eos=True), park={0: 12})
    unified.decode([1], steps=4)
    assert unified.swap_out(out(1, 5, start=12)).written_bytes == CELL_BYTES * (len(tail) + 4)
    assert unified.checked_free_cells() == 200 - 12
    assert unified.swap_in(back(5, 2, source_id=0, length=12)) == [True]
    assert unified.checked_free_cells() == 200 - 12 - len(tail) - 4
    # The prefix is shared again: it outlives its source, and the sequence can be cut back to it.
    unified.output[2] = unified.output[1]
    unified.keep(2)
    unified.decode([2])
    assert unified.output[2] == expected_output(PROMPT[:12] + tail, 50, ignore_eos=True)
    unified.prefill(first_chunk(2, tail, copy=Prefix(source_id=2, length=9)))
    unified.decode([2])
    assert unified.output[2] == expected_output(PROMPT[:9] + tail, 50)


def test_a_suffix_may_be_restored_behind_a_prefix_of_another_sequence(unified: EngineDriver) -> None:
    unified.prefill(first_chunk(0, PROMPT, ignore_eos=True), first_chunk(3, PROMPT + toy_prompt("more")))
    unified.decode([0], steps=2)
    unified.swap_out(out(0, 5, start=20))
    assert unified.swap_in(back(5, 1, source_id=3, length=20)) == [True]
    unified.output[1] = unified.output[0]
    unified.decode([1])
    assert unified.output[1] == expected_output(PROMPT, 50, ignore_eos=True)
    unified.checked_free_cells()


def test_an_empty_suffix_is_saved_when_others_hold_all_cells(unified: EngineDriver) -> None:
    unified.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    unified.prefill(first_chunk(1, [65], copy=Prefix(source_id=0, length=len(PROMPT))))
    result = unified.swap_out(out(0, 1, start=len(PROMPT)))
    assert (result.saved, result.written_bytes) == ([True], 0)
    assert unified.swap_in(back(1, 2, source_id=1, length=len(PROMPT))) == [True]
    unified.output[2] = unified.output[0]
    unified.decode([2])
    assert unified.output[2] == expected_output(PROMPT, 50, ignore_eos=True)


def test_an_ended_sequence_is_released_and_not_saved(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, max_new=1, ignore_eos=True), first_chunk(1, PROMPT, ignore_eos=True))
    command = SwapOut(entries=[out(0, 1), out(1, 2)], header=header(park={1: 4}))
    result = driver.engine.swap_out(command, 0)
    assert isinstance(result, SwappedOut)
    assert result.saved == [False, False]
    assert driver.engine.sequence_count == result.used_bytes == 0
    assert driver.swap_in(back(1, 0)) == [False]


def test_a_sequence_that_cannot_be_saved_is_released() -> None:
    driver = EngineDriver(swap=memory_swap(CELL_BYTES * 12))
    for key in range(3):
        driver.prefill(first_chunk(key, toy_prompt("0123456789"), ignore_eos=True))
    assert driver.swap_out(out(0, 1), out(1, 2)).saved == [True, False]
    assert driver.swap_in(back(1, 0), back(2, 1)) == [True, False]
    assert driver.swap_out(out(2, 3)).saved == [True]
    assert EngineDriver(swap=SwapSpace()).engine.swap_bytes == 0


def test_without_swap_space_nothing_is_saved() -> None:
    driver = EngineDriver(swap=SwapSpace())
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    assert driver.swap_out(out(0, 1)).saved == [False]
    assert driver.engine.free_cells == 8192


def test_a_sequence_that_does_not_fit_the_cache_is_not_restored_and_loses_its_handle(unified: EngineDriver) -> None:
    unified.prefill(first_chunk(0, toy_prompt("x" * 60), ignore_eos=True))
    unified.swap_out(out(0, 1))
    unified.prefill(first_chunk(3, toy_prompt("y" * 141), ignore_eos=True, max_new=5))
    assert unified.swap_in(back(1, 0)) == [False]
    assert unified.backend.length(0) == 0
    assert unified.checked_free_cells() == 200 - 141
    unified.keep()
    assert unified.swap_in(back(1, 0)) == [False]
    assert unified.engine.unfinished_count == 0


def test_a_header_drops_handles_and_ignores_unknown_ones(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True), first_chunk(1, PROMPT, ignore_eos=True))
    driver.swap_out(out(0, 1), out(1, 2))
    holdings = driver.engine.filter_batch(FilterBatch(keep_ids=[], header=header(drop=[1, 99])))
    assert isinstance(holdings, Holdings)
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    # A dropped handle may be used again, even by the command that drops it.
    result = driver.engine.swap_out(SwapOut(entries=[out(0, 2)], header=header(drop=[2])), 0)
    assert isinstance(result, SwappedOut)
    assert result.saved == [True]
    assert result.used_bytes == CELL_BYTES * len(PROMPT)
    dropped = driver.engine.swap_in(SwapIn(entries=[back(2, 3)], header=header(drop=[2])), 0)
    assert isinstance(dropped, SwappedIn)
    assert (dropped.restored, dropped.used_bytes) == ([False], 0)


def test_releasing_all_forgets_swapped_sequences(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.swap_out(out(0, 1))
    driver.engine.release_all()
    assert driver.swap_in(back(1, 0)) == [False]


def test_a_sequence_is_restored_from_disk(tmp_path: Path) -> None:
    driver = EngineDriver(swap=SwapSpace([DiskStore(tmp_path, 1 << 20)]))
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.swap_out(out(0, 1))
    driver.swap_in(back(1, 0))
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT, 50, ignore_eos=True)


def test_a_recurrent_model_swaps_whole_sequences() -> None:
    driver = EngineDriver(ToyBackend(sharing=PrefixSharing.WHOLE_ONLY))
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    refusal = driver.engine.swap_out(SwapOut(entries=[out(0, 1, start=3)]), 0)
    assert isinstance(refusal, Refusal)
    driver.swap_out(out(0, 1))
    driver.swap_in(back(1, 4))
    driver.output[4] = driver.output[0]
    driver.decode([4])
    assert driver.output[4] == expected_output(PROMPT, 50, ignore_eos=True)

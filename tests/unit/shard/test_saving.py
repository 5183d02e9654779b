"""Runs that are saved and loaded, and sequences that move to the other layout."""

from dataclasses import replace

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Header, Load, PrefixCopy, RunSlice, Save, SetLayout
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import LayoutSet, Loaded, Saved, StepOutcome
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.protocol.results import Refusal, StepResult
from caravan_shard.sequences.runs import RunStore
from caravan_testing.shard_builders import (
    EngineDriver,
    first_chunk,
    header,
    load_entry,
    next_chunk,
    run_key,
    save_entry,
    state_entry,
    toy_prompt,
    with_state,
)
from caravan_testing.toy_oracle import expected_output

PROMPT = toy_prompt("a prompt that is long enough")
TAIL = toy_prompt(" and a tail")
OTHER = {KvLayout.UNIFIED: KvLayout.SPLIT, KvLayout.SPLIT: KvLayout.UNIFIED}
SAMPLED = SamplingParams(
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


def backend(layout: KvLayout, cells: int = 1024) -> ToyBackend:
    return ToyBackend(cells=cells, layout=layout, other_layouts=[OTHER[layout]])


@pytest.fixture(params=list(KvLayout), ids=lambda layout: layout.value)
def driver(request: pytest.FixtureRequest) -> EngineDriver:
    """Each layout in turn."""
    return EngineDriver(backend(request.param))


def resume(driver: EngineDriver, sequence_id: int, tokens: list[int], length: int) -> list[int]:
    """Start ``tokens`` behind ``length`` tokens that the id holds, and return the output."""
    copy = PrefixCopy(source_id=sequence_id, length=length)
    driver.prefill(first_chunk(sequence_id, tokens[length:], copy=copy, ignore_eos=True))
    driver.decode([sequence_id])
    return driver.output.pop(sequence_id)


def test_a_preempted_sequence_continues_under_another_id(driver: EngineDriver) -> None:
    expected = expected_output(PROMPT, 50, sampling=SAMPLED, ignore_eos=True)
    driver.prefill(first_chunk(0, PROMPT, sampling=SAMPLED, ignore_eos=True))
    driver.decode([0], steps=6)
    known = PROMPT + driver.output.pop(0)
    assert driver.save(save_entry(0, known[:-1], release=True)) == [True]
    assert driver.engine.runs.used.memory == CELL_BYTES * (len(known) - 1)
    assert driver.checked_free_cells() == 1024
    assert driver.engine.sequence_count == driver.engine.unfinished_count == 0
    driver.prefill(first_chunk(0, toy_prompt("meanwhile")))
    assert driver.load(load_entry(5, known[:-1])) == [True]
    assert driver.engine.unfinished_count == 1
    chunk = first_chunk(
        5,
        known[-1:],
        copy=PrefixCopy(source_id=5, length=len(known) - 1),
        prompt_length=len(PROMPT),
        max_new=50 - len(known) + len(PROMPT),
        sampling=SAMPLED,
        ignore_eos=True,
    )
    driver.prefill(chunk)
    driver.decode([0, 5])
    driver.checked_free_cells()
    assert driver.output[5] == expected[len(known) - len(PROMPT) :]
    assert driver.output[0] == expected_output(toy_prompt("meanwhile"), 50)


def test_a_sequence_in_any_phase_is_saved_and_continues(driver: EngineDriver) -> None:
    driver.prefill(
        first_chunk(0, PROMPT, ignore_eos=True),
        first_chunk(1, PROMPT[:9], total=len(PROMPT), last=False),
        first_chunk(2, PROMPT + TAIL, max_new=1, ignore_eos=True),
    )
    saved = driver.save(save_entry(0, PROMPT), save_entry(1, PROMPT[:9]), save_entry(2, PROMPT + TAIL, len(PROMPT)))
    assert saved == [True] * 3
    assert driver.checked_free_cells() == 1024 - 2 * len(PROMPT) - 9 - len(TAIL)
    driver.prefill(next_chunk(1, 9, PROMPT[9:]))
    driver.decode([0, 1])
    assert driver.output[0][:50] == expected_output(PROMPT, 50, ignore_eos=True)
    assert driver.output[1] == expected_output(PROMPT, 50)


@pytest.mark.parametrize("cut", [1, 7, 12, 13, 20, len(PROMPT + TAIL)])
def test_a_sequence_is_made_of_parts_of_several_runs(driver: EngineDriver, cut: int) -> None:
    whole = PROMPT + TAIL
    driver.prefill(first_chunk(0, whole, ignore_eos=True))
    # Two runs of one sequence, in one command, and one that covers parts of both.
    assert driver.save(save_entry(0, whole[:12], 0, 5), save_entry(0, whole, 12, 20, release=True)) == [True, True]
    driver.prefill(first_chunk(0, whole[:20], ignore_eos=True))
    assert driver.save(save_entry(0, whole[:20], 3)) == [True]
    parts = [(whole[:12], min(cut, 7)), (whole[:20], min(cut, 15)), (whole, cut)]
    used = [part for place, part in enumerate(parts) if place == 0 or part[1] > parts[place - 1][1]]
    assert driver.load(load_entry(3, whole[:cut], *used)) == [True]
    driver.checked_free_cells()
    rest = whole + toy_prompt("!")
    assert resume(driver, 3, rest, cut) == expected_output(rest, 50, ignore_eos=True)
    # The runs stay.
    assert driver.load(load_entry(4, whole[:cut], *used)) == [True]
    assert resume(driver, 4, rest, 1) == expected_output(rest, 50, ignore_eos=True)


def test_a_loaded_sequence_is_shared_parked_and_released(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.save(save_entry(0, PROMPT, release=True))
    driver.load(load_entry(1, PROMPT))
    copies = [first_chunk(key, TAIL, copy=PrefixCopy(source_id=1, length=10), ignore_eos=True) for key in (2, 3)]
    driver.prefill(*copies)
    shared = driver.backend.capacity.current.layout is KvLayout.UNIFIED
    used = len(PROMPT) + 2 * len(TAIL) + (0 if shared else 20)
    assert driver.checked_free_cells() == 1024 - used
    driver.decode([2, 3])
    assert driver.output[2] == driver.output[3] == expected_output(PROMPT[:10] + TAIL, 50, ignore_eos=True)
    driver.prefill(park={1: 4})
    driver.keep(1)
    assert driver.checked_free_cells() == 1024 - 4


@pytest.mark.parametrize("phase", ["prefilling", "running", "loaded"])
def test_a_loaded_sequence_shares_the_first_cells_of_another(phase: str) -> None:
    driver = EngineDriver(backend(KvLayout.UNIFIED))
    whole = PROMPT + TAIL
    driver.prefill(first_chunk(0, whole, ignore_eos=True))
    driver.save(save_entry(0, whole, 0, 20, release=True))
    common = 12
    if phase == "loaded":
        driver.load(load_entry(1, whole[:20], (whole, 20)))
    else:
        last = phase == "running"
        driver.prefill(first_chunk(1, whole[:20], total=20 if last else 30, last=last, ignore_eos=True))
    copy = PrefixCopy(source_id=1, length=common)
    both = [load_entry(2, whole, (whole, len(whole)), copy=copy), load_entry(3, whole[:17], (whole, 17), copy=copy)]
    assert driver.load(*both) == [True, True]
    assert driver.checked_free_cells() == 1024 - 20 - (len(whole) - common) - (17 - common)
    # The cells stay as long as one of them holds them.
    driver.keep(2, 3)
    assert driver.checked_free_cells() == 1024 - len(whole) - (17 - common)
    rest = whole + toy_prompt("!")
    assert (
        resume(driver, 3, rest, 17) == resume(driver, 2, rest, len(whole)) == expected_output(rest, 50, ignore_eos=True)
    )


def test_a_damaged_run_behind_shared_cells_leaves_these_alone() -> None:
    driver = EngineDriver(backend(KvLayout.UNIFIED))
    whole = PROMPT + TAIL
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True), first_chunk(1, whole, ignore_eos=True))
    driver.save(save_entry(1, whole, release=True))
    kept = driver.engine.runs._kept[run_key(whole)]
    kept.state = kept.state[:-CELL_BYTES]  # type: ignore[index]
    damaged = load_entry(2, whole, (whole, len(whole)), copy=PrefixCopy(source_id=0, length=10))
    result = driver.engine.load(Load(entries=[damaged]), 0)
    assert isinstance(result, Loaded)
    assert (result.loaded, result.bad_runs) == ([False], [run_key(whole)])
    assert driver.checked_free_cells() == 1024 - len(PROMPT)
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT, 50, ignore_eos=True)


def test_what_has_no_room_but_behind_shared_cells_is_loaded_there() -> None:
    driver = EngineDriver(ToyBackend(cells=200))
    whole = toy_prompt("x" * 120)
    driver.prefill(first_chunk(0, whole, ignore_eos=True))
    driver.save(save_entry(0, whole))
    copy = PrefixCopy(source_id=0, length=60)
    assert driver.load(load_entry(1, whole)) == [False]
    assert driver.load(load_entry(1, whole, (whole, 120), copy=copy)) == [True]
    assert driver.checked_free_cells() == 20


def test_a_key_that_is_there_is_saved_already(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True), first_chunk(1, PROMPT, ignore_eos=True))
    result = driver.engine.save(Save(entries=[save_entry(0, PROMPT), save_entry(1, PROMPT, release=True)]), 0)
    assert isinstance(result, Saved)
    assert result.sizes_bytes == [CELL_BYTES * len(PROMPT)] * 2
    assert driver.engine.runs.used.memory == CELL_BYTES * len(PROMPT)
    assert driver.engine.sequence_count == 1


def test_a_sequence_that_cannot_be_saved_is_released() -> None:
    driver = EngineDriver(runs=RunStore(CELL_BYTES * 12))
    for key in range(3):
        driver.prefill(first_chunk(key, toy_prompt(f"{key}123456789"), ignore_eos=True))
    saved = driver.save(*(save_entry(key, toy_prompt(f"{key}123456789"), release=True) for key in (0, 1)))
    assert saved == [True, False]
    assert driver.engine.sequence_count == 1
    assert driver.load(load_entry(0, toy_prompt("0123456789")), load_entry(1, toy_prompt("1123456789"))) == [
        True,
        False,
    ]
    assert not EngineDriver(runs=RunStore(0)).engine.runs.capacity.memory


def test_without_room_for_runs_nothing_is_saved() -> None:
    driver = EngineDriver(runs=RunStore(0))
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    assert driver.save(save_entry(0, PROMPT)) == [False]
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT, 50, ignore_eos=True)


def test_what_does_not_fit_the_cache_is_not_loaded_and_stays_saved() -> None:
    driver = EngineDriver(ToyBackend(cells=200))
    driver.prefill(first_chunk(0, toy_prompt("x" * 60), ignore_eos=True))
    driver.save(save_entry(0, toy_prompt("x" * 60), release=True))
    driver.prefill(first_chunk(3, toy_prompt("y" * 141), ignore_eos=True, max_new=5))
    result = driver.engine.load(Load(entries=[load_entry(0, toy_prompt("x" * 60))]), 0)
    assert isinstance(result, Loaded)
    assert (result.loaded, result.bad_runs) == ([False], [])
    assert driver.backend.length(0) == 0
    assert driver.checked_free_cells() == 200 - 141
    driver.keep()
    assert driver.load(load_entry(0, toy_prompt("x" * 60))) == [True]


def test_unknown_and_damaged_runs_are_named_and_the_rest_is_loaded(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True), first_chunk(1, TAIL, ignore_eos=True))
    driver.save(save_entry(0, PROMPT, release=True), save_entry(1, TAIL, release=True))
    # Its content is shorter than its key promises.
    kept = driver.engine.runs._kept[run_key(TAIL)]
    kept.state = kept.state[:-CELL_BYTES]  # type: ignore[index]
    unknown = load_entry(2, PROMPT + TAIL, (PROMPT, len(PROMPT)), (PROMPT + TAIL, len(PROMPT + TAIL)))
    result = driver.engine.load(Load(entries=[unknown, load_entry(3, TAIL), load_entry(4, PROMPT)]), 0)
    assert isinstance(result, Loaded)
    assert result.loaded == [False, False, True]
    assert result.bad_runs == [run_key(PROMPT + TAIL), run_key(TAIL)]
    assert driver.engine.runs.find(run_key(TAIL)) is None
    assert driver.engine.sequence_count == 1
    driver.checked_free_cells()


def test_a_header_drops_runs_before_the_command(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True), first_chunk(1, TAIL, ignore_eos=True))
    driver.save(save_entry(0, PROMPT), save_entry(1, TAIL))
    assert driver.load(load_entry(2, PROMPT), drop=[run_key(PROMPT), b"0" * 16]) == [False]
    assert driver.save(save_entry(0, PROMPT), drop=[run_key(TAIL)], spill=[b"1" * 16]) == [True]
    assert [found.key for found, _ in driver.engine.runs.list_runs()] == [run_key(PROMPT)]


def test_runs_outlive_the_release_of_all_sequences(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.save(save_entry(0, PROMPT))
    driver.engine.release_all()
    assert driver.load(load_entry(0, PROMPT)) == [True]
    assert resume(driver, 0, PROMPT + TAIL, len(PROMPT)) == expected_output(PROMPT + TAIL, 50, ignore_eos=True)


def test_a_recurrent_model_continues_where_its_state_was_saved() -> None:
    driver = EngineDriver(ToyBackend(whole_only=True))
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    assert driver.save(save_entry(0, PROMPT, 0, 5), state_entry(0, PROMPT)) == [True, True]
    driver.decode([0], steps=2)
    longer = [*PROMPT, *driver.output[0][:-1]]
    # The sequence has grown since the router decided. That is no matter to its cells.
    assert driver.save(save_entry(0, longer[:-1], len(PROMPT)), state_entry(0, longer[:-1])) == [True, False]
    assert driver.save(save_entry(0, longer, len(longer) - 1), state_entry(0, longer, release=True)) == [True, True]
    for known, parts in (
        (PROMPT, ((PROMPT, len(PROMPT)),)),
        (longer, ((PROMPT, len(PROMPT)), (longer[:-1], len(longer) - 1), (longer, len(longer)))),
    ):
        assert driver.load(with_state(load_entry(4, known, *parts), known)) == [True]
        rest = known + TAIL
        assert resume(driver, 4, rest, len(known)) == expected_output(rest, 50, ignore_eos=True)
        driver.engine.release_all()


def test_a_recurrent_model_loads_nothing_without_the_state_at_its_end() -> None:
    driver = EngineDriver(ToyBackend(whole_only=True))
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.save(save_entry(0, PROMPT, 0, 5), state_entry(0, PROMPT))
    part = load_entry(4, PROMPT[:5], (PROMPT, 5))
    whole = with_state(load_entry(4, PROMPT), PROMPT)
    early = replace(whole, token_ids=PROMPT[:-1])
    cells = RunSlice(whole.slices[0].key, len(PROMPT), len(PROMPT))
    for entry in (load_entry(4, PROMPT), part, early, replace(whole, slices=[whole.slices[0], cells])):
        refusal = driver.engine.load(Load(entries=[entry]), 0)
        assert isinstance(refusal, Refusal)
        assert refusal.error is ShardError.BAD_REQUEST
    unknown = RunSlice(run_key(TAIL), len(PROMPT), len(PROMPT))
    assert driver.load(replace(whole, slices=[whole.slices[0], unknown])) == [False]


def test_other_models_save_and_load_no_state(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.save(save_entry(0, PROMPT))
    assert isinstance(driver.engine.save(Save(entries=[state_entry(0, PROMPT)]), 0), Refusal)
    assert isinstance(driver.engine.load(Load(entries=[with_state(load_entry(4, PROMPT), PROMPT)]), 0), Refusal)


def test_a_loaded_sequence_shares_cells_with_one_that_has_gone_on() -> None:
    driver = EngineDriver(ToyBackend(whole_only=True))
    driver.prefill(first_chunk(0, PROMPT + TAIL, total=len(PROMPT + TAIL) + 2, last=False, ignore_eos=True))
    driver.save(save_entry(0, PROMPT + TAIL), state_entry(0, PROMPT + TAIL))
    known = len(PROMPT + TAIL)
    driver.prefill(next_chunk(0, known, TAIL[:2]))
    used = driver.backend.cache.used
    for first in (1, len(PROMPT), known - 1):
        copy = PrefixCopy(source_id=0, length=first)
        assert driver.load(with_state(load_entry(4, PROMPT + TAIL, copy=copy), PROMPT + TAIL)) == [True]
        assert driver.backend.cache.used == used + known - first
        rest = [*PROMPT, *TAIL, 77]
        assert resume(driver, 4, rest, known) == expected_output(rest, 50, ignore_eos=True)
        driver.keep(0)


# -- the layout


def test_sequences_in_every_phase_move_to_the_other_layout_and_back(driver: EngineDriver) -> None:
    driver.prefill(
        first_chunk(0, PROMPT, sampling=SAMPLED, ignore_eos=True),
        first_chunk(1, PROMPT[:9], total=len(PROMPT), last=False),
        first_chunk(2, PROMPT + TAIL, max_new=1, ignore_eos=True),
    )
    driver.prefill(first_chunk(3, TAIL, copy=PrefixCopy(source_id=0, length=10), ignore_eos=True))
    driver.save(save_entry(0, PROMPT))
    here = driver.backend.capacity.current.layout
    for layout in (OTHER[here], here):
        driver.decode([0, 3], steps=4)
        assert driver.set_layout(layout) == []
        assert driver.backend.capacity.current.layout is layout
        # Those of equal beginnings are shared, except that of the last token.
        lengths = [driver.backend.length(key) for key in range(4)]
        common = 8 + len(PROMPT) + 10 if layout is KvLayout.UNIFIED else 0
        assert driver.checked_free_cells() == 1024 - sum(lengths) + common
        driver.prefill(first_chunk(4, TAIL, copy=PrefixCopy(source_id=2, length=12), ignore_eos=True))
        shared = 12 if layout is KvLayout.UNIFIED else 0
        assert driver.checked_free_cells() == 1024 - sum(lengths) + common - 12 - len(TAIL) + shared
        driver.keep(0, 1, 2, 3)
        assert driver.load(load_entry(5, PROMPT[:15], (PROMPT, 15))) == [True]
        driver.keep(0, 1, 2, 3)
    driver.prefill(next_chunk(1, 9, PROMPT[9:]))
    driver.decode([0, 1, 3])
    assert driver.output[0] == expected_output(PROMPT, 50, sampling=SAMPLED, ignore_eos=True)
    assert driver.output[1] == expected_output(PROMPT, 50)
    assert driver.output[3] == expected_output(PROMPT[:10] + TAIL, 50, ignore_eos=True)


def test_the_same_layout_changes_nothing(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.prefill(first_chunk(1, TAIL, copy=PrefixCopy(source_id=0, length=10), ignore_eos=True))
    free = driver.checked_free_cells()
    assert driver.set_layout(driver.backend.capacity.current.layout) == []
    assert driver.checked_free_cells() == free


def test_a_sequence_that_does_not_fit_its_part_keeps_the_cells_unified() -> None:
    driver = EngineDriver(backend(KvLayout.UNIFIED, cells=320))
    driver.prefill(first_chunk(0, PROMPT, max_new=100), first_chunk(1, [65] * 41, max_new=1, ignore_eos=True))
    for refused in (header(), header(release=[0]), header(park={1: 41})):
        answer = driver.engine.set_layout(split_command(refused), 0)
        assert isinstance(answer, Refusal)
        assert answer.error is ShardError.SEQUENCE_TOO_LONG
        assert driver.engine.sequence_count == 2
    answer = driver.engine.set_layout(split_command(header(park={1: 40})), 0)
    assert isinstance(answer, LayoutSet)
    assert (answer.layout.layout, answer.layout.cells_per_sequence, answer.lost) == (KvLayout.SPLIT, 40, [])


def test_a_sequence_that_fills_its_part_continues_in_the_unified_layout() -> None:
    driver = EngineDriver(backend(KvLayout.SPLIT, cells=320))
    too_long = driver.try_prefill(first_chunk(1, [65] * 20, total=330, last=False, max_new=1))
    assert isinstance(too_long, Refusal)
    driver.prefill(first_chunk(0, PROMPT, max_new=50, ignore_eos=True))
    driver.decode([0], steps=40 - len(PROMPT))
    step = driver.engine.decode_step([0], 0)
    assert isinstance(step, StepResult)
    assert step.outcome is StepOutcome.NO_KV
    assert driver.set_layout(KvLayout.UNIFIED) == []
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT, 50, ignore_eos=True)


def split_command(with_header: Header) -> SetLayout:
    return SetLayout(layout=KvLayout.SPLIT, header=with_header)


def test_a_layout_that_is_not_possible_is_refused() -> None:
    driver = EngineDriver(ToyBackend(layout=KvLayout.SPLIT))
    for layout in (KvLayout.UNIFIED, None):
        answer = driver.engine.set_layout(SetLayout(layout=layout), 0)
        assert isinstance(answer, Refusal)
        assert answer.error is ShardError.BAD_REQUEST


def test_a_layout_that_cannot_be_made_keeps_the_old_one_and_its_sequences(driver: EngineDriver) -> None:
    driver.backend.layout_works = False
    here = driver.backend.capacity.current.layout
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    answer = driver.engine.set_layout(SetLayout(layout=OTHER[here]), 0)
    assert isinstance(answer, LayoutSet)
    assert (answer.layout.layout, answer.lost) == (here, [])
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT, 50, ignore_eos=True)


def test_sequences_that_cannot_be_restored_are_lost(driver: EngineDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.prefill(*(first_chunk(key, PROMPT, ignore_eos=True) for key in range(3)))
    restore = driver.backend.restore
    monkeypatch.setattr(
        driver.backend, "restore", lambda key, slices, **more: key != 1 and restore(key, slices, **more)
    )
    other = OTHER[driver.backend.capacity.current.layout]
    assert driver.set_layout(other) == [1]
    shared = len(PROMPT) - 1 if other is KvLayout.UNIFIED else 0
    assert driver.checked_free_cells() == 1024 - 2 * len(PROMPT) + shared
    driver.decode([0, 2])
    assert driver.output[0] == driver.output[2] == expected_output(PROMPT, 50, ignore_eos=True)


class NoContext(ToyBackend):
    """One that has no cache any more after a change of its layout."""

    has_context = True

    def set_layout(self, layout: KvLayout) -> bool:
        self.has_context = False
        raise RuntimeError("there is no context any more")

    def trim(self, sequence_id: int, length: int) -> bool:
        assert self.has_context, "the context is used after its end"
        return super().trim(sequence_id, length)


def test_an_engine_is_closed_without_its_context_when_no_layout_could_be_made() -> None:
    driver = EngineDriver(NoContext(layout=KvLayout.SPLIT, other_layouts=[KvLayout.UNIFIED]))
    driver.prefill(first_chunk(1, PROMPT))
    with pytest.raises(RuntimeError, match="no context"):
        driver.set_layout(KvLayout.UNIFIED)
    assert driver.engine.sequence_count == 1
    driver.engine.close()

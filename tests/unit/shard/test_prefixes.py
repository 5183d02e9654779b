"""Parked sequences, copies of prefixes, and new sequences that take over what their id holds."""

import pytest

from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import StepOutcome
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import DecodeOutcome
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.protocol.results import Refusal, StepResult
from caravan_testing.shard_builders import EngineDriver, first_chunk, next_chunk, toy_prompt
from caravan_testing.toy_oracle import expected_output

PROMPT = toy_prompt("a prompt that others share")
TAIL = toy_prompt(" and a tail")
PENALIZED = SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3)


@pytest.fixture(params=list(KvLayout), ids=lambda layout: layout.value)
def driver(request: pytest.FixtureRequest) -> EngineDriver:
    """Each layout in turn."""
    return EngineDriver(ToyBackend(cells=1024, layout=request.param))


def test_a_parked_sequence_has_ended_and_frees_cells(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.decode([0], steps=5)
    result = driver.prefill(park={0: 10})
    assert result.outcome is StepOutcome.OK
    assert driver.checked_free_cells() == 1024 - 10
    assert driver.decode([0]) == []
    assert driver.prefill(first_chunk(1, [65]), riders=[0]).rows.sequence_ids == [1]


def test_sequences_in_every_phase_can_be_parked_and_parked_again(driver: EngineDriver) -> None:
    driver.prefill(
        first_chunk(0, PROMPT, max_new=1, ignore_eos=True),
        first_chunk(1, PROMPT[:8], total=len(PROMPT), last=False),
        first_chunk(2, PROMPT, ignore_eos=True),
    )
    driver.prefill(park={0: len(PROMPT), 1: 8, 2: 3})
    driver.prefill(park={0: 5, 1: 1})
    assert [driver.backend.length(key) for key in range(3)] == [5, 1, 3]
    assert driver.checked_free_cells() == 1024 - 9
    assert driver.engine.unfinished_count == 0


@pytest.mark.parametrize("length", [1, 10, len(PROMPT)])
def test_copies_of_a_parked_sequence_have_the_right_output(driver: EngineDriver, length: int) -> None:
    driver.prefill(first_chunk(0, PROMPT))
    driver.decode([0], steps=5)
    # The same command parks and copies.
    driver.prefill(
        first_chunk(3, TAIL, copy=PrefixCopy(source_id=0, length=length), sampling=PENALIZED), park={0: length}
    )
    driver.decode([3])
    assert driver.output[3] == expected_output(PROMPT[:length] + TAIL, 50, sampling=PENALIZED)


def test_a_sequence_that_ended_is_copied_up_to_its_last_computed_token(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, max_new=6, ignore_eos=True))
    driver.decode([0])
    known = PROMPT + driver.output[0][:-1]
    driver.prefill(first_chunk(1, TAIL, copy=PrefixCopy(source_id=0, length=len(known))))
    driver.decode([1])
    assert driver.output[1] == expected_output(known + TAIL, 50)


def test_a_new_sequence_takes_over_its_id_without_a_copy(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.decode([0], steps=7)
    driver.prefill(first_chunk(0, TAIL, copy=PrefixCopy(source_id=0, length=9), sampling=PENALIZED))
    assert driver.checked_free_cells() == 1024 - 9 - len(TAIL)
    assert driver.engine.sequence_count == 1
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT[:9] + TAIL, 50, sampling=PENALIZED)


def test_the_kept_tokens_of_an_earlier_output_count_as_output_for_penalties(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True, sampling=PENALIZED))
    driver.decode([0], steps=9)
    output = driver.output[0][:6]
    length = len(PROMPT) + 5
    driver.prefill(
        first_chunk(
            0,
            output[5:],
            copy=PrefixCopy(source_id=0, length=length),
            prompt_length=len(PROMPT),
            ignore_eos=True,
            sampling=PENALIZED,
        )
    )
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT, 56, ignore_eos=True, sampling=PENALIZED)[6:]


def test_copies_see_a_taken_over_sequence_as_it_was_before_the_step(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(1, PROMPT, ignore_eos=True), first_chunk(2, PROMPT[:9], total=30, last=False))
    driver.decode([1], steps=4)
    known = PROMPT + driver.output[1][:4]
    driver.prefill(
        first_chunk(1, TAIL, copy=PrefixCopy(source_id=1, length=5)),
        first_chunk(0, TAIL, copy=PrefixCopy(source_id=1, length=len(known))),
        first_chunk(3, TAIL, copy=PrefixCopy(source_id=1, length=5)),
        # The source of a copy advances in the same step.
        next_chunk(2, 9, PROMPT[9:12], last=False),
        first_chunk(4, TAIL, copy=PrefixCopy(source_id=2, length=9)),
    )
    driver.checked_free_cells()
    driver.decode([0, 1, 3, 4])
    assert driver.output[0] == expected_output(known + TAIL, 50)
    assert driver.output[1] == driver.output[3] == expected_output(PROMPT[:5] + TAIL, 50)
    assert driver.output[4] == expected_output(PROMPT[:9] + TAIL, 50)


def test_a_taken_over_sequence_keeps_its_shared_cells() -> None:
    driver = EngineDriver(ToyBackend(cells=200))
    driver.prefill(first_chunk(0, toy_prompt("x" * 40)))
    driver.prefill(first_chunk(1, toy_prompt("y" * 20), copy=PrefixCopy(source_id=0, length=30)))
    # Cut back within its shared cells, then within its own cells, then grown again.
    driver.prefill(first_chunk(2, toy_prompt("z"), copy=PrefixCopy(source_id=1, length=45)))
    driver.prefill(first_chunk(1, toy_prompt("w" * 10), copy=PrefixCopy(source_id=1, length=20)))
    assert driver.checked_free_cells() == 200 - 40 - 10 - 15 - 1
    driver.prefill(park={1: 25, 0: 5})
    assert driver.checked_free_cells() == 200 - 30 - 5 - 15 - 1
    driver.keep(1)
    assert driver.checked_free_cells() == 200 - 25


def test_a_step_that_does_not_fit_cuts_nothing_back() -> None:
    driver = EngineDriver(ToyBackend(cells=60))
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True, max_new=30), first_chunk(1, toy_prompt("y" * 10)))
    driver.decode([0], steps=3)
    taking = first_chunk(0, toy_prompt("z" * 46), copy=PrefixCopy(source_id=0, length=5), max_new=2)
    result = driver.try_prefill(taking, riders=[1])
    assert isinstance(result, StepResult)
    assert result.outcome is StepOutcome.NO_KV
    driver.decode([0], steps=3)
    assert driver.output[0] == expected_output(PROMPT, 30, ignore_eos=True)[:7]
    # The cells that the cut frees make room for it.
    driver.prefill(first_chunk(0, toy_prompt("z" * 44), copy=PrefixCopy(source_id=0, length=5), max_new=2), riders=[1])


@pytest.mark.parametrize("outcome", [DecodeOutcome.ABORTED, DecodeOutcome.FAILED, DecodeOutcome.NO_KV])
def test_after_a_failed_step_the_id_holds_the_parked_prefix(driver: EngineDriver, outcome: DecodeOutcome) -> None:
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True), first_chunk(1, TAIL, ignore_eos=True))
    driver.decode([0], steps=4)
    driver.backend.hook = lambda _batch: outcome
    taking = first_chunk(0, TAIL, copy=PrefixCopy(source_id=0, length=12))
    result = driver.try_prefill(taking, first_chunk(2, TAIL, copy=PrefixCopy(source_id=0, length=20)), riders=[1])
    assert isinstance(result, Refusal) or result.outcome is not StepOutcome.OK
    driver.backend.hook = None
    assert [driver.backend.length(key) for key in range(3)] == [12, len(TAIL), 0]
    driver.checked_free_cells()
    assert driver.decode([0]) == []
    driver.prefill(taking, riders=[1])
    driver.decode([0, 1])
    assert driver.output[0] == expected_output(PROMPT[:12] + TAIL, 50)
    assert driver.output[1] == expected_output(TAIL, 50, ignore_eos=True)


def test_a_recurrent_model_parks_and_hands_over_whole_sequences() -> None:
    driver = EngineDriver(ToyBackend(whole_only=True))
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    driver.decode([0], steps=3)
    known = PROMPT + driver.output[0][:3]
    driver.prefill(park={0: len(known)})
    whole = PrefixCopy(source_id=0, length=len(known))
    driver.prefill(first_chunk(0, TAIL, copy=whole), first_chunk(1, TAIL, copy=whole))
    driver.decode([0, 1])
    assert driver.output[0] == driver.output[1] == expected_output(known + TAIL, 50)


def test_a_recurrent_sequence_survives_a_failed_take_over() -> None:
    backend = ToyBackend(whole_only=True)
    driver = EngineDriver(backend)
    driver.prefill(first_chunk(0, PROMPT, ignore_eos=True))
    backend.hook = lambda _batch: DecodeOutcome.NO_KV
    result = driver.try_prefill(first_chunk(0, TAIL, copy=PrefixCopy(source_id=0, length=len(PROMPT))))
    assert isinstance(result, StepResult)
    assert result.outcome is StepOutcome.NO_KV
    backend.hook = None
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT, 50, ignore_eos=True)


def test_nothing_is_taken_over_where_another_sequence_has_outgrown_its_part() -> None:
    """A source that is taken over is cut back: too late to find that the step has no room."""
    backend = ToyBackend(cells=64, max_sequences=4, layout=KvLayout.SPLIT, other_layouts=[KvLayout.UNIFIED])
    driver = EngineDriver(backend)
    driver.prefill(first_chunk(0, [65] * 10, ignore_eos=True))
    driver.decode([0], steps=6)
    driver.prefill(first_chunk(2, [32, 32], max_new=1, ignore_eos=True))
    assert backend.length(0) == 16
    result = driver.try_prefill(first_chunk(2, [33], copy=PrefixCopy(source_id=2, length=1)), riders=[0])
    assert isinstance(result, StepResult)
    assert result.outcome is StepOutcome.NO_KV
    assert backend.length(2) == 2

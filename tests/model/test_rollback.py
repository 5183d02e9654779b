"""Models with recurrent layers whose last tokens llama.cpp can take back: they can have drafts."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_shard.engine.drafts import DraftBudget
from caravan_shard.protocol.results import Refusal
from caravan_testing.shard_builders import (
    first_chunk,
    load_entry,
    row,
    save_entry,
    state_entry,
    with_parameters,
    with_state,
)
from caravan_testing.shard_models import (
    CONVOLUTION_MODEL,
    DELTA_POSITIONS_MODEL,
    HYBRID_MODEL,
    VOCABULARY_SIZE,
    ModelDriver,
    fetched,
)

pytestmark = pytest.mark.model

NEW, MOST = 24, 3
OPTIONS: dict[str, Any] = {"max_new": NEW, "ignore_eos": True}
# Rounding must not decide: these compute chunks of any size alike.
KINDS: list[dict[str, Any]] = [{"exact": True}, {"kv_layout": "unified", "flash_attn": "on"}]


@pytest.fixture(
    scope="module",
    params=[(model, flags) for model in (CONVOLUTION_MODEL, DELTA_POSITIONS_MODEL) for flags in KINDS],
    ids=lambda kind: f"{kind[0].stem}-{'exact' if 'exact' in kind[1] else 'unified'}",
)
def loaded(request: pytest.FixtureRequest) -> Iterator[ModelDriver]:
    model, flags = request.param
    driver = ModelDriver(fetched(model), ctx_size=1024, rollback_tokens=MOST, **flags)
    yield driver
    driver.engine.close()


@pytest.fixture
def driver(loaded: ModelDriver) -> ModelDriver:
    """The shard, empty."""
    loaded.engine.release_all()
    loaded.output.clear()
    return loaded


def prompt(driver: ModelDriver, number: int = 0) -> list[int]:
    return driver.tokens(f"prompt {number} for a model that reads it once and takes a little of it back")


def partly_wrong(output: Sequence[int], seed: int) -> tuple[int, ...]:
    """Return a prediction that is right in most places."""
    source = random.Random(seed)
    return tuple(source.randrange(100, VOCABULARY_SIZE) if source.random() < 0.3 else token for token in output)


def begin(driver: ModelDriver, sequence_id: int, tokens: Sequence[int], prediction: Sequence[int]) -> None:
    chunk = first_chunk(sequence_id, tokens, **OPTIONS)
    driver.prefill(with_parameters(chunk, max_draft_tokens=8, prediction=tuple(prediction)))


def decode(driver: ModelDriver, ids: Sequence[int], steps: int = 1 << 30) -> tuple[int, int]:
    """Run steps with drafts; return how many draft tokens there were, and how many were right."""
    results = driver.decode(ids, steps=steps, max_draft_tokens=32)
    drafts = [result.drafts for result in results if result.drafts is not None]
    assert all(drafted <= MOST for one in drafts for drafted in one.drafted)
    return sum(sum(one.drafted) for one in drafts), sum(sum(one.accepted) for one in drafts)


def test_drafts_change_no_token(driver: ModelDriver) -> None:
    assert driver.backend.capacity.current.rollback_tokens == MOST
    expected = {number: driver.alone(prompt(driver, number), NEW) for number in range(3)}
    for number, output in expected.items():
        begin(driver, number, prompt(driver, number), partly_wrong(output, number))
    drafted, accepted = decode(driver, [0, 1, 2])
    assert 0 < accepted < drafted
    assert driver.output == expected


def test_a_sequence_that_was_cut_back_is_copied_and_saved(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    expected = driver.alone(tokens, NEW)
    # The first draft is wrong from its second token on.
    begin(driver, 0, tokens, [*expected[:2], *[7] * NEW])
    result = driver.decode_once([0], DraftBudget(MOST, MOST))
    assert result.drafts is not None
    assert (result.drafts.drafted, result.drafts.accepted) == ([MOST], [1])
    held = [*tokens, *expected[:2]]
    assert driver.output[0] == expected[:3]
    assert driver.backend.length(0) == len(held)
    assert driver.save(save_entry(0, held), state_entry(0, held)) == [True, True]
    driver.prefill(park={0: len(held)})
    copy = PrefixCopy(source_id=0, length=len(held))
    rest: dict[str, Any] = {"max_new": NEW - 3, "ignore_eos": True}
    driver.prefill(first_chunk(1, expected[2:3], copy=copy, **rest), first_chunk(2, [90], copy=copy, **rest))
    assert driver.load(with_state(load_entry(3, held), held)) == [True]
    driver.prefill(first_chunk(3, expected[2:3], copy=PrefixCopy(source_id=3, length=len(held)), **rest), riders=[1, 2])
    driver.decode([1, 2, 3])
    other = driver.output[2]
    assert driver.output[1] == driver.output[3] == expected[3:]
    assert other == driver.alone([*held, 90], NEW - 3)


def test_only_the_last_tokens_of_the_last_step_are_taken_back(driver: ModelDriver) -> None:
    backend, tokens = driver.backend, prompt(driver)
    length = len(tokens)
    driver.prefill(first_chunk(0, tokens, **OPTIONS))
    # Its state of that time is gone.
    assert not backend.trim(0, length - MOST - 1)
    driver.engine.release_all()
    driver.prefill(first_chunk(0, tokens, **OPTIONS))
    assert backend.trim(0, length - 1)
    assert not backend.trim(0, length - 2), "the state of a sequence that was cut back is the only one"
    driver.engine.release_all()
    driver.prefill(first_chunk(0, tokens, **OPTIONS))
    driver.decode([0], steps=1)
    assert not backend.trim(0, length), "the step has computed a single token"
    driver.engine.release_all()
    driver.prefill(first_chunk(0, tokens, **OPTIONS))
    driver.prefill(first_chunk(1, tokens, **OPTIONS))
    assert not backend.trim(0, length - 1), "another step came after it"


def test_tokens_are_taken_back_of_a_chunk_that_takes_more_than_one_ubatch() -> None:
    """llama.cpp computes as many as can be taken back in one ubatch."""
    driver = ModelDriver(fetched(CONVOLUTION_MODEL), ctx_size=1024, rollback_tokens=MOST, ubatch_size=64)
    for length in (65, 66, 130):
        tokens = [*range(100, 100 + length)]
        kept = tokens[:-MOST]
        expected = driver.alone([*kept, 90], NEW)
        driver.evaluate(row(0, tokens, keep_length=len(kept)))
        copy = PrefixCopy(source_id=0, length=len(kept))
        driver.prefill(first_chunk(0, [90], copy=copy, **OPTIONS))
        driver.decode([0])
        driver.check_same([*kept, 90], expected, driver.output[0])
        driver.engine.release_all()
    driver.engine.close()


def test_a_row_is_kept_in_part(driver: ModelDriver) -> None:
    tokens = prompt(driver)
    driver.evaluate(row(1, tokens[:-4]))
    copy = PrefixCopy(source_id=1, length=len(tokens) - 4)
    tail = [*tokens[-4:-2], 90, 91]
    answer = driver.try_evaluate(row(0, tail, copy=copy, keep_length=copy.length))
    assert isinstance(answer, Refusal)
    assert answer.error is ShardError.WRONG_POSITION
    assert f"keep_length must be 0 or >= {copy.length + 1}" in answer.sentence
    driver.evaluate(row(0, tail, copy=copy, keep_length=copy.length + 2))
    found = driver.evaluate(row(0, tokens[-2:], copy.length + 2, top_n_tokens=1))
    assert found.top_token_ids[-1:] == driver.alone(tokens, 1)


@pytest.mark.parametrize("layout", KvLayout)
def test_where_llama_cpp_cannot_the_log_says_so(layout: KvLayout, caplog: pytest.LogCaptureFixture) -> None:
    driver = ModelDriver(fetched(HYBRID_MODEL), ctx_size=1024, rollback_tokens=MOST, kv_layout=layout.value)
    assert driver.backend.capacity.current.rollback_tokens == 0
    assert driver.backend.capacity.max_draft_tokens == 0
    [record] = [one for one in caplog.records if "cannot take back tokens" in one.message]
    assert record.__dict__["architecture"] == "granitehybrid"
    driver.engine.close()

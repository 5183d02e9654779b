"""A prompt with pictures that spell words has the output of the prompt with the words."""

from collections.abc import Iterator

import pytest

from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import StepOutcome
from caravan_shard.protocol.results import StepResult
from caravan_testing.media_prompts import MediaPrompt, encode, media_prompt, run_prompt
from caravan_testing.projectors import AFTER, BEFORE, BETWEEN, FIRST, SECOND, WORDS, SpellingModel
from caravan_testing.shard_builders import load_entry, save_entry
from caravan_testing.shard_models import ModelDriver


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpellingModel:
    return SpellingModel(tmp_path_factory.mktemp("spelling"))


@pytest.fixture(
    scope="module",
    params=[(KvLayout.UNIFIED, "on"), (KvLayout.SPLIT, "on"), (KvLayout.SPLIT, "off")],
    ids=lambda param: f"{param[0].value}-flash-{param[1]}",
)
def driver(request: pytest.FixtureRequest, model: SpellingModel) -> Iterator[ModelDriver]:
    layout, flash = request.param
    driver = model.driver(layout, flash_attn=flash)
    yield driver
    driver.engine.close()


@pytest.fixture
def words(driver: ModelDriver) -> list[int]:
    """The output of the prompt of words."""
    driver.engine.release_all()
    output = run_prompt(driver, MediaPrompt(WORDS))
    driver.engine.release_all()
    return output


def test_pictures_are_words(model: SpellingModel, driver: ModelDriver, words: list[int]) -> None:
    assert len(set(words)) > 4
    assert run_prompt(driver, model.prompt(driver)) == words


def test_without_its_pictures_the_output_is_another(
    model: SpellingModel, driver: ModelDriver, words: list[int]
) -> None:
    others = media_prompt(driver, BEFORE, model.picture(SECOND), BETWEEN, model.picture(FIRST), AFTER)
    assert run_prompt(driver, others) != words


@pytest.mark.parametrize("cuts", [[10], [4, 20], [3, 9, 20, 30], [21, 22, 23, 38]])
def test_chunks_end_within_pictures(
    model: SpellingModel, driver: ModelDriver, words: list[int], cuts: list[int]
) -> None:
    assert run_prompt(driver, model.prompt(driver), cuts=cuts) == words


@pytest.mark.parametrize("length", [4, 12, 20, 29, 38])
def test_prefixes_are_shared(model: SpellingModel, driver: ModelDriver, words: list[int], length: int) -> None:
    prompt = model.prompt(driver)
    run_prompt(driver, prompt)
    assert run_prompt(driver, prompt, 1, copy=PrefixCopy(0, length)) == words
    driver.engine.release_all()


def test_sequences_of_a_step_have_their_pictures(model: SpellingModel, driver: ModelDriver, words: list[int]) -> None:
    prompt = model.prompt(driver)
    text, other = MediaPrompt([1, *range(100, 130)]), media_prompt(driver, BEFORE, model.picture(SECOND), AFTER)
    alone = [run_prompt(driver, one, place) for place, one in enumerate((text, other))]
    driver.engine.release_all()
    fields = {"max_new": 16, "ignore_eos": True}
    driver.prefill(text.first_chunk(0, **fields))
    driver.prefill(prompt.first_chunk(1, **fields), other.first_chunk(2, **fields), riders=[0])
    driver.decode([0, 1, 2])
    assert [driver.output[0], driver.output[2]] == alone
    assert driver.output[1] == words


def test_saved_cells_of_pictures_are_loaded(model: SpellingModel, driver: ModelDriver, words: list[int]) -> None:
    prompt = model.prompt(driver)
    run_prompt(driver, prompt)
    first = prompt.token_ids[:12]
    assert driver.save(save_entry(0, first), save_entry(0, prompt.token_ids, 12)) == [True, True]
    driver.engine.release_all()
    entry = load_entry(1, prompt.token_ids, (first, 12), (prompt.token_ids, len(prompt)))
    assert driver.load(entry) == [True]
    assert run_prompt(driver, prompt, 2, copy=PrefixCopy(1, len(prompt) - 1)) == words


def test_a_picture_that_is_not_here_changes_nothing(model: SpellingModel, words: list[int]) -> None:
    driver = model.driver(KvLayout.UNIFIED)
    prompt = model.prompt(driver, encodes=False)
    encode(driver, model.picture(FIRST))
    chunk = prompt.first_chunk(0, max_new=16, ignore_eos=True)
    result = driver.try_prefill(chunk)
    assert isinstance(result, StepResult)
    assert (result.outcome, result.missing_media) == (StepOutcome.MEDIA_MISSING, (bytes(SECOND),))
    assert driver.engine.sequence_count == 0
    encode(driver, model.picture(SECOND))
    assert run_prompt(driver, prompt) == words
    driver.engine.close()


def test_a_prompt_may_end_with_a_picture(model: SpellingModel, driver: ModelDriver) -> None:
    driver.engine.release_all()
    expected = run_prompt(driver, MediaPrompt([*BEFORE, *FIRST]))
    driver.engine.release_all()
    assert run_prompt(driver, media_prompt(driver, BEFORE, model.picture(FIRST))) == expected

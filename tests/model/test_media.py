"""A prompt with pictures that spell words has the output of the prompt with the words, in models of several kinds."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import StepOutcome
from caravan_shard.protocol.results import StepResult
from caravan_shard.service.media import EncoderThread
from caravan_shard.service.model_calls import ModelCalls
from caravan_testing.media_kinds import HYBRID, KINDS, MadeKind, MtmdReference
from caravan_testing.media_prompts import MediaPrompt, encode, media_prompt, run_prompt
from caravan_testing.projectors import AFTER, BEFORE, BETWEEN, FIRST, SECOND, WORDS, SpellingModel
from caravan_testing.shard_builders import load_entry, save_entry, state_entry, with_state
from caravan_testing.shard_models import ModelDriver
from caravan_testing.waiting import eventually


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


@pytest.fixture(params=list(KvLayout), ids=lambda layout: layout.value)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeKind]:
    made = MadeKind(HYBRID, request.param, tmp_path_factory.mktemp("hybrid"), cells=2048)
    yield made
    made.close()


def _expected(made: MadeKind, seed: int) -> list[int]:
    reference = MtmdReference(made.model, made.projector)
    output = reference.output(*made.parts(seed), count=16)
    reference.close()
    return output


@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_those_of_llama_cpp(made: MadeKind, seed: int) -> None:
    prompt, expected = made.prompt(seed), _expected(made, seed)
    assert run_prompt(made.driver, prompt) == expected
    assert made.driver.backend.length(0) == len(prompt) + 15
    made.driver.engine.release_all()
    first, second = prompt.media
    assert run_prompt(made.driver, prompt, cuts=[first.offset, first.end, second.offset - 2, second.end]) == expected


def test_cells_and_states_are_saved_loaded_and_shared(made: MadeKind) -> None:
    prompt, expected = made.prompt(0), _expected(made, 0)
    border, end = prompt.media[0].end, prompt.media[1].end
    begun = next(iter(prompt.chunks(0, cuts=[end], max_new=16, ignore_eos=True)))
    made.driver.prefill(begun)
    tokens = prompt.token_ids[:end]
    entries = (save_entry(0, tokens[:border]), save_entry(0, tokens, border), state_entry(0, tokens, release=True))
    assert made.driver.save(*entries) == [True] * 3
    entry = with_state(load_entry(1, tokens, (tokens[:border], border), (tokens, end)), tokens)
    assert made.driver.load(replace(entry, media=prompt.media)) == [True]
    for _ in range(2):
        assert run_prompt(made.driver, prompt, 2, copy=PrefixCopy(1, end)) == expected
        made.driver.keep(1)


def test_a_step_without_room_leaves_its_sequence_as_it_was(made: MadeKind) -> None:
    """Its first pass would have had room."""
    prompt, expected = made.prompt(0), _expected(made, 0)
    first, second = prompt.media
    chunks = list(prompt.chunks(0, cuts=[first.end], max_new=16, ignore_eos=True))
    made.driver.prefill(chunks[0])
    limits = made.driver.backend.capacity.current
    if limits.layout is KvLayout.UNIFIED:
        room = second.end - first.end
        text = MediaPrompt([1] + [60] * (limits.cells - first.end - room - 2))
        made.driver.prefill(text.first_chunk(1, max_new=1))
        result = made.driver.try_prefill(chunks[1])
        assert isinstance(result, StepResult)
        assert result.outcome is StepOutcome.NO_KV
        made.driver.keep(0)
    made.driver.prefill(chunks[1])
    made.driver.decode([0])
    assert made.driver.output[0] == expected


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


async def test_a_team_of_threads_ends_with_the_encoding(tmp_path: Path) -> None:
    made = MadeKind(KINDS[0], KvLayout.SPLIT, tmp_path, media_threads=2)
    medium = made.medium(0)

    def encode() -> set[str]:
        made.driver.backend.media.encode(medium.shape, medium.data)
        return _threads()

    before = _threads()
    during = await EncoderThread(ModelCalls(made.driver.backend.vocabulary.users)).run(encode)
    assert isinstance(during, set)
    assert len(during - before) == 2
    await eventually(lambda: _threads() <= before)
    made.close()

"""Prompts with pictures and sound have the output that llama.cpp's own programs give, of each kind of projector."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_shard.protocol.results import Refusal
from caravan_testing.media_kinds import KINDS, TEXTS, Kind, MadeKind, MtmdReference
from caravan_testing.media_prompts import MediaPrompt, media_prompt, run_prompt
from caravan_testing.shard_builders import load_entry, save_entry
from caravan_testing.shard_models import ModelDriver


class _Made(MadeKind):
    """With llama.cpp's own answers."""

    def __init__(self, kind: Kind, layout: KvLayout, folder: Path) -> None:
        super().__init__(kind, layout, folder)
        self.reference = MtmdReference(self.model, self.projector)

    def close(self) -> None:
        super().close()
        self.reference.close()


@pytest.fixture(
    scope="module",
    params=[(kind, layout) for kind in KINDS for layout in KvLayout],
    ids=lambda param: f"{param[0].name}-{param[1].value}",
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Made]:
    kind, layout = request.param
    made = _Made(kind, layout, tmp_path_factory.mktemp(kind.name))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _empty(made: _Made) -> None:
    made.driver.engine.release_all()


def _expected(made: _Made, seed: int) -> list[int]:
    return made.reference.output(*made.parts(seed), count=16)


@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_those_of_llama_cpp(made: _Made, seed: int) -> None:
    expected = _expected(made, seed)
    assert len(set(expected)) > 2
    assert run_prompt(made.driver, made.prompt(seed)) == expected


def test_the_kind_is_known(made: _Made) -> None:
    facts = made.driver.backend.facts.media
    assert (facts.images, facts.audio, facts.atomic) == (not made.kind.sounds, made.kind.sounds, made.kind.atomic)
    shifts = {span.count != span.positions for span in made.prompt(0).media}
    assert shifts == {made.kind.shifts}


def test_chunks_at_borders_change_nothing(made: _Made) -> None:
    prompt = made.prompt(0)
    first, second = prompt.media
    cuts = [first.offset, first.end, second.offset - 2, second.end]
    assert run_prompt(made.driver, prompt, cuts=cuts) == _expected(made, 0)


def test_prefixes_are_shared_and_cut_back(made: _Made) -> None:
    prompt, expected = made.prompt(0), _expected(made, 0)
    first, second = prompt.media
    run_prompt(made.driver, prompt)
    for sequence_id, length in enumerate((first.offset, first.end, second.offset, second.end, len(prompt) - 1), 1):
        copied = run_prompt(made.driver, prompt, sequence_id % 2 + 1, copy=PrefixCopy(0, length))
        assert copied == expected, length
        made.driver.keep(0)
    # In place of what the id holds.
    assert run_prompt(made.driver, prompt, 0, copy=PrefixCopy(0, first.end)) == expected


def test_prompts_of_one_step_have_their_own_media(made: _Made) -> None:
    prompts = [made.prompt(seed) for seed in range(3)]
    text = MediaPrompt(made.driver.tokens("Once upon a time"))
    fields = {"max_new": 16, "ignore_eos": True}
    alone = run_prompt(made.driver, text)
    made.driver.engine.release_all()
    made.driver.prefill(text.first_chunk(3, **fields))
    made.driver.prefill(*(one.first_chunk(place, **fields) for place, one in enumerate(prompts)), riders=[3])
    made.driver.decode(range(4))
    assert [made.driver.output[place] for place in range(3)] == [_expected(made, seed) for seed in range(3)]
    assert made.driver.output[3] == alone


def test_saved_cells_are_loaded(made: _Made) -> None:
    prompt, expected = made.prompt(0), _expected(made, 0)
    border = prompt.media[0].end
    run_prompt(made.driver, prompt)
    tokens = prompt.token_ids
    saved = made.driver.save(save_entry(0, tokens[:border]), save_entry(0, tokens, border, release=True))
    assert saved == [True, True]
    entry = load_entry(1, tokens, (tokens[:border], border), (tokens, len(prompt)))
    assert made.driver.load(replace(entry, media=prompt.media)) == [True]
    assert run_prompt(made.driver, prompt, 2, copy=PrefixCopy(1, len(prompt) - 1)) == expected
    made.driver.keep(1)
    assert run_prompt(made.driver, prompt, 2, copy=PrefixCopy(1, border)) == expected


def test_another_layout_has_the_same_cells(made: _Made) -> None:
    driver = ModelDriver(made.model, ctx_size=4096, kv_layout="auto")
    try:
        text = TEXTS[0]
        prompt = media_prompt(driver, driver.tokens(text), made.medium(0), driver.tokens(TEXTS[1]))
        fields = {"max_new": 12, "ignore_eos": True}
        expected = run_prompt(driver, prompt, **fields)
        driver.engine.release_all()
        driver.prefill(prompt.first_chunk(0, **fields))
        driver.decode([0], steps=3)
        assert driver.set_layout(KvLayout.UNIFIED) == []
        driver.decode([0])
        assert driver.output[0] == expected
    finally:
        driver.engine.close()


def test_what_is_never_cut_cannot_be_cut(made: _Made) -> None:
    prompt = made.prompt(0)
    span = prompt.media[0]
    within = span.offset + span.count // 2
    run_prompt(made.driver, prompt)
    text = MediaPrompt(prompt.token_ids)
    refusals = [
        made.driver.try_prefill(text.first_chunk(1, max_new=4, copy=PrefixCopy(0, within))),
        made.driver.try_prefill(prompt.first_chunk(2, within, max_new=4)),
        made.driver.try_prefill(park={0: within}),
    ]
    if not made.kind.atomic:
        assert not any(isinstance(one, Refusal) for one in refusals)
        return
    assert all(isinstance(one, Refusal) for one in refusals), refusals
    assert [one.error for one in refusals if isinstance(one, Refusal)] == [
        ShardError.WRONG_POSITION,
        ShardError.BAD_REQUEST,
        ShardError.WRONG_POSITION,
    ]
    assert [made.driver.backend.length(one) > 0 for one in range(3)] == [True, False, False]


def test_lengths_are_those_of_cells(made: _Made) -> None:
    prompt, backend = made.prompt(0), made.driver.backend
    run_prompt(made.driver, prompt)
    assert backend.length(0) == len(prompt) + 15
    for span in reversed(prompt.media):
        for length in (span.end + 1, span.end, span.offset):
            assert backend.trim(0, length)
            assert backend.length(0) == length

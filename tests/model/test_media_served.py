"""Prompts shown as pictures have the outputs of their text on llama.cpp, through router and shard."""

from pathlib import Path
from typing import Any

import pytest

import caravan
from caravan import LLM, SamplingParams
from caravan_router.engine.batcher import Batcher
from caravan_router.engine.streams import RequestStream
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.projectors import Speller, write_spelling_projector
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.shown_prompts import spelling_shower

# Tokens of the tiny model that stand for a byte each.
_BYTES = range(3, 259)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Speller]:
    """A model with its projector beside it."""
    folder = tmp_path_factory.mktemp("spelling")
    model = write_tiny_llama(folder / "tiny.gguf")
    return model, write_spelling_projector(folder / "mmproj-tiny.gguf", model, _BYTES)


def _prompts() -> list[list[int]]:
    """Prompts with beginnings in common, of one to six pictures."""
    begin = [1, *(3 + (7 * place) % 250 for place in range(60))]
    return [
        [*begin[: 30 + 10 * (number % 4)], *(3 + (11 * place + number) % 250 for place in range(20 + 15 * number))]
        for number in range(6)
    ]


_OPTIONS: dict[str, dict[str, Any]] = {
    "unified": {"kv_layout": "unified", "parallel": 4, "ctx_size": 2048},
    "split": {"kv_layout": "split", "parallel": 4, "ctx_size": 2048},
    "auto": {"kv_layout": "auto", "parallel": 4, "ctx_size": 1024},
    "scarce cells": {"kv_layout": "unified", "parallel": 6, "ctx_size": 512},
    "small steps": {"kv_layout": "unified", "parallel": 4, "ctx_size": 2048, "batch_size": 24},
    "drafts": {"kv_layout": "unified", "parallel": 4, "ctx_size": 2048, "speculate": 8},
}


def _outputs(llm: LLM) -> list[list[list[int]]]:
    """Greedy ones: media are computed apart from text, so that sums may round otherwise, which draws would show."""
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in _prompts()]
    params = SamplingParams(temperature=0, n=2, max_tokens=40, ignore_eos=True)
    return [[list(one.token_ids) for one in made.outputs] for made in llm.generate(prompts, params)]


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_outputs_are_those_of_the_text(
    tiny: tuple[Path, Speller], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, speller = tiny
    found: list[GenerationSpec] = []
    submit = Batcher.submit

    def submit_shown(batcher: Batcher, spec: GenerationSpec, *rest: Any) -> RequestStream:
        assert batcher.model.media is not None
        found.append(spelling_shower(speller, batcher.model.media).shown(spec))
        return submit(batcher, found[-1], *rest)

    with caravan.LLM(str(model), **options) as llm:
        words = _outputs(llm)
    monkeypatch.setattr(Batcher, "submit", submit_shown)
    with caravan.LLM(str(model), **options) as llm:
        assert _outputs(llm) == words
    assert sum(spec.media is not None for spec in found) >= len(found) - 2

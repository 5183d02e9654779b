"""Prompts of a model's own embeddings have the outputs of its tokens on llama.cpp, however they are scheduled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan import LLM, EmbedsPrompt, ModelError, SamplingParams, TokensPrompt
from caravan_testing.media_kinds import KINDS
from caravan_testing.projectors import embeddings_of
from caravan_testing.shard_models import HEAD_MODEL
from caravan_testing.shard_tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


_PROMPTS = [[1, *(3 + (7 * place + number) % 250 for place in range(30 + 15 * number))] for number in range(6)]
_OPTIONS: dict[str, dict[str, Any]] = {
    "unified": {"kv_layout": "unified", "parallel": 4, "ctx_size": 2048},
    "split": {"kv_layout": "split", "parallel": 4, "ctx_size": 2048},
    "scarce cells": {"kv_layout": "unified", "parallel": 6, "ctx_size": 512},
    "small steps": {"kv_layout": "unified", "parallel": 4, "ctx_size": 2048, "batch_size": 24},
}


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_outputs_are_those_of_the_tokens(tiny: Path, options: dict[str, Any]) -> None:
    rows = embeddings_of(tiny).astype(np.float32)
    params = SamplingParams(temperature=0, n=2, max_tokens=40, ignore_eos=True)
    with LLM(str(tiny), enable_prompt_embeds=True, **options) as llm:
        expected = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in _PROMPTS], params)
        found = llm.generate([EmbedsPrompt(prompt_embeds=rows[prompt]) for prompt in _PROMPTS], params)
        assert [one.outputs for one in found] == [one.outputs for one in expected]


def _opened(kind: str, folder: Path) -> LLM:
    (made,) = (one for one in KINDS if one.name == kind)
    model = made.write_model(folder / "model.gguf")
    projector = made.write_projector(folder / "mmproj.gguf", model)
    return LLM(str(model), mmproj=str(projector), enable_prompt_embeds=True, ctx_size=1024, ubatch_size=300)


def test_beside_images_that_are_computed_whole(tmp_path: Path) -> None:
    """Embeddings are computed as many at a time as fit, and each sees those before it only."""
    prompt = [1, *(3 + (7 * place) % 250 for place in range(400))]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with _opened("gemma", tmp_path) as llm:
        # What the model multiplies the embeddings of tokens by.
        table = embeddings_of(tmp_path / "model.gguf")
        rows = table[prompt] * np.float32(table.shape[1] ** 0.5)
        (expected,) = llm.generate([prompt], params)
        (found,) = llm.generate({"prompt_embeds": rows}, params)
        assert found.outputs == expected.outputs
        assert found.num_prompt_tokens == len(prompt)


def test_beside_images_in_a_grid_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="mmproj"):
        _opened("grid", tmp_path)


def test_a_model_that_reads_tokens_only_is_refused_at_once() -> None:
    """Or llama.cpp would end the process with the first request."""
    with pytest.raises(ModelError, match="reads tokens only"):
        LLM(str(HEAD_MODEL), enable_prompt_embeds=True, ctx_size=256)

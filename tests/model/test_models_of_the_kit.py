"""llama.cpp computes the models with random weights that the kit for GPUs makes."""

from dataclasses import replace
from pathlib import Path

import pytest
from gpu.kit.models import DENSE, MIXTURE, ModelShape, small, write_model

from caravan_testing.shard_models import ModelDriver
from caravan_testing.shard_tiny_llama import write_tiny_llama

pytestmark = pytest.mark.model


@pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=["dense", "experts"])
def test_the_prompt_decides_what_follows(shape: ModelShape, tmp_path: Path) -> None:
    vocabulary = write_tiny_llama(tmp_path / "vocabulary.gguf")
    path = write_model(tmp_path / "model.gguf", replace(small(shape), tokens=512), vocabulary)
    driver = ModelDriver(path, ctx_size=256)
    try:
        texts = [driver.alone(driver.tokens(prompt), 16) for prompt in ("one", "two", "one")]
    finally:
        driver.backend.close()
    assert texts[0] == texts[2] != texts[1]
    assert len(set(texts[0])) > 4

"""The projector that is found beside a model's file."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from caravan_models.cached_model import local_projector
from caravan_models.listing import title_of


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", "gemma-3-4b-it"),
        ("folder/Qwen2-VL.Q8_0.gguf", "Qwen2-VL"),
        ("big-UD-Q2_K_XL-00001-of-00003.gguf", "big"),
        ("tiny.gguf", "tiny"),
    ],
)
def test_a_title_is_a_name_without_quantisation(path: str, title: str) -> None:
    assert title_of(path) == title


_MODEL = "gemma-3-4b-it-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("others", "projector"),
    [
        ([], None),
        (["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        # Its own quantisations are no other models.
        (["gemma-3-4b-it-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        (["qwen-7b-Q4_K_M.gguf", "mmproj-F16.gguf"], None),
        (["qwen-7b-Q4_K_M.gguf", "qwen-mmproj.gguf", "mmproj-gemma-3-4b-it-F16.gguf"], "mmproj-gemma-3-4b-it-F16.gguf"),
        (["mmproj-F16.safetensors"], None),
    ],
)
def test_the_projector_of_a_model_is_beside_it(tmp_path: Path, others: Sequence[str], projector: str | None) -> None:
    for name in (_MODEL, *others):
        (tmp_path / name).touch()
    found = local_projector(tmp_path / _MODEL)
    assert found == (None if projector is None else tmp_path / projector)


def test_files_that_are_no_models_have_no_projector(tmp_path: Path) -> None:
    (tmp_path / "mmproj.gguf").touch()
    assert local_projector(tmp_path / "mmproj.gguf") is None
    assert local_projector(tmp_path / "missing.gguf") is None
    (tmp_path / "part-00002-of-00003.gguf").touch()
    assert local_projector(tmp_path / "part-00002-of-00003.gguf") is None

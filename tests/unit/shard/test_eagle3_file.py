"""Which EAGLE-3 heads may draft for a model, as the files of both say. With others, llama.cpp would end the process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan_shard.backends.llama.heads import eagle3_file, file_pair
from caravan_shard.backends.llama.heads.head_file import head_file
from caravan_shard.config import ShardConfig
from caravan_shard.startup_error import StartupError
from caravan_testing.written_gguf import TOKENS, written

SIZE = 8
MODEL = {"block_count": 6, "embedding_length": SIZE}
HEAD = {
    "block_count": 1,
    "embedding_length": SIZE,
    "attention.head_count": 2,
    "target_layers": [1, 3, 5],
    "target_hidden_size": SIZE,
}
TENSORS = dict.fromkeys(eagle3_file._NEEDED, np.ones(SIZE, np.float32))
OUTPUT = {"output.weight": np.ones((4, SIZE), np.float32)}


def layers(
    folder: Path,
    numbers: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    *,
    model: Path | None = None,
    **fields: Any,
) -> tuple[int, ...]:
    """Return the layers that a head reads which is as it should be but for ``numbers`` and ``tensors``."""
    if model is None:
        model = written(folder / "model.gguf", "llama", MODEL, {})
    head = written(folder / "head.gguf", "eagle3", HEAD | dict(numbers or {}), TENSORS | dict(tensors or {}))
    flags = {"spec_type": "draft-eagle3", "model_draft": str(head)} | fields
    found = head_file(ShardConfig(model=str(model), **flags))
    return () if found is None else found.layers


def test_a_head_names_the_layers_that_it_reads(tmp_path: Path) -> None:
    assert layers(tmp_path) == (1, 3, 5)
    assert layers(tmp_path, spec_type="auto") == (1, 3, 5)
    assert layers(tmp_path, spec_type="none", model_draft="") == ()


def test_its_tokens_may_be_some_of_the_model_s(tmp_path: Path) -> None:
    assert layers(tmp_path, tensors={"d2t": np.array([0, 19, 3, 4]), **OUTPUT}) == (1, 3, 5)


def test_with_its_own_embeddings_and_output_it_may_be_narrower(tmp_path: Path) -> None:
    own = {"token_embd.weight": np.ones((TOKENS, 4), np.float32), "output.weight": np.ones((TOKENS, 4), np.float32)}
    assert layers(tmp_path, {"embedding_length": 4}, own) == (1, 3, 5)


@pytest.mark.parametrize(
    ("numbers", "tensors", "reason"),
    [
        ({}, {"fc.weight": None}, r"it lacks the tensor fc\.weight"),
        ({}, {"blk.0.attn_norm_2.weight": None}, r"it lacks the tensor blk\.0\.attn_norm_2\.weight"),
        ({"block_count": 2}, {}, "it must have 1 layer. Given: 2"),
        ({"target_layers": [1, 3]}, {}, "it must read 3 of the model's layers 0 to 5. Given: 1, 3"),
        ({"target_layers": [1, 3, 6]}, {}, "layers 0 to 5. Given: 1, 3, 6"),
        ({"target_layers": [-1, 3, 4]}, {}, "layers 0 to 5. Given: -1, 3, 4"),
        ({"target_layers": None}, {}, "layers 0 to 5. Given: $"),
        ({"target_hidden_size": 16}, {}, "it reads hidden states of 16 numbers, and those of the model have 8"),
        ({"embedding_length": 4}, {}, r"it lacks token_embd\.weight, and that of the model has 8 .*, not 4"),
        (
            {"embedding_length": 4},
            {"token_embd.weight": np.ones((TOKENS, 4), np.float32)},
            r"it lacks output\.weight, and that of the model has 8 .*, not 4",
        ),
        ({"attention.key_length": 2}, {}, "its keys have 2 numbers, and its values 4"),
        ({}, {"token_embd.weight": np.ones((19, SIZE), np.float32)}, "it has embeddings of 19 of 20 tokens"),
        ({}, {"d2t": np.arange(4)}, "it has its own tokens, and no output layer for them"),
        ({}, {"d2t": np.arange(4, dtype=np.int32), **OUTPUT}, "are no list of 64-bit numbers"),
        ({}, {"d2t": np.array([0, 1, 2, 20]), **OUTPUT}, "are not all of the 20 ones of the model"),
        ({}, {"d2t": np.array([0, 1, 2, -1]), **OUTPUT}, "are not all of the 20 ones of the model"),
    ],
)
def test_what_would_end_the_process_is_refused(
    numbers: Mapping[str, Any], tensors: Mapping[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=rf"^head\.gguf cannot draft for model\.gguf: .*{reason}"):
        layers(tmp_path, numbers, tensors)


def test_models_of_other_kinds_are_refused(tmp_path: Path) -> None:
    other = written(tmp_path / "model.gguf", "glm4moe", MODEL, {})
    with pytest.raises(StartupError, match="no hidden states can be read from the architecture glm4moe yet"):
        layers(tmp_path, model=other)
    longer = written(tmp_path / "model.gguf", "qwen3", MODEL, {}, tokens=21)
    with pytest.raises(StartupError, match="it has another vocabulary, of 20 tokens instead of 21"):
        layers(tmp_path, model=longer)


def test_a_layer_that_is_a_head_itself_is_not_read(tmp_path: Path) -> None:
    model = written(tmp_path / "model.gguf", "qwen35", MODEL | {"nextn_predict_layers": 1}, {})
    with pytest.raises(StartupError, match=r"layers 0 to 4\. Given: 1, 3, 5"):
        layers(tmp_path, model=model)


def test_other_builds_of_llama_cpp_have_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_pair, "can_get_inputs", lambda: False)
    with pytest.raises(StartupError, match=r"this build of llama\.cpp does not hand out what layers read"):
        layers(tmp_path)


def test_the_flag_must_go_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"head\.gguf is an EAGLE-3 head: pass --spec-type draft-eagle3"):
        layers(tmp_path, spec_type="none")
    plain = written(tmp_path / "plain.gguf", "llama", MODEL, {})
    assert layers(tmp_path, spec_type="auto", model_draft=str(plain)) == ()
    with pytest.raises(StartupError, match=r"plain\.gguf is no EAGLE-3 head, .*: its architecture is llama"):
        layers(tmp_path, model_draft=str(plain))
    with pytest.raises(StartupError, match="cannot read"):
        layers(tmp_path, model_draft=str(tmp_path / "missing.gguf"))

"""Which models are to draft with their own heads, as their files say."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from caravan_models.gguf_header import read_header
from caravan_shard.backends.llama.heads import found
from caravan_shard.backends.llama.heads.found import wants_head
from caravan_shard.config import ShardConfig
from caravan_shard.startup_error import StartupError


def written(folder: Path, architecture: str, heads: int, *, has_tensors: bool = True) -> Path:
    """Write the beginning of a model."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if heads:
        writer.add_nextn_predict_layers(heads)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(8, np.float32))
    if has_tensors:
        writer.add_tensor("blk.1.nextn.eh_proj.weight", np.ones((8, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def wanted(path: Path, spec_type: str, **flags: Any) -> bool:
    return wants_head(ShardConfig(model=str(path), spec_type=spec_type, **flags))


def test_a_head_that_is_there_is_used_if_it_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, "glm4moe", 1)
    assert read_header(path).has_head
    assert read_header(path).parameter_count == 8 + 8 * 16
    assert wanted(path, "draft-mtp")
    assert wanted(path, "auto")
    assert not wanted(path, "none")
    assert not wanted(path, "auto", model_draft="other.gguf")


@pytest.mark.parametrize(
    ("architecture", "heads", "has_tensors", "reason"),
    [
        ("glm4moe", 0, False, "the file has no head for it"),
        # llama.cpp would end the process.
        ("glm4moe", 1, False, "the file has no head for it"),
        ("glm4moe", 2, True, "2 heads of the architecture glm4moe cannot be used yet"),
        ("step35", 1, True, "1 head of the architecture step35 cannot be used yet"),
    ],
)
def test_other_models_are_refused(
    architecture: str, heads: int, has_tensors: bool, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path, architecture, heads, has_tensors=has_tensors)
    assert not wanted(path, "auto")
    with pytest.raises(
        StartupError, match=rf"model\.gguf cannot draft by itself as --spec-type draft-mtp asks: {reason}"
    ):
        wanted(path, "draft-mtp")


def test_other_builds_of_llama_cpp_have_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "can_get_states", lambda: False)
    path = written(tmp_path, "qwen35", 1)
    assert not wanted(path, "auto")
    with pytest.raises(StartupError, match=r"this build of llama\.cpp does not hand out hidden states"):
        wanted(path, "draft-mtp")

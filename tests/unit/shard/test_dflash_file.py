"""Which DFlash and DSpark heads may draft for a model, as the files of both say, and how these draft."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan_shard.backends.base import DraftBlock
from caravan_shard.backends.llama.heads.head_file import HeadFile, HeadKind, head_file
from caravan_shard.config import ShardConfig
from caravan_shard.startup_error import StartupError
from caravan_testing.written_gguf import TOKENS, written

SIZE = 8
UNKNOWN = "tokenizer.ggml.mask_token_id"
MODEL = {"block_count": 6, "embedding_length": SIZE}
HEAD = {
    "block_count": 2,
    "embedding_length": SIZE,
    "attention.head_count": 2,
    "target_layers": [1, 3, 4, 5],
    "block_size": 8,
    UNKNOWN: 19,
}
ONE = np.ones(SIZE, np.float32)
OF_LAYERS = [f"{kind}_norm" for kind in ("attn", "attn_q", "attn_k", "ffn")]
OF_LAYERS += ["attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_down", "ffn_up"]
TENSORS = dict.fromkeys(("fc.weight", "enc.output_norm.weight", "output_norm.weight"), ONE)
TENSORS |= {f"blk.{layer}.{name}.weight": ONE for layer in range(2) for name in OF_LAYERS}
MARKOV = {"markov_w1.weight": np.ones((TOKENS, 4), np.float32)}


def found(
    folder: Path, numbers: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None, **fields: Any
) -> HeadFile:
    """Return what is found of a head that is as it should be except for ``numbers`` and ``tensors``."""
    model = written(folder / "model.gguf", "llama", MODEL, {})
    head = written(folder / "head.gguf", "dflash", HEAD | dict(numbers or {}), TENSORS | dict(tensors or {}))
    file = head_file(ShardConfig(model=str(model), **({"spec_type": "auto", "model_draft": str(head)} | fields)))
    assert file is not None
    return file


def test_a_head_says_how_it_drafts(tmp_path: Path) -> None:
    block = DraftBlock(rows=8, unknown=19, first=1)
    expected = HeadFile(kind=HeadKind.DFLASH, layers=(1, 3, 4, 5), block=block)
    assert found(tmp_path) == expected
    assert block.most == 7
    assert found(tmp_path, spec_type="draft-dflash") == expected
    assert found(tmp_path, {"attention.causal": True}).is_causal
    usual = found(tmp_path, {"block_size": None}).block
    assert usual is not None
    assert usual.rows == 16


@pytest.mark.parametrize(("from_last", "first"), [(None, 0), (True, 0), (False, 1)])
def test_a_dspark_head_may_predict_from_its_first_row(from_last: bool | None, first: int, tmp_path: Path) -> None:
    file = found(tmp_path, {"sample_from_anchor": from_last}, MARKOV)
    assert file.kind is HeadKind.DSPARK
    assert file.block == DraftBlock(rows=8, unknown=19, first=first)


@pytest.mark.parametrize(
    ("numbers", "tensors", "reason"),
    [
        ({}, {"enc.output_norm.weight": None}, r"it lacks the tensor enc\.output_norm\.weight"),
        ({}, {"blk.1.attn_k_norm.weight": None}, r"it lacks the tensor blk\.1\.attn_k_norm\.weight"),
        ({"block_count": None}, {}, "it has no layers"),
        ({"target_layers": [1, 6]}, {}, "it must read some of the model's layers 0 to 5. Given: 1, 6"),
        ({"target_layers": None}, {}, "layers 0 to 5. Given: $"),
        ({"embedding_length": 4}, {}, "it reads hidden states of 4 numbers, and those of the model have 8"),
        ({"attention.key_length": 2}, {}, "its keys have 2 numbers, and its values 4"),
        ({}, {"d2t": np.arange(4)}, "it has its own tokens, and no output layer for them"),
        ({"block_size": 1}, {}, r"its blocks \(dflash\.block_size\) must have 2 to 64 tokens. Given: 1"),
        ({"block_size": 65}, {}, "Given: 65"),
        ({"block_size": None}, MARKOV, "must have 2 to 64 tokens. Given: None"),
        ({"block_size": 64}, MARKOV, "its blocks of 64 tokens may need larger graphs than llama.cpp makes for 24 tens"),
        ({UNKNOWN: None}, {}, r"it names no token for unknown ones \(tokenizer.ggml.mask_token_id\). Given: None"),
        ({UNKNOWN: 20}, {}, "it names no token for unknown ones .* Given: 20"),
        ({}, {"selector_hidden.weight": ONE}, r"heads of DFlash 2, .*, cannot be used yet"),
        ({"hyper_connection.count": 4}, {}, r"heads with layers of DeepSeek V4 .* cannot be used yet"),
    ],
)
def test_what_would_end_the_process_is_refused(
    numbers: Mapping[str, Any], tensors: Mapping[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=rf"^head\.gguf cannot draft for model\.gguf: .*{reason}"):
        found(tmp_path, numbers, tensors)


@pytest.mark.parametrize("spec_type", ["none", "draft-eagle3", "draft-dspark"])
def test_the_flag_must_go_with_the_file(spec_type: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"head\.gguf is a DFlash head: pass --spec-type draft-dflash"):
        found(tmp_path, spec_type=spec_type)


def test_a_dspark_head_is_no_dflash_head(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"head\.gguf is a DSpark head: pass --spec-type draft-dspark"):
        found(tmp_path, tensors=MARKOV, spec_type="draft-dflash")
    plain = written(tmp_path / "plain.gguf", "llama", MODEL, {})
    with pytest.raises(StartupError, match=r"plain\.gguf is no DSpark head, .*: its architecture is llama"):
        found(tmp_path, spec_type="draft-dspark", model_draft=str(plain))

"""Saved cells belong to the weights that computed them, also if samples of the files do not tell these apart."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan import Executor, StateError
from caravan_models.cached_model import parts_of
from caravan_models.contents import fingerprint
from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_shard.config import ShardConfig
from caravan_testing.gguf_file import tensors_of
from caravan_testing.shard_models import know_contents
from caravan_testing.shard_tiny_llama import Parts, Shape, write_tiny_llama
from caravan_testing.shard_tiny_lora import Adapted, write_tiny_lora

pytestmark = pytest.mark.model

# Far more bytes than the samples have.
_LARGE = Shape(embedding=256, layers=4, inner=512)
_PIECE_BYTES = 1 << 16
_OPTIONS: dict[str, Any] = {"ctx_size": 512, "parallel": 2, "threads": 1}


def _write(folder: Path, parts: Parts | None) -> Path:
    folder.mkdir()
    return write_tiny_llama(folder / "m.gguf", _LARGE, parts=parts)


def _change(path: Path) -> None:
    """Change what the samples of a file miss of its tensors of attention."""
    changed, before, whole = False, fingerprint([path]), bytearray(path.read_bytes())
    for name, tensor in tensors_of(path).items():
        if not name.endswith(("attn_q.weight", "attn_v.weight")):
            continue
        for place in range(tensor.place, tensor.place + tensor.bytes_.nbytes, _PIECE_BYTES):
            piece = whole[place : place + _PIECE_BYTES]
            whole[place : place + _PIECE_BYTES] = np.frombuffer(piece, np.float32)[::-1].tobytes()
            path.write_bytes(whole)
            if fingerprint([path]) == before:
                changed = True
            else:
                whole[place : place + _PIECE_BYTES] = piece
    path.write_bytes(whole)
    assert changed


def _with_other_parts(first: Path) -> None:
    for part in parts_of(first)[1:]:
        _change(part)


@pytest.mark.parametrize(
    ("parts", "change"),
    [
        (Parts(40, first_is_small=True), _with_other_parts),
        (Parts(20), _with_other_parts),
        (None, _change),
    ],
    ids=["the first part has no tensors", "a later part", "one file"],
)
def test_other_weights_of_the_same_samples_use_nothing_that_was_saved(
    parts: Parts | None, change: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = _write(tmp_path / "old", parts)
    with Executor(path, **_OPTIONS) as executor:
        conversation = executor.create()
        conversation.prompt("some cells")
        executor.infer()
        saved, held, logits = conversation.save(), conversation.held, conversation.logits().copy()
        quick, cells = executor.backend.facts.fingerprint, executor.backend.contents.state_fingerprint
        assert cells
    # The same bytes in other files.
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    with Executor(tmp_path / "copy" / path.name, **_OPTIONS) as executor:
        copy = executor.load(saved)
        assert (copy.held, executor.backend.contents.state_fingerprint) == (held, cells)
    change(path)
    with Executor(path, **_OPTIONS) as executor:
        assert executor.backend.facts.fingerprint == quick
        with pytest.raises(StateError, match="another model"):
            executor.load(saved)
        assert executor.backend.contents.state_fingerprint not in ("", cells)
        other = executor.create()
        other.prompt("some cells")
        executor.infer()
        assert not np.allclose(other.logits(), logits, atol=1e-3)


def test_all_bytes_of_adapters_and_of_projectors_count(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf")
    adapter = write_tiny_lora(tmp_path / "a.gguf", 1, Adapted("llama", 64, 2))
    config = ShardConfig(model=str(model), lora=(f"a={adapter}",), threads=1, parallel=1, ctx_size=256)
    found = []
    for change in (b"", b"one more byte"):
        adapter.write_bytes(adapter.read_bytes() + change)
        backend = LlamaCppBackend(config)
        assert not backend.contents.state_fingerprint
        know_contents(backend)
        found.append(backend.contents.state_fingerprint)
        backend.close()
    assert len({*found}) == 2


def test_what_a_start_found_out_about_logits_belongs_to_the_files(tmp_path: Path) -> None:
    path = _write(tmp_path / "model", None)
    config = ShardConfig(model=str(path), threads=1, parallel=2, ctx_size=256, cache_dir=str(tmp_path / "cache"))
    found = []
    for _ in range(2):
        backend = LlamaCppBackend(config)
        found.append(backend.numerics.fingerprint)
        backend.close()
        _change(path)
    assert found[0] != found[1]

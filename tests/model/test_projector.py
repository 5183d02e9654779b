"""A shard starts with a projector that it can serve, and says why where it cannot."""

import shutil
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from caravan_proto.messages.media import MediaKind, MediaShape
from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_shard.backends.llama.devices.measure import measure
from caravan_shard.config import ShardConfig
from caravan_shard.media import SliceSize
from caravan_shard.startup_error import StartupError
from caravan_testing.projectors import (
    write_gemma_projector,
    write_grid_projector,
    write_marked_projector,
    write_placed_projector,
    write_varying_projector,
)
from caravan_testing.shard_tiny_gemma import EMBEDDING, write_tiny_gemma
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.shard_tiny_mrope import write_tiny_mrope


def _config(model: Path, **flags: Any) -> ShardConfig:
    return ShardConfig(**{"model": str(model), "parallel": 2, "threads": 1, "ctx_size": 2048, **flags})


def _refusal(model: Path, **flags: Any) -> str:
    with pytest.raises(StartupError) as caught:
        LlamaCppBackend(_config(model, **flags)).close()
    return str(caught.value)


def _cells(model: Path, **flags: Any) -> int | None:
    """Return the most cells of a picture; None if the shard sees none."""
    backend = LlamaCppBackend(_config(model, **flags))
    backend.close()
    return None if backend.facts.media is None else backend.facts.media.max_cells


def _cells_of_square(model: Path, side: int = 2048, **flags: Any) -> int:
    """Return how many cells a picture of equal sides has."""
    backend = LlamaCppBackend(_config(model, **flags))
    assert backend.media is not None
    shape = MediaShape(media_id=b"i", kind=MediaKind.IMAGE, width=side, height=side)
    (size,) = [piece for piece in backend.media.tokenize(shape) if isinstance(piece, SliceSize)]
    backend.close()
    return size.cells


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny.gguf")


def test_a_projector_is_found_beside_the_model(llama: Path) -> None:
    assert _cells(llama) is None
    write_varying_projector(llama.parent / "mmproj-tiny-f16.gguf", EMBEDDING)
    assert _cells(llama) == 256
    assert _cells(llama, mmproj_auto=False) is None
    shutil.copy(llama, llama.parent / "other.gguf")
    assert _cells(llama) == 256
    assert _cells(llama.parent / "other.gguf") is None
    assert _cells(llama.parent / "other.gguf", mmproj=str(llama.parent / "mmproj-tiny-f16.gguf")) == 256


def test_the_projector_of_another_model_is_refused(llama: Path) -> None:
    write_varying_projector(llama.parent / "mmproj.gguf", 2 * EMBEDDING)
    refusal = _refusal(llama, mmproj=str(llama.parent / "mmproj.gguf"))
    assert "made for another model" in refusal
    assert "--no-mmproj" in refusal


def test_the_projector_of_another_model_that_nobody_named_is_left_out(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for write, size in ((write_varying_projector, 2 * EMBEDDING), (write_marked_projector, EMBEDDING)):
        write(llama.parent / "mmproj.gguf", size)
        caplog.clear()
        assert _cells(llama) is None
        assert "prompts have text only, without the projector" in caplog.text


def test_a_model_without_the_tokens_of_the_projector_is_refused(llama: Path) -> None:
    write_marked_projector(llama.parent / "mmproj.gguf", EMBEDDING)
    assert "lacks tokens that the projector wants" in _refusal(llama, mmproj=str(llama.parent / "mmproj.gguf"))


def test_projectors_whose_tokens_depend_on_the_place_are_refused(llama: Path) -> None:
    write_placed_projector(llama.parent / "mmproj.gguf", EMBEDDING)
    assert "kind hunyuanvl" in _refusal(llama)


def test_files_that_are_no_projectors_are_refused(llama: Path) -> None:
    broken = llama.parent / "mmproj.gguf"
    write_varying_projector(broken, EMBEDDING)
    broken.write_bytes(broken.read_bytes()[:300])
    assert "no whole GGUF file" in _refusal(llama)
    assert "is no GGUF file" in _refusal(llama, mmproj=__file__)
    assert "cannot read the projector" in _refusal(llama, mmproj=str(llama.parent / "none.gguf"))
    assert "cannot load" in _refusal(llama, mmproj=str(llama))


def test_a_span_that_fits_into_no_step_is_refused(tmp_path: Path) -> None:
    gemma = write_tiny_gemma(tmp_path / "gemma.gguf")
    write_gemma_projector(tmp_path / "mmproj.gguf", EMBEDDING)
    assert _cells(gemma, ubatch_size=16) == 16
    refusal = _refusal(gemma, ubatch_size=8)
    assert "an image may take 16 tokens" in refusal
    assert "-ub 16" in refusal


def test_pictures_are_made_smaller_where_their_size_decides(tmp_path: Path) -> None:
    model = write_tiny_mrope(tmp_path / "grid.gguf")
    write_grid_projector(tmp_path / "mmproj.gguf", EMBEDDING)
    assert 32 < (_cells(model, batch_size=64) or 0) <= 64
    assert "--image-max-tokens 64" in _refusal(model, batch_size=64, image_max_tokens=256)
    assert _cells_of_square(model) > 1000
    assert 16 < _cells_of_square(model, image_max_tokens=32) <= 32
    assert _cells_of_square(model, image_min_tokens=64, side=20) > 4 * _cells_of_square(model, side=20)


def test_a_projector_counts_as_needed_memory(llama: Path) -> None:
    projector = write_varying_projector(llama.parent / "mmproj.gguf", EMBEDDING)
    need, blind = (measure(_config(llama, mmproj_auto=auto), []).need for auto in (True, False))
    assert need is not None
    assert blind is not None
    host = need.by_place["host"]
    assert host["projector"] == projector.stat().st_size
    assert host["media_cache"] == 256 << 20
    assert sum(need.places.values()) - sum(blind.places.values()) == host["projector"] + host["media_cache"]


def test_a_build_without_the_library_serves_text(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp.mtmd_cpp", None)
    monkeypatch.delattr(llama_cpp, "mtmd_cpp", raising=False)
    monkeypatch.delitem(sys.modules, "caravan_shard.backends.llama.media.projector", raising=False)
    assert _cells(llama) is None
    write_varying_projector(llama.parent / "mmproj.gguf", EMBEDDING)
    assert _cells(llama, mmproj_auto=False) is None
    assert "it has no libmtmd" in _refusal(llama)

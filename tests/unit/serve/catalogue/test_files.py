"""What is known of a model by its files alone."""

import os
from pathlib import Path

import pytest

from caravan_dialects.api.ollama.models import described_cold
from caravan_models.contents import fingerprint
from caravan_scheduler.core.catalogue import CatalogueError
from caravan_serve.catalogue.entries import CatalogueEntry
from caravan_serve.catalogue.files import described_by, files_of
from caravan_testing.shard_models import DEMO_MODEL, fetched
from caravan_testing.stand_in_hub import small_gguf


def entry(path: Path) -> CatalogueEntry:
    return CatalogueEntry(name="one", source=str(path))


def test_a_model_is_described_without_a_shard() -> None:
    path = fetched(DEMO_MODEL)
    files = files_of(entry(path))
    assert (files.parts, files.size, files.fingerprint) == ((path,), path.stat().st_size, fingerprint([path]))
    shown = described_cold(described_by(entry(path), files))
    details = shown.details
    assert (details.family, details.parameter_size, details.quantization_level) == ("llama", "134.52M", "Q4_1")
    assert "im_start" in shown.template
    assert shown.capabilities == ["completion", "tools"]
    assert shown.model_info["llama.context_length"] == 8192
    # Only a shard knows what it serves.
    assert not [key for key in shown.model_info if key.startswith("caravan.")]


def test_an_encoder_only_embeds(tmp_path: Path) -> None:
    path = tmp_path / "encoder.gguf"
    path.write_bytes(small_gguf(architecture="bert"))
    # Its tensors are random bytes, of which none is described.
    assert described_cold(described_by(entry(path), files_of(entry(path)))).capabilities == ["embedding"]


def test_files_are_looked_at_again_once_they_have_changed(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    path.write_bytes(small_gguf())
    first = files_of(entry(path))
    assert files_of(entry(path), first) is first
    path.write_bytes(small_gguf(seed=1))
    os.utime(path, (1, 1))
    second = files_of(entry(path), first)
    assert second.fingerprint != first.fingerprint
    assert second.modified_s == 1.0


def test_what_is_not_here_or_no_model_is_refused_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="the files of one cannot be read") as refused:
        files_of(entry(tmp_path / "gone.gguf"))
    assert str(tmp_path) not in str(refused.value)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(CatalogueError, match="no model that can be read") as refused:
        described_by(entry(broken), files_of(entry(broken)))
    assert str(tmp_path) not in str(refused.value)

"""Which models a TOML file and a folder describe."""

import math
import os
from pathlib import Path

import pytest

from caravan_models.cached_model import found_model
from caravan_serve.catalogue.entries import (
    CatalogueEntry,
    CatalogueFileError,
    check_distinct,
    check_name,
    parse_catalogue,
    read_catalogue,
)

FOLDER = Path("/models")


def test_an_entry_says_how_a_model_is_loaded() -> None:
    text = """
    [[models]]
    name = "writer"
    model = "sub/writer.gguf"
    aliases = ["gpt-4o-mini", "owner/writer:latest"]
    flags = ["--ctx-size", "4096"]
    pinned = true
    memory_mib = 400
    idle_s = 300
    [[models]]
    name = "coder"
    model = "hf:owner/coder-GGUF:Q4_K_M"
    [[models]]
    name = "small"
    model = "smollm2"
    """
    assert parse_catalogue(text, FOLDER) == (
        CatalogueEntry(
            name="writer",
            source="/models/sub/writer.gguf",
            aliases=("gpt-4o-mini", "owner/writer:latest"),
            flags={"ctx_size": 4096},
            pinned=True,
            memory_bytes=400 << 20,
            idle_s=300.0,
        ),
        CatalogueEntry(name="coder", source="hf:owner/coder-GGUF:Q4_K_M", idle_s=math.inf),
        CatalogueEntry(name="small", source="smollm2"),
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('name = "../a"\nmodel = "a.gguf"', r"models\[0\].name must have 1 to 200 .* Given: '../a'"),
        ('name = "a/b/c"\nmodel = "a.gguf"', r"models\[0\].name must have"),
        ('name = "a..b"\nmodel = "a.gguf"', r"models\[0\].name must have"),
        ('name = ""\nmodel = "a.gguf"', r"models\[0\].name must have"),
        ('name = "a"\nmodel = ""', r"models\[0\].model must be a GGUF file or a repository"),
        ('name = "a"\nmodel = "hf:"', r"models\[0\].model: "),
        ('name = "a"\nmodel = "a.gguf"\naliases = ["/etc"]', r"models\[0\].aliases\[0\] must have"),
        ('name = "a"\nmodel = "a.gguf"\naliases = ["a"]', "the models a and a both answer to a"),
        ('name = "a"\nmodel = "a.gguf"\nflags = ["--alias=b"]', r"models\[0\].flags must not have --alias"),
        ('name = "a"\nmodel = "a.gguf"\nmemory_mib = -1', r"models\[0\].memory_mib must be >= 0. Given: -1"),
        ('name = "a"\nmodel = "a.gguf"\nidle_s = -0.5', r"models\[0\].idle_s must be >= 0, .* Given: -0.5"),
        ('name = "a"\nmodel = "a.gguf"\nsize = 3', "Object contains unknown field `size`"),
        ('name = "a"', "Object missing required field `model`"),
        ("name = a", "Invalid value"),
    ],
)
def test_a_wrong_entry_is_named(entry: str, message: str) -> None:
    with pytest.raises(CatalogueFileError, match=message):
        parse_catalogue(f"[[models]]\n{entry}", FOLDER)


def test_a_folder_has_a_model_for_each_first_part_and_no_projector(tmp_path: Path) -> None:
    for name in ("b.Q4_0.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-b.gguf", "b.txt"):
        (tmp_path / name).touch()
    assert [(entry.name, entry.aliases) for entry in read_catalogue(None, tmp_path)] == [
        ("a", ("a-00001-of-00002.gguf",)),
        ("b.Q4_0", ("b.Q4_0.gguf",)),
    ]


def test_every_file_of_a_folder_is_a_model_whatever_it_is_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = {
        "UPPER.GGUF": "UPPER",
        "a(b).gguf": "a-b-c0221730",
        "a-00001-of-00002.gguf": "a",
        "a b-00001-of-00002.gguf": "a-b",
        "with space.gguf": "with-space-d245324c",
        "with-space.gguf": "with-space",
        "x@y.gguf": "x-y",
        "日本語.gguf": "model-77710aed",
        "..hidden..gguf": "hidden",
        "a..b.gguf": "a.b",
        "new\nline.gguf": "new-line",
        f"{'z' * 240}.gguf": f"{'z' * 191}-6479845e",
        os.fsdecode(b"\xff.gguf"): "model-a8100ae6",
    }
    for file in named:
        (tmp_path / file).touch()
    (tmp_path / "dir.gguf").mkdir()
    (tmp_path / "dead.gguf").symlink_to("nowhere")
    entries = read_catalogue(None, tmp_path)
    assert {Path(entry.source).name: entry.name for entry in entries} == named
    check_distinct(entries)
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            check_name("it", name)
        assert "-of-" in entry.source or found_model(entry.source).model == Path(entry.source)
    assert "'dir.gguf' of --models-dir is left out: it is no file" in caplog.text
    assert "'dead.gguf' of --models-dir is left out: it is a link to nothing" in caplog.text
    assert "'with space.gguf' of --models-dir is called with-space-" in caplog.text
    assert len(caplog.records) == 2 + sum(Path(file).stem != name for file, name in named.items()) - 1


def test_a_file_says_more_of_models_that_a_folder_has(tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).touch()
    file = tmp_path / "models.toml"
    file.write_text('[[models]]\nname = "first"\nmodel = "one.gguf"\npinned = true\n')
    assert [(entry.name, entry.pinned) for entry in read_catalogue(file, tmp_path)] == [("first", True), ("two", False)]


@pytest.mark.parametrize("place", ["file", "folder"])
def test_what_is_not_there_is_named(place: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(CatalogueFileError, match=f"{missing}: No such file or directory"):
        read_catalogue(missing if place == "file" else None, missing if place == "folder" else None)

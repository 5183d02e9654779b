"""Digests of whole files, which are computed once."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from caravan_models import contents
from caravan_models.cached_model import parts_of
from caravan_models.contents import ChangedFileError, SeenFile, SeenFiles, fingerprint, note_digest


@pytest.fixture(autouse=True)
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what is remembered, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "caravan" / "digests"


def sha256(*texts: str) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def seen(*paths: Path) -> SeenFiles:
    return SeenFiles(model=tuple(map(SeenFile.at, paths)))


def model_of(*paths: Path) -> str:
    found = seen(*paths).read()
    assert found is not None
    return found.model


def test_each_byte_of_each_part_counts_and_nothing_else(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1", "one"), written(tmp_path / "2", "two")
    assert model_of(one) == sha256("one")
    assert model_of(one, two) == sha256(sha256("one"), sha256("two"))
    assert model_of(written(tmp_path / "another name", "one")) == sha256("one")
    written(two, "TWO")
    assert model_of(one, two) == sha256(sha256("one"), sha256("TWO"))
    others = SeenFiles(
        model=seen(one).model, adapters=seen(two, one).model, projector=SeenFile.at(written(tmp_path / "3", "p"))
    ).read()
    assert others is not None
    assert (others.model, others.adapters, others.projector) == (
        sha256("one"),
        (sha256("TWO"), sha256("one")),
        sha256("p"),
    )


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = written(tmp_path / "1", "one"), written(tmp_path / "2", "two")
    assert seen(one).known() is None
    model_of(one)
    reads: list[Path] = []
    read_file = contents._read

    def note_and_read(file: SeenFile, is_wanted: Callable[[], bool]) -> str | None:
        reads.append(file.path)
        return read_file(file, is_wanted)

    monkeypatch.setattr(contents, "_read", note_and_read)
    known = seen(one).known()
    assert known is not None
    assert known.model == sha256("one") == model_of(one)
    assert seen(one, two).known() is None
    model_of(one, two)
    assert reads == [two]
    # The same inode, size and time of modification.
    times = one.stat().st_atime_ns, one.stat().st_mtime_ns
    written(one, "eno")
    os.utime(one, ns=times)
    assert seen(one).known() is None
    assert model_of(one) == sha256("eno")


def test_a_checked_download_need_not_be_read(tmp_path: Path) -> None:
    one = written(tmp_path / "1", "one")
    note_digest(one, "ab" * 32)
    assert model_of(one) == "ab" * 32


def test_a_file_that_was_replaced_or_written_since_is_unknown(tmp_path: Path) -> None:
    one = written(tmp_path / "1", "one")
    before = seen(one)
    written(tmp_path / "new", "two").replace(one)
    with pytest.raises(ChangedFileError, match="has changed"):
        before.read()
    # Also if it is known what was in it: it may have been replaced before it was loaded.
    before = seen(one)
    model_of(one)
    written(tmp_path / "new", "three").replace(one)
    assert before.known() is None
    with pytest.raises(ChangedFileError, match="has changed"):
        before.read()
    before = seen(one)

    def change() -> bool:
        written(one, "longer than before")
        return True

    with pytest.raises(ChangedFileError, match="has changed"):
        before.read(change)
    assert before.known() is None


def test_reading_ends_once_nobody_wants_it(tmp_path: Path) -> None:
    one = written(tmp_path / "1", "one")
    assert seen(one).read(lambda: False) is None
    assert seen(one).known() is None


@pytest.mark.parametrize("broken", ["", "{}", "[]", '{"identity": 1, "sha256": "x"}', "\xff"])
def test_what_cannot_be_read_or_kept_is_not_remembered(broken: str, tmp_path: Path, remembered: Path) -> None:
    one = written(tmp_path / "1", "one")
    model_of(one)
    (file,) = remembered.glob("*.json")
    file.write_text(broken)
    assert seen(one).known() is None
    assert model_of(one) == sha256("one")


def test_without_a_place_digests_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = written(tmp_path / "1", "one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(one))
    assert model_of(one) == sha256("one") == model_of(one)
    assert seen(one).known() is None


def test_the_parts_of_a_model_are_those_that_are_there(tmp_path: Path) -> None:
    names = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    first, second, third = (written(tmp_path / name, name) for name in names)
    alone = written(tmp_path / "m.gguf", "whole")
    assert parts_of(first) == parts_of(second) == (first, second, third)
    assert parts_of(alone) == (alone,)
    before = fingerprint(parts_of(first))
    written(third, "other weights")
    assert fingerprint(parts_of(first)) != before
    second.unlink()
    assert parts_of(first) == (first, third)

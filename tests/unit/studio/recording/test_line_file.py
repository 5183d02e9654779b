"""The file of a recording, which another thread writes."""

import gzip
import logging
import random
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from caravan_studio.recording.line_file import LineFile


@pytest.fixture
def threads_alternate() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("threads_alternate")
def test_nothing_waits_once_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "part"
    part = LineFile(path)
    for _ in range(100_000):
        part.write([b"line\n"])
    part.end()
    part.wait()
    assert part.waiting_bytes == 0
    assert gzip.decompress(path.read_bytes()) == b"line\n" * 100_000


def _written(path: Path, lines: list[bytes]) -> LineFile:
    file = LineFile(path)
    file.write(lines)
    file.end()
    file.wait()
    return file


@pytest.mark.parametrize("is_there", [False, True])
def test_only_its_owner_may_read_it(is_there: bool, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    if is_there:
        path.write_bytes(b"old")
        path.chmod(0o644)
    assert not _written(path, [b"one", b"two"]).failed
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert gzip.decompress(path.read_bytes()) == b"onetwo"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("size", [10, 1 << 22])
def test_a_full_disk_is_told_once(size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "recording"
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.ERROR):
        file = _written(path, [random.Random(1).randbytes(size)])
    assert file.failed
    assert [record.message for record in caplog.records] == ["a recording cannot be written"]

"""The file of a recording, which another thread writes."""

import errno
import gzip
import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from caravan_router.recording.part_file import PartFile


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
    part = PartFile(path)
    for _ in range(100_000):
        part.write([b"line\n"])
    part.end()
    part.wait()
    assert part.waiting_bytes == 0
    assert gzip.decompress(path.read_bytes()) == b"line\n" * 100_000


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    part = PartFile(tmp_path / "part")
    part.end()
    part.wait()
    assert (tmp_path / "part").stat().st_mode & 0o777 == 0o600


class FullDisk(io.RawIOBase):
    """Takes ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self._room = room

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)


@pytest.mark.parametrize("lines", [1, 3000])
def test_a_full_disk_ends_it_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder, lines: int
) -> None:
    part = PartFile(tmp_path / "part")
    part._raw.close()
    part._raw = part._file.fileobj = io.BufferedWriter(FullDisk(10), buffer_size=100)  # type: ignore[assignment]
    for _ in range(lines):
        part.write([random.randbytes(100)])
    part.end()
    part.wait()
    assert part.failed
    assert [record.message for record in caplog.records] == ["a recording cannot be written"]
    assert not recwarn.list, "a thread ended with an exception"

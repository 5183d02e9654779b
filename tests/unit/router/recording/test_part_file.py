"""The file of a recording, which another thread writes."""

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path

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

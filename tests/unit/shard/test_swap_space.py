"""The swap space: its limits, the order of its stores, and the absence of leftover files."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan_shard.arrays import State
from caravan_shard.backends.base import StartupError
from caravan_shard.config import ShardConfig
from caravan_shard.protocol.sequence_parameters import SequenceParameters
from caravan_shard.sampling.parameters import SamplingParameters
from caravan_shard.sequences.sequence import Sequence
from caravan_shard.sequences.state_stores import DiskStore, MemoryStore
from caravan_shard.sequences.swap import MOST_SWAPPED, Swapped, SwapSpace
from caravan_shard.service.loading import make_swap_space

PARAMETERS = SequenceParameters(sampling=SamplingParameters(), prompt_length=1, max_length=2)
SWAPPED = Swapped(Sequence(sequence_id=0, parameters=PARAMETERS, birth=0), 0)


def state(size: int, seed: int = 0) -> State:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def open_files(folder: Path) -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += str(folder) in str(link.readlink())
        except FileNotFoundError:
            continue
    return count


@pytest.fixture
def space(tmp_path: Path) -> SwapSpace:
    """A swap space of 100 bytes in memory and 1,000 on disk."""
    return SwapSpace([MemoryStore(100), DiskStore(tmp_path, 1_000)])


def test_states_go_to_memory_then_to_disk_then_nowhere(space: SwapSpace, tmp_path: Path) -> None:
    assert space.capacity_bytes == space.most_bytes + 100 == 1_100
    assert space.put(1, SWAPPED, state(60, 1))
    assert space.put(2, SWAPPED, state(60, 2))
    assert space.put(3, SWAPPED, state(40, 3))
    assert open_files(tmp_path) == 1
    assert space.most_bytes == 940
    assert not space.put(4, SWAPPED, state(941))
    assert space.put(5, SWAPPED, state(940, 5))
    assert (space.used_bytes, space.most_bytes, len(space)) == (1_100, 0, 4)
    for handle, size in ((1, 60), (2, 60), (3, 40), (5, 940)):
        taken = space.take(handle)
        assert taken is not None
        assert taken[0] is SWAPPED
        assert np.array_equal(taken[1], state(size, handle))
        assert space.take(handle) is None
    assert space.used_bytes == len(space) == open_files(tmp_path) == 0


def test_files_have_no_name_and_dropping_closes_them(space: SwapSpace, tmp_path: Path) -> None:
    for handle in range(3):
        assert space.put(handle, SWAPPED, state(200))
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == 3
    space.drop([0, 0, 77])
    assert (open_files(tmp_path), space.used_bytes) == (2, 400)
    assert 0 not in space
    space.clear()
    assert (open_files(tmp_path), space.used_bytes, len(space)) == (0, 0, 0)


def test_the_number_of_swapped_sequences_is_bounded() -> None:
    space = SwapSpace([MemoryStore(1_000)])
    for handle in range(MOST_SWAPPED):
        assert space.put(handle, SWAPPED, state(0))
    assert space.most_bytes == -1
    assert not space.put(MOST_SWAPPED, SWAPPED, state(0))


class BrokenFile:
    """A file that reads and writes a few bytes at a time, or fails."""

    def __init__(self, writes: int) -> None:
        self.writes = writes
        self.closed = False
        self.data = b""

    def write(self, data: Any) -> int:
        if not self.writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.writes -= 1
        self.data += bytes(data[:10])
        return len(data[:10])

    def seek(self, _offset: int) -> None:
        pass

    def readinto(self, data: Any) -> int:
        size = min(7, len(data), len(self.data))
        data[:size], self.data = self.data[:size], self.data[size:]
        return size

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> "BrokenFile":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """An empty store on disk."""
    return DiskStore(tmp_path, 1_000)


def give(monkeypatch: pytest.MonkeyPatch, file: BrokenFile) -> BrokenFile:
    monkeypatch.setattr(DiskStore, "_open", lambda _self: file)
    return file


def test_nothing_is_saved_on_a_full_disk(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    file = give(monkeypatch, BrokenFile(writes=2))
    assert not store.put(1, state(30))
    assert file.closed
    assert store.used_bytes == 0


def test_a_state_survives_partial_reads_and_writes(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, BrokenFile(writes=10))
    assert store.put(1, state(95))
    read = store.take(1)
    assert read is not None
    assert np.array_equal(read, state(95))


def test_a_truncated_file_is_not_restored(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    file = give(monkeypatch, BrokenFile(writes=10))
    assert store.put(1, state(50))
    file.data = file.data[:-1]
    assert store.take(1) is None
    assert store.used_bytes == 0


def test_nothing_is_saved_when_no_file_can_be_opened(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(DiskStore, "_open", refuse)
    assert not store.put(1, state(5))


def test_the_flags_select_the_stores(tmp_path: Path) -> None:
    gib = 1 << 30
    assert make_swap_space(ShardConfig(backend="fake")).capacity_bytes == gib
    assert make_swap_space(ShardConfig(backend="fake", swap_space=0)).capacity_bytes == 0
    assert make_swap_space(ShardConfig(backend="fake", swap_space=0)).most_bytes == -1
    folder = tmp_path / "new" / "folder"
    config = ShardConfig(backend="fake", swap_space=0.5, swap_dir=str(folder))
    assert make_swap_space(config).capacity_bytes == 8.5 * gib
    assert folder.is_dir()
    config = ShardConfig(backend="fake", swap_dir=str(folder), swap_dir_space=0)
    assert make_swap_space(config).capacity_bytes == gib


def test_a_swap_dir_that_is_a_file_is_a_startup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = ShardConfig(backend="fake", swap_dir=str(tmp_path / "file"))
    with pytest.raises(StartupError, match=r"--swap-dir .*file: File exists"):
        make_swap_space(config)

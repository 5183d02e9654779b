"""How much memory the host and its control groups leave, and shards that load onto GPUs take turns."""

import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_proto.host_memory import available_memory, locked_memory, own_memory
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service import loading
from caravan_shard.service.loading import gpu_turn
from caravan_testing.waiting import DEADLINE_S

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_host_says_what_is_available(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) is None
    write(tmp_path / "meminfo", "MemTotal: 9000 kB\nMemAvailable:    3072 kB\n")
    assert available_memory(tmp_path, tmp_path) == 3 * MIB
    assert (available_memory() or 0) > MIB


def test_every_group_around_the_process_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    write(proc / "meminfo", f"MemAvailable: {100 * 1024} kB\n")
    write(proc / "self/cgroup", "0::/pod/shard\n")
    write(groups / "pod/shard/memory.max", "max\n")
    write(groups / "pod/shard/memory.current", f"{5 * MIB}\n")
    assert available_memory(proc, groups) == 100 * MIB
    write(groups / "pod/memory.max", f"{50 * MIB}\n")
    write(groups / "pod/memory.current", f"{40 * MIB}\n")
    assert available_memory(proc, groups) == 10 * MIB
    # The kernel drops cached files before it refuses memory.
    write(groups / "pod/memory.stat", f"anon 5\ninactive_file {3 * MIB}\n")
    assert available_memory(proc, groups) == 13 * MIB
    # Those that are in use too, such as the weights of a shard that starts again.
    write(groups / "pod/memory.stat", f"anon 5\nactive_file {2 * MIB}\ninactive_file {3 * MIB}\n")
    assert available_memory(proc, groups) == 15 * MIB
    write(groups / "pod/memory.stat", f"anon 5\ninactive_file {3 * MIB}\n")
    write(groups / "pod/memory.current", f"{60 * MIB}\n")
    assert available_memory(proc, groups) == 0


def test_groups_of_the_first_version_count(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", f"MemAvailable: {100 * 1024} kB\n")
    write(tmp_path / "self/cgroup", "5:cpu,memory:/box\n")
    write(tmp_path / "memory/box/memory.limit_in_bytes", f"{9 * MIB}\n")
    write(tmp_path / "memory/box/memory.usage_in_bytes", f"{2 * MIB}\n")
    assert available_memory(tmp_path, tmp_path) == 7 * MIB


def test_the_cache_takes_no_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def capacity(available: int | None, cache_ram: int) -> int:
        monkeypatch.setattr(loading, "available_memory", lambda: available)
        config = ShardConfig(backend="fake", cache_ram=cache_ram)
        return loading.make_run_store(config, ToyBackend()).capacity.memory

    assert capacity(None, 8192) == 8192 * MIB
    assert capacity(800 * MIB, 700) == 700 * MIB
    assert capacity(800 * MIB, 8192) == 700 * MIB
    assert capacity(0, 8192) == 0
    assert capacity(800 * MIB, 0) == 0


def test_the_cache_leaves_room_for_weights_that_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of the file count as free, but a shard that loses them reads them from disk at each step."""
    monkeypatch.setattr(loading, "available_memory", lambda: 800 * MIB)
    backend = ToyBackend()
    backend.facts = replace(backend.facts, weight_bytes=400 * MIB, device_bytes=0)

    def capacity(*, mmap: bool = True) -> int:
        return loading.make_run_store(ShardConfig(model="m.gguf", mmap=mmap), backend).capacity.memory

    assert capacity() == 350 * MIB
    assert capacity(mmap=False) == 700 * MIB
    backend.facts = replace(backend.facts, weight_bytes=900 * MIB)
    assert capacity() == 0


def test_the_process_says_what_it_holds_and_has_locked(tmp_path: Path) -> None:
    assert own_memory(tmp_path) == locked_memory(tmp_path) == 0
    write(tmp_path / "self/status", "Name:\tx\nVmLck:\t    2048 kB\nRssAnon:\t    1024 kB\nRssFile:\t 9 kB\n")
    assert (own_memory(tmp_path), locked_memory(tmp_path)) == (MIB, 2 * MIB)
    assert own_memory() > MIB


def test_the_second_waits_until_the_first_has_loaded(tmp_path: Path) -> None:
    waiting, entered, first_ended = threading.Event(), threading.Event(), threading.Event()
    order: list[bool] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for another shard" in record.getMessage():
                waiting.set()

    def load() -> None:
        with gpu_turn(tmp_path):
            order.append(first_ended.is_set())
            entered.set()

    log = logging.getLogger("caravan_shard.service.loading")
    watch, level = Watch(), log.level
    log.addHandler(watch)
    log.setLevel(logging.INFO)
    try:
        with gpu_turn(tmp_path):
            second = threading.Thread(target=load, daemon=True)
            second.start()
            assert waiting.wait(DEADLINE_S)
            assert not entered.is_set()
            first_ended.set()
        assert entered.wait(DEADLINE_S)
        second.join(DEADLINE_S)
    finally:
        log.removeHandler(watch)
        log.setLevel(level)
    assert order == [True]
    assert (next(tmp_path.iterdir()).stat().st_mode & 0o777) == 0o600


def test_the_turn_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), gpu_turn(tmp_path):
        raise ValueError("broken")
    with gpu_turn(tmp_path):
        pass


def test_without_a_place_for_the_lock_a_shard_starts_nevertheless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = False
    with gpu_turn(tmp_path / "missing"):
        loaded = True
    assert loaded
    assert "may see the same memory" in caplog.text

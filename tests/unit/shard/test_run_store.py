"""The store of saved runs: its bounds, its files, what a restart finds, and the bytes of a run on its way."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.limits import SavedBytes
from caravan_shard.arrays import State
from caravan_shard.protocol.commands import StoredRun
from caravan_shard.sequences.run_files import RunFiles
from caravan_shard.sequences.run_format import FIXED_BYTES, BadRunError, RunFormat, RunReceiver
from caravan_shard.sequences.runs import RunStore
from caravan_testing.waiting import DEADLINE_S, wait_until

FINGERPRINT = "ab" * 32

FORMAT = RunFormat("ab" * 32)
KEYS = (b"first key of run", b"last key of run.")
RUN = StoredRun(start=3, cuts=(8, 20), keys=KEYS, size=60, note=b"a prompt")
STATE = np.arange(60, dtype=np.uint8)
DATA = FORMAT.header(RUN, STATE) + STATE.tobytes()


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def run(number: int, size: int = 60, start: int = 0, end: int = 20) -> StoredRun:
    return StoredRun(start=start, cuts=(start + 1, end), keys=(key(1_000 + number), key(number)), size=size)


def state(size: int, seed: int = 0) -> State:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def put(store: RunStore, number: int, size: int = 60, start: int = 0) -> None:
    store.put(run(number, size, start), state(size, number))


def check(store: RunStore, *numbers: int, size: int = 60) -> None:
    """Check that the store has exactly these runs, with the right contents."""
    assert {found.key for found, _ in store.list_runs()} == {key(number) for number in numbers}
    for number in numbers:
        read = store.read(key(number))
        assert read is not None
        assert read[0].key == key(number)
        assert np.array_equal(read[1], state(size, number))


def soon(condition: Callable[[], bool]) -> bool:
    """Wait until ``condition`` holds."""
    return wait_until(condition, "the writer's thread gets so far")


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def disk_store(folder: Path, memory: int = 400, disk: int = 1_000) -> RunStore:
    return RunStore(memory, RunFiles(folder, FINGERPRINT), disk)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    """A store with 300 bytes for runs in memory, 100 for those being written, and 1,000 on disk."""
    store = disk_store(tmp_path)
    yield store
    store.close()


def spill(store: RunStore, *numbers: int) -> None:
    """Spill one run after another."""
    for number in numbers:
        store.spill([key(number)])
        assert soon(lambda: not store._leaving)


def test_memory_is_bounded_and_dropping_makes_room() -> None:
    store = RunStore(150)
    assert store.capacity == SavedBytes(memory=150, disk=0)
    put(store, 1)
    put(store, 2)
    assert (store.used.memory, store.memory_room) == (120, 30)
    with pytest.raises(AssertionError):
        put(store, 3)
    with pytest.raises(AssertionError):
        put(store, 1, size=1)
    store.drop([key(1), key(1), key(9)])
    assert (store.used.memory, store.find(key(1)), store.read(key(1))) == (60, None, None)
    put(store, 3)
    check(store, 2, 3)
    assert store.find(key(3)) == run(3)


def test_without_files_spilling_forgets() -> None:
    store = RunStore(150)
    put(store, 1)
    put(store, 2)
    store.spill([key(1), key(7)])
    check(store, 2)
    store.close()


def test_a_spilled_run_is_read_from_its_file(store: RunStore, tmp_path: Path) -> None:
    for number in range(1, 6):
        put(store, number)
    spill(store, 2, 3, 99)
    assert store.used == SavedBytes(memory=180, disk=120)
    assert files_in(tmp_path) == {f"{key(number).hex()}.run" for number in (2, 3)}
    assert {found.key for found, on_disk in store.list_runs() if on_disk} == {key(2), key(3)}
    check(store, 1, 2, 3, 4, 5)
    store.drop([key(2), key(5)])
    assert soon(lambda: len(files_in(tmp_path)) == 1)
    assert store.used == SavedBytes(memory=120, disk=60)
    put(store, 2)
    spill(store, 2, 2)
    check(store, 1, 2, 3, 4)


def test_a_fetched_file_is_read_once(store: RunStore, tmp_path: Path) -> None:
    put(store, 1)
    put(store, 2)
    spill(store, 1)
    store.fetch([key(1), key(1), key(2), key(3)])
    (tmp_path / next(tmp_path.iterdir()).name / f"{key(1).hex()}.run").unlink()
    check(store, 1, 2)
    # The file is read again, and is gone.
    assert store.read(key(1)) is None
    assert store.used == SavedBytes(memory=60, disk=0)
    store.fetch([key(1)])
    check(store, 2)


def test_runs_that_disk_has_no_room_for_are_forgotten(tmp_path: Path) -> None:
    store = disk_store(tmp_path, disk=130)
    for number in range(1, 4):
        put(store, number)
    for number in range(1, 4):
        spill(store, number)
    check(store, 1, 2)
    assert store.used == SavedBytes(memory=0, disk=120)
    store.close()


def test_runs_that_leave_memory_are_bounded(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = Event(), RunFiles.write
    monkeypatch.setattr(RunFiles, "write", lambda *args: (gate.wait(), write(*args)))
    for number in range(1, 6):
        put(store, number, size=40)
    # One is being written, one waits: 80 of 100 bytes.
    store.spill([key(number) for number in (1, 2, 3)])
    assert store.find(key(3)) is None
    assert store.used == SavedBytes(memory=80, disk=80)
    # It can still be read, and dropping it leaves no file.
    check(store, 1, 2, 4, 5, size=40)
    store.drop([key(1)])
    gate.set()
    assert soon(lambda: not store._leaving)
    assert soon(lambda: files_in(store._files.folder) == {f"{key(2).hex()}.run"})  # type: ignore[union-attr]
    check(store, 2, 4, 5, size=40)


def test_a_run_that_is_dropped_and_saved_again_while_it_is_written_stays(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = Event(), RunFiles.write
    monkeypatch.setattr(RunFiles, "write", lambda *args: (gate.wait(), write(*args)))
    put(store, 1)
    store.spill([key(1)])
    store.drop([key(1)])
    put(store, 1)
    store.spill([key(1)])
    gate.set()
    assert soon(lambda: not store._leaving)
    assert store.used == SavedBytes(memory=0, disk=60)
    check(store, 1)


def test_a_full_disk_forgets_the_run_and_leaves_no_file(
    store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    put(store, 1)
    put(store, 2)
    monkeypatch.setattr("zlib.crc32", fail)
    spill(store, 1)
    monkeypatch.undo()
    assert files_in(tmp_path) == set()
    check(store, 2)
    assert store.used == SavedBytes(memory=60, disk=0)


def test_a_restart_finds_the_runs_of_its_model(tmp_path: Path) -> None:
    first = disk_store(tmp_path)
    put(first, 2, start=10)
    put(first, 1)
    put(first, 3)
    spill(first, 2)
    # What is in memory goes to disk at the end.
    first.close()
    second = disk_store(tmp_path)
    assert [found.start for found, _ in second.list_runs()] == [0, 0, 10]
    assert all(on_disk for _, on_disk in second.list_runs())
    assert second.find(key(2)) == run(2, start=10)
    check(second, 1, 2, 3)
    assert second.used == SavedBytes(memory=0, disk=180)
    # Another model, and a second shard of the same one, have folders of their own.
    other, beside = RunStore(400, RunFiles(tmp_path, "cd" * 32), 1_000), disk_store(tmp_path)
    check(other)
    check(beside)
    for store in (second, other, beside):
        store.close()
    check(third := disk_store(tmp_path), 1, 2, 3)
    third.close()


def test_the_end_saves_the_most_recently_used_runs_that_fit(tmp_path: Path) -> None:
    first = disk_store(tmp_path, disk=130)
    for number in range(1, 5):
        put(first, number)
    first.read(key(2))
    first.close()
    second = disk_store(tmp_path, disk=130)
    check(second, 2, 4)
    second.close()


def test_the_end_takes_no_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = RunFiles.write

    def write_slowly(files: RunFiles, one: StoredRun, cells: State) -> None:
        time.sleep(0.05)
        write(files, one, cells)

    monkeypatch.setattr(RunFiles, "write", write_slowly)
    store = disk_store(tmp_path)
    for number in range(1, 6):
        put(store, number)
    store.close(0.06)
    store._writer.join(DEADLINE_S)
    assert 1 <= len(files_in(tmp_path)) < 5


def test_a_smaller_space_keeps_the_most_recently_used_files(tmp_path: Path) -> None:
    first = disk_store(tmp_path)
    for number in range(1, 4):
        put(first, number)
        spill(first, number)
        time.sleep(0.02)
    first.read(key(1))
    first.close()
    second = disk_store(tmp_path, disk=130)
    check(second, 1, 3)
    second.close()
    assert len(files_in(tmp_path)) == 2


def change(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("broken", ["header", "fingerprint", "key", "state", "truncated", "longer", "empty", "renamed"])
def test_a_broken_file_is_never_a_wrong_answer(tmp_path: Path, broken: str) -> None:
    first = disk_store(tmp_path)
    put(first, 1)
    put(first, 2)
    spill(first, 1, 2)
    assert first._files is not None
    path = first._files.folder / f"{key(1).hex()}.run"
    data = path.read_bytes()
    first.close()
    damages: dict[str, Callable[[], bytes]] = {
        "header": lambda: change(data, 9),
        "fingerprint": lambda: change(data, 30),
        "key": lambda: change(data, 80),
        "state": lambda: change(data, len(data) - 1),
        "truncated": lambda: data[:-1],
        "longer": lambda: data + b"x",
        "empty": lambda: b"",
        "renamed": lambda: (path.parent / f"{key(2).hex()}.run").read_bytes(),
    }
    path.write_bytes(damages[broken]())
    second = disk_store(tmp_path)
    assert second.read(key(1)) is None
    assert second.find(key(1)) is None
    check(second, 2)
    second.close()
    assert files_in(tmp_path) == {f"{key(2).hex()}.run"}


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, FINGERPRINT)
    files.write(run(1), state(60, 1))
    path = files.folder / f"{key(1).hex()}.run"
    data = path.read_bytes()
    assert np.array_equal(files.read(run(1)), state(60, 1))
    for at in range(len(data)):
        path.write_bytes(change(data, at))
        with pytest.raises(BadRunError):
            files.read(run(1))
    files.close()


def test_left_over_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, FINGERPRINT)
    files.write(run(1), state(60, 1))
    (files.folder / f"{key(5).hex()}.new").write_bytes(b"half")
    (files.folder / "notes.txt").write_bytes(b"somebody's")
    files.close()
    store = disk_store(tmp_path)
    check(store, 1)
    store.close()
    assert files_in(tmp_path) == {f"{key(1).hex()}.run", "notes.txt"}


WRITER = """
import sys
from pathlib import Path
import numpy as np
from caravan_shard.protocol.commands import StoredRun
from caravan_shard.sequences.run_files import RunFiles
files = RunFiles(Path(sys.argv[1]), "ab" * 32)
state = np.zeros(1 << 24, np.uint8)
print("ready", flush=True)
for number in range(1_000):
    files.write(StoredRun(start=0, cuts=(5,), keys=(number.to_bytes(16, "little"),), size=len(state)), state)
"""


def test_a_killed_writer_leaves_nothing_broken(tmp_path: Path) -> None:
    for attempt in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.1 + 0.07 * attempt)
            writer.kill()
        files = RunFiles(tmp_path, FINGERPRINT)
        assert files.folder.name.endswith("-0")
        for found in list(files.scan()):
            assert not files.read(found).any()
        assert not list(files.folder.glob("*.new"))
        files.close()


def test_a_folder_that_is_a_file_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="File exists"):
        RunFiles(tmp_path / "file", FINGERPRINT)


def test_until_files_may_be_used_runs_wait_for_them(tmp_path: Path) -> None:
    with_files = disk_store(tmp_path)
    for number in (1, 2):
        put(with_files, number)
    spill(with_files, 1, 2)
    with_files.close()

    store = RunStore(400, disk_bytes=1_000)
    assert store.capacity == SavedBytes(memory=300, disk=1_000)
    # Computed again meanwhile.
    put(store, 2)
    put(store, 3)
    store.spill([key(3)])
    check(store, 2, 3)
    files = RunFiles(tmp_path, FINGERPRINT)
    store.use_files(files, list(files.scan()))
    check(store, 1, 2, 3)
    assert soon(lambda: not store._leaving)
    assert [(found.key, on_disk) for found, on_disk in store.list_runs()] == [
        (key(1), True),
        (key(2), False),
        (key(3), True),
    ]
    assert store.used == SavedBytes(memory=60, disk=120)
    store.close()
    again = disk_store(tmp_path)
    check(again, 1, 2, 3)
    again.close()


def test_a_store_whose_files_never_come_ends(tmp_path: Path) -> None:
    store = RunStore(400, disk_bytes=1_000)
    put(store, 1)
    store.spill([key(1)])
    store.close()
    assert files_in(tmp_path) == set()


def receive(
    data: bytes, part: int = 1 << 20, *, key: bytes = KEYS[-1], most_bytes: int = 60
) -> tuple[StoredRun, bytes]:
    receiver = RunReceiver(FORMAT, key, most_bytes)
    for at in range(0, len(data), part):
        receiver.add(data[at : at + part])
    run, state = receiver.finish()
    return run, state.tobytes()


@pytest.mark.parametrize("part", [1, 7, FIXED_BYTES, FIXED_BYTES + 1, 1_000])
def test_a_run_comes_in_parts_of_any_size(part: int) -> None:
    assert receive(DATA, part) == (RUN, STATE.tobytes())


def test_every_changed_byte_of_a_run_on_its_way_is_noticed() -> None:
    for at in range(len(DATA)):
        with pytest.raises(BadRunError):
            receive(DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :])


@pytest.mark.parametrize("length", [0, 1, FIXED_BYTES - 1, FIXED_BYTES, len(DATA) - 61, len(DATA) - 1])
def test_a_truncated_run_is_noticed(length: int) -> None:
    with pytest.raises(BadRunError):
        receive(DATA[:length])


def test_what_is_not_expected_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(BadRunError, match="60 bytes, where there is room for 59"):
        receive(DATA[:FIXED_BYTES], most_bytes=59)
    with pytest.raises(BadRunError, match="fingerprint"):
        RunReceiver(RunFormat("cd" * 32), KEYS[-1], 60).add(DATA)
    with pytest.raises(BadRunError, match="more bytes"):
        receive(DATA + b"x", part=11)
    with pytest.raises(BadRunError, match="another run"):
        receive(DATA, key=KEYS[0])

"""Files of saved runs, in a folder that one process uses at a time.

`run_format` says what a file contains.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from caravan_shard.arrays import State
from caravan_shard.protocol.commands import StoredRun
from caravan_shard.sequences.run_format import FIXED_BYTES, BadRunError, RunFormat

_log = logging.getLogger(__name__)

_SUFFIX = ".run"
_NEW_SUFFIX = ".new"
_LOCK = "lock"
# Shards with one --cache-dir and one model, each with a folder of its own.
_MAX_FOLDERS = 256


class RunFiles:
    """The files of a folder under ``parent`` that no other process uses.

    Two shards of one model never share a folder, so that neither drops what the other counts on. The folder is the
    first that nobody has locked: after a restart, the same. The kernel unlocks it however the process ends.
    """

    def __init__(self, parent: Path, fingerprint: str) -> None:
        """``fingerprint``: 64 hexadecimal digits. Raises OSError if the folder cannot be used."""
        self._format = RunFormat(fingerprint)
        parent.mkdir(parents=True, exist_ok=True)
        self.folder, self._lock = _lock_folder(parent, fingerprint)
        check_folder(self.folder)

    def scan(self) -> Iterator[StoredRun]:
        """Yield the runs, the least recently used first, and remove what is broken or was left by a dead process."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix == _NEW_SUFFIX:
                path.unlink(missing_ok=True)
            elif path.suffix == _SUFFIX:
                try:
                    run = self._read_header(path)
                    found.append((path.stat().st_mtime_ns, run))
                except (BadRunError, OSError) as error:
                    _log.warning("a file of a saved run is removed", extra={"path": str(path), "error": str(error)})
                    path.unlink(missing_ok=True)
        found.sort(key=lambda pair: pair[0])
        return (run for _, run in found)

    def write(self, run: StoredRun, state: State) -> None:
        """Write the file of a run, which others see only once it is complete. Raises OSError."""
        path = self._path(run.key)
        new = path.with_suffix(_NEW_SUFFIX)
        try:
            with new.open("wb", buffering=0) as file:
                for part in (self._format.header(run, state), state.data):
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def read(self, run: StoredRun) -> State:
        """Return the state of a run. Raises BadRunError or OSError."""
        path = self._path(run.key)
        data: State = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            left = data.data
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise BadRunError("the file has another size")
        state = self._format.state(data, run)
        os.utime(path)
        return state

    def remove(self, run: StoredRun) -> None:
        """Remove the file of a run, if it is there."""
        try:
            self._path(run.key).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot remove the file of a saved run", extra={"error": str(error)})

    def close(self) -> None:
        """Let other processes use the folder."""
        os.close(self._lock)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{_SUFFIX}"

    def _read_header(self, path: Path) -> StoredRun:
        with path.open("rb") as file:
            start = file.read(FIXED_BYTES)
            header_bytes, size = self._format.sizes(start)
            header = start + file.read(header_bytes - FIXED_BYTES)
        if path.stat().st_size != header_bytes + size:
            raise BadRunError("truncated")
        run = self._format.run(header)
        if path.stem != run.key.hex():
            raise BadRunError("another run")
        return run


def check_folder(folder: Path) -> None:
    """Raise OSError if there can be no files in ``folder``, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f"probe.{os.getpid()}{_NEW_SUFFIX}"
    probe.write_bytes(b"")
    probe.unlink()


def _lock_folder(parent: Path, fingerprint: str) -> tuple[Path, int]:
    """Return the first folder of this fingerprint that nobody uses, and the descriptor that locks it."""
    for number in range(_MAX_FOLDERS):
        folder = parent / f"{fingerprint[:32]}-{number}"
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        except OSError:
            os.close(lock)
            raise
        else:
            return folder, lock
    raise OSError(f"{_MAX_FOLDERS} shards use {parent}")

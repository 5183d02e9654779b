"""Files of saved runs, in a folder that one process uses at a time.

A file has a header, then the state:

    8 bytes magic and version, u32 CRC-32 of all that follows, u32 number of cuts, u64 bytes of the state, u32 start,
    32 bytes fingerprint, a u32 for each cut, a key of 16 bytes for each cut, the state

The checksum is CRC-32: it must find accidents, not forgeries, and zlib computes 4 GB/s where the functions of hashlib
compute 0.8 (BLAKE2b) to 1.4 (SHA-256).
"""

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from caravan_shard.arrays import State
from caravan_shard.sequences.run import Run

_log = logging.getLogger(__name__)

_MAGIC = b"CRVNRUN1"
_HEAD = struct.Struct("<8sI")
_REST = struct.Struct("<IQI32s")
_CUT_BYTES = 4
_KEY_BYTES = 16
_MAX_CUTS = 1 << 20
_SUFFIX = ".run"
_NEW_SUFFIX = ".new"
_LOCK = "lock"
# Shards with one --cache-dir and one model, each with a folder of its own.
_MAX_FOLDERS = 256


class BadFileError(Exception):
    """A file is broken or belongs to something else."""


class RunFiles:
    """The files of a folder under ``parent`` that no other process uses.

    Two shards of one model never share a folder, so that neither drops what the other counts on. The folder is the
    first that nobody has locked: after a restart, the same. The kernel unlocks it however the process ends.
    """

    def __init__(self, parent: Path, fingerprint: str) -> None:
        """``fingerprint``: 64 hexadecimal digits. Raises OSError if the folder cannot be used."""
        self._fingerprint = bytes.fromhex(fingerprint)
        parent.mkdir(parents=True, exist_ok=True)
        self.folder, self._lock = _lock_folder(parent, fingerprint)
        self._folder_check()

    def _folder_check(self) -> None:
        probe = self.folder / f"probe{_NEW_SUFFIX}"
        probe.write_bytes(b"")
        probe.unlink()

    def scan(self) -> Iterator[Run]:
        """Yield the runs, the least recently used first, and remove what is broken or was left by a dead process."""
        found = []
        for path in self.folder.iterdir():
            if path.suffix == _NEW_SUFFIX:
                path.unlink(missing_ok=True)
            elif path.suffix == _SUFFIX:
                try:
                    run = self._read_header(path)
                    found.append((path.stat().st_mtime_ns, run))
                except (BadFileError, OSError) as error:
                    _log.warning("a file of a saved run is removed", extra={"path": str(path), "error": str(error)})
                    path.unlink(missing_ok=True)
        found.sort(key=lambda pair: pair[0])
        return (run for _, run in found)

    def write(self, run: Run, state: State) -> None:
        """Write the file of a run, which others see only once it is complete. Raises OSError."""
        rest = b"".join(
            (
                _REST.pack(len(run.cuts), state.nbytes, run.start, self._fingerprint),
                struct.pack(f"<{len(run.cuts)}I", *run.cuts),
                *run.keys,
            )
        )
        checksum = zlib.crc32(state.data, zlib.crc32(rest))
        path = self._path(run.key)
        new = path.with_suffix(_NEW_SUFFIX)
        try:
            with new.open("wb", buffering=0) as file:
                for part in (_HEAD.pack(_MAGIC, checksum) + rest, state.data):
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def read(self, run: Run) -> State:
        """Return the state of a run. Raises BadFileError or OSError."""
        path = self._path(run.key)
        data: State = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            left = data.data
            while left and (count := file.readinto(left)):
                left = left[count:]
        header_bytes = _HEAD.size + _REST.size + len(run.cuts) * (_CUT_BYTES + _KEY_BYTES)
        if left or len(data) != header_bytes + run.size:
            raise BadFileError("the file has another size")
        magic, checksum = _HEAD.unpack_from(data.data)
        if magic != _MAGIC or checksum != zlib.crc32(data.data[_HEAD.size :]):
            raise BadFileError("the checksum is wrong")
        os.utime(path)
        return data[header_bytes:]

    def remove(self, run: Run) -> None:
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

    def _read_header(self, path: Path) -> Run:
        with path.open("rb") as file:
            start = file.read(_HEAD.size + _REST.size)
            if len(start) < _HEAD.size + _REST.size or not start.startswith(_MAGIC):
                raise BadFileError("no header")
            count, size, first, fingerprint = _REST.unpack_from(start, _HEAD.size)
            if fingerprint != self._fingerprint or not 0 < count <= _MAX_CUTS:
                raise BadFileError("another fingerprint")
            table = file.read(count * (_CUT_BYTES + _KEY_BYTES))
        if path.stat().st_size != len(start) + count * (_CUT_BYTES + _KEY_BYTES) + size:
            raise BadFileError("truncated")
        cuts = struct.unpack_from(f"<{count}I", table)
        keys = [table[at : at + _KEY_BYTES] for at in range(count * _CUT_BYTES, len(table), _KEY_BYTES)]
        if list(cuts) != sorted({*cuts}) or cuts[0] <= first or path.stem != keys[-1].hex():
            raise BadFileError("a header that is not of this file")
        return Run(start=first, cuts=cuts, keys=tuple(keys), size=size)


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

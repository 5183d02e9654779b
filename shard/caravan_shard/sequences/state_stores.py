"""Bounded stores for saved states: host memory and disk.

A store knows keys and bytes, not sequences.
"""

import logging
import tempfile
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np

from caravan_shard.arrays import State

_log = logging.getLogger(__name__)


class StateStore(Protocol):
    """Keeps states by key, ``capacity_bytes`` bytes at most."""

    capacity_bytes: int
    used_bytes: int

    def put(self, key: int, state: State) -> bool:
        """Keep a state, for which there must be room; False if that failed."""
        ...

    def take(self, key: int) -> State | None:
        """Remove and return a state; None if it is not here or cannot be read."""
        ...

    def drop(self, key: int) -> None:
        """Remove a state, if it is here."""
        ...


class MemoryStore:
    """Keeps states in host memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._states: dict[int, State] = {}

    def put(self, key: int, state: State) -> bool:
        """Keep the array itself, not a copy. Never fails."""
        self._states[key] = state
        self.used_bytes += state.nbytes
        return True

    def take(self, key: int) -> State | None:
        """Remove and return the same array."""
        state = self._states.pop(key, None)
        if state is not None:
            self.used_bytes -= state.nbytes
        return state

    def drop(self, key: int) -> None:
        """Remove the array."""
        self.take(key)


@dataclass(frozen=True, slots=True)
class _SwapFile:
    file: FileIO
    size_bytes: int


class DiskStore:
    """Keeps each state in a file without a name, so that nothing is left behind however this process ends."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        """Make the folder; raises OSError if no file can be made there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._folder = folder
        self._files: dict[int, _SwapFile] = {}
        self._open().close()

    def put(self, key: int, state: State) -> bool:
        """Write a file; False, with a log line, if the disk is full or broken."""
        try:
            file = self._open()
        except OSError as error:
            _log.warning("cannot make a swap file", extra={"error": str(error)})
            return False
        try:
            rest = state.data
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            _log.warning("cannot write a swap file", extra={"error": str(error)})
            file.close()
            return False
        self._files[key] = _SwapFile(file, state.nbytes)
        self.used_bytes += state.nbytes
        return True

    def take(self, key: int) -> State | None:
        """Read and remove the file."""
        kept = self._files.pop(key, None)
        if kept is None:
            return None
        self.used_bytes -= kept.size_bytes
        state: State = np.empty(kept.size_bytes, np.uint8)
        with kept.file as file:
            try:
                file.seek(0)
                rest = state.data
                while rest and (read := file.readinto(rest)):
                    rest = rest[read:]
            except OSError as error:
                _log.warning("cannot read a swap file", extra={"error": str(error)})
                return None
        return None if rest else state

    def drop(self, key: int) -> None:
        """Remove the file."""
        kept = self._files.pop(key, None)
        if kept is not None:
            self.used_bytes -= kept.size_bytes
            kept.file.close()

    def _open(self) -> FileIO:
        # Unbuffered: a state is written in one go, and closing a file must not repeat a failed write.
        return tempfile.TemporaryFile(dir=self._folder, prefix="caravan-swap-", buffering=0)

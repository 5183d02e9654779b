"""Bounded places for the states of swapped sequences."""

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
    """States by handle, at most ``capacity_bytes`` of them."""

    capacity_bytes: int
    used_bytes: int

    def put(self, handle: int, state: State) -> bool:
        """Keep a state for which there is room; False if that failed."""
        ...

    def take(self, handle: int) -> State | None:
        """Give a state back and keep it no longer; None if it is not here or cannot be read."""
        ...

    def drop(self, handle: int) -> None:
        """Forget a state, if it is here."""
        ...


class MemoryStore:
    """Host memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._states: dict[int, State] = {}

    def put(self, handle: int, state: State) -> bool:
        """Keep the array itself; always works."""
        self._states[handle] = state
        self.used_bytes += state.nbytes
        return True

    def take(self, handle: int) -> State | None:
        """The same array."""
        state = self._states.pop(handle, None)
        if state is not None:
            self.used_bytes -= state.nbytes
        return state

    def drop(self, handle: int) -> None:
        """Free the memory."""
        self.take(handle)


@dataclass(frozen=True, slots=True)
class _SwapFile:
    file: FileIO
    size_bytes: int


class DiskStore:
    """A file for each state. The files have no names: however this process ends, nothing of them is left behind."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        """Makes the folder; raises OSError if no file can be made there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._folder = folder
        self._files: dict[int, _SwapFile] = {}
        self._open().close()

    def put(self, handle: int, state: State) -> bool:
        """Write a file; False, and a line in the log, if the disk is full or broken."""
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
        self._files[handle] = _SwapFile(file, state.nbytes)
        self.used_bytes += state.nbytes
        return True

    def take(self, handle: int) -> State | None:
        """Read the file and let it go."""
        kept = self._files.pop(handle, None)
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

    def drop(self, handle: int) -> None:
        """Let the file go."""
        kept = self._files.pop(handle, None)
        if kept is not None:
            self.used_bytes -= kept.size_bytes
            kept.file.close()

    def _open(self) -> FileIO:
        # No buffer: a state is written at once, and a failed write must not come back when the file is closed.
        return tempfile.TemporaryFile(dir=self._folder, prefix="caravan-swap-", buffering=0)

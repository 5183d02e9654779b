"""Room on the disk of the store that is kept for what must work when the disk is full: forgetting."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Deleting writes as much as it erases, until SQLite has moved that into its file.
RESERVED_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class Reserve:
    """A file beside that of the store, whose bytes are given up for a moment. Without a file, it does nothing."""

    def __init__(self, file: Path | None) -> None:
        """``file``: that of the store."""
        self._path = None if file is None else file.with_name(f"{file.name}-reserve")
        self._log = None if file is None else file.with_name(f"{file.name}-wal")
        self._is_whole = False
        self.fill()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give the room up for the block."""
        if self._path is not None:
            self._is_whole = False
            os.truncate(self._path, 0)
        try:
            yield
        finally:
            self.fill()

    def free_bytes(self) -> int:
        """Return how much room the disk has now."""
        if self._path is None:
            return sys.maxsize
        disk = os.statvfs(self._path)
        return disk.f_bavail * disk.f_frsize

    def log_bytes(self) -> int:
        """Return how long SQLite's log is."""
        return self._log.stat().st_size if self._log is not None and self._log.exists() else 0

    def fill(self) -> None:
        """Take the room, if it is there and was not taken yet."""
        if self._path is None or self._is_whole:
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVED_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            _log.info("no room could be reserved for deleting conversations on a full disk: %s", error)
        else:
            self._is_whole = True

"""Files that are read again when they change, and locks that end with their process."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

# Modification time, size and inode: a file that was moved into place may be older than the one it replaced.
FileVersion = tuple[int, int, int]
CHECK_S = 2.0


def file_version(path: str | os.PathLike[str]) -> FileVersion | None:
    """Return what changes whenever the file is replaced or rewritten; None if there is no file at ``path``."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class FileWatch:
    """Tells when one of ``paths`` has changed, or should be read again although it has not.

    The files are looked at every ``check_s`` seconds, in a thread: a network file system may keep them waiting.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], check_s: float = CHECK_S) -> None:
        """Note the files as they are. Make it before they are read, so that a write in between counts as a change."""
        self._paths = paths
        self._check_s = check_s
        self._versions = self._look()
        self._reload_asked = asyncio.Event()

    def reload(self) -> None:
        """Let `changes` yield soon, whether or not a file looks changed."""
        self._reload_asked.set()

    async def changes(self) -> AsyncIterator[None]:
        """Yield after each change, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._check_s):
                    await self._reload_asked.wait()
            except TimeoutError:
                pass
            versions = await asyncio.to_thread(self._look)
            if self._reload_asked.is_set() or versions != self._versions:
                self._reload_asked.clear()
                self._versions = versions
                yield

    def _look(self) -> list[FileVersion | None]:
        return [*map(file_version, self._paths)]


class FileLock:
    """A lock that one process at a time has. The system releases it if the process is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process has it."""
        return self._descriptor is not None

    def take(self) -> bool:
        """Take it if no other process has it. Return whether this one has it now. Raises OSError."""
        if self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let others take it. Without it, this does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

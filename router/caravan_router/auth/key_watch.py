"""Keeps a keyring at what its file says."""

import asyncio
import logging
import os
import time
from pathlib import Path

from caravan_router.auth.key_file import KeyFileError, read_key_file
from caravan_router.auth.keyring import Keyring

_log = logging.getLogger(__name__)

# Time, size and inode: a file that was moved into place may be older than the one it replaced.
_Version = tuple[int, int, int]


class KeyWatch:
    """Reads the file again when it has changed, and when told to. A broken file changes nothing and is logged once.

    No request waits for it: the file is looked at every ``check_s`` seconds, in a thread.
    """

    def __init__(self, path: Path, check_s: float = 2.0) -> None:
        """Blocks: reads the file. Raises KeyFileError."""
        self._path = path
        self._check_s = check_s
        # Before it is read: what is written meanwhile is seen as a change.
        self._version = _version(path)
        self.keyring = Keyring(read_key_file(path), time.monotonic())
        self._told = asyncio.Event()

    def reload(self) -> None:
        """Soon, whether or not the file looks changed."""
        self._told.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._check_s):
                    await self._told.wait()
            except TimeoutError:
                pass
            version = await asyncio.to_thread(_version, self._path)
            if self._told.is_set() or version != self._version:
                self._told.clear()
                self._version = version
                await self._read()

    async def _read(self) -> None:
        try:
            keys = await asyncio.to_thread(read_key_file, self._path)
        except KeyFileError as error:
            _log.error("API keys not reloaded, the old ones stay: %s", error)
        else:
            self.keyring.replace(keys, time.monotonic())
            _log.info("API keys reloaded", extra={"keys": len(keys)})


def _version(path: Path) -> _Version | None:
    """None: it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

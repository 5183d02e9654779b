"""Reloads a keyring when its file changes."""

import asyncio
import logging
import time
from pathlib import Path

from caravan_proto.files import file_version
from caravan_router.auth.key_file import KeyFileError, read_key_file
from caravan_router.auth.keyring import Keyring

_log = logging.getLogger(__name__)


class KeyWatch:
    """Reads the key file again when it has changed or ``reload`` is called. An invalid file is logged and ignored.

    The file is checked every ``check_s`` seconds in a thread, so that no request waits for it.
    """

    def __init__(self, path: Path, check_s: float = 2.0) -> None:
        """Read the file; blocks. Raises KeyFileError."""
        self._path = path
        self._check_s = check_s
        # Taken before the file is read, so that a write in between counts as a change.
        self._version = file_version(path)
        self.keyring = Keyring(read_key_file(path), time.monotonic())
        self._reload_requested = asyncio.Event()

    def reload(self) -> None:
        """Read the file soon, whether or not it looks changed."""
        self._reload_requested.set()

    async def run(self) -> None:
        """Watch the file until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._check_s):
                    await self._reload_requested.wait()
            except TimeoutError:
                pass
            version = await asyncio.to_thread(file_version, self._path)
            if self._reload_requested.is_set() or version != self._version:
                self._reload_requested.clear()
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

"""Reloads a keyring when its file changes."""

import asyncio
import logging
import time
from pathlib import Path

from caravan_proto.files import CHECK_S, FileWatch
from caravan_router.auth.key_file import KeyFileError, read_key_file
from caravan_router.auth.keyring import Keyring

_log = logging.getLogger(__name__)


class KeyWatch:
    """Reads the key file again when it has changed. An invalid file is logged and ignored."""

    def __init__(self, path: Path, check_s: float = CHECK_S) -> None:
        """Read the file; blocks. Raises KeyFileError."""
        self._path = path
        self.file = FileWatch([path], check_s)
        self.keyring = Keyring(read_key_file(path), time.monotonic())

    async def run(self) -> None:
        """Watch the file until cancelled."""
        async for _ in self.file.changes():
            await self._read()

    async def _read(self) -> None:
        try:
            keys = await asyncio.to_thread(read_key_file, self._path)
        except KeyFileError as error:
            _log.error("API keys not reloaded, keeping the old ones: %s", error)
        else:
            self.keyring.replace(keys, time.monotonic())
            _log.info("API keys reloaded", extra={"keys": len(keys)})

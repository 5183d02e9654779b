"""The keys of a router, reloaded when their file changes."""

import asyncio
import hmac
import logging
import time
from collections.abc import Iterable
from pathlib import Path

from caravan_dialects.auth.client import Client
from caravan_dialects.auth.key import MAX_PRIORITY, ApiKey, digest_of
from caravan_proto.files import CHECK_S, FileWatch
from caravan_router.auth.key_file import KeyFileError, read_key_file
from caravan_scheduler.core.generation import Tenant

_log = logging.getLogger(__name__)
# In the log, and as tenant of all requests.
_ONLY_KEY = "api-key"


class Keyring:
    """Finds the client of a key. ``now`` is in seconds on ``time.monotonic`` in all methods."""

    def __init__(self, keys: Iterable[ApiKey], now: float) -> None:
        self._clients: dict[str, Client] = {}
        self.replace(keys, now)

    def find(self, secret: str) -> Client | None:
        """Return the client whose key is ``secret``. Every digest is compared in full, so the time it takes tells
        nothing about the keys.
        """
        digest = digest_of(secret)
        found = None
        for client in self._clients.values():
            if hmac.compare_digest(client.key.digest, digest):
                found = client
        return found

    def client(self, name: str) -> Client | None:
        """Return the client of the key of this name; None if there is none."""
        return self._clients.get(name)

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of the key of this name; None if there is none."""
        client = self._clients.get(name)
        return None if client is None else client.key.tenant

    def replace(self, keys: Iterable[ApiKey], now: float) -> None:
        """Make ``keys`` the only valid ones. A name keeps its used-up allowance, also under a new digest."""
        clients: dict[str, Client] = {}
        for key in keys:
            name = key.tenant.name
            if (client := self._clients.get(name)) is None:
                client = Client(key, now)
            else:
                client.change(key, now)
            clients[name] = client
        self._clients = clients


def single_key(secret: str) -> Keyring:
    """Return the keys of a server that has only one, which may do all that an operator's may."""
    key = ApiKey(digest=digest_of(secret), tenant=Tenant(name=_ONLY_KEY), max_priority=MAX_PRIORITY, operator=True)
    return Keyring([key], time.monotonic())


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

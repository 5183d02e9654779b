"""The API keys that are valid now."""

import hmac
from collections.abc import Iterable

from caravan_dialects.auth.client import Client
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_scheduler.core.generation import Tenant


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

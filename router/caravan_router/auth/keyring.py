"""The keys in force."""

import hmac
from collections.abc import Iterable

from caravan_router.auth.client import Client
from caravan_router.auth.key import ApiKey, digest_of


class Keyring:
    """``now``: seconds on ``time.monotonic``, here and below."""

    def __init__(self, keys: Iterable[ApiKey], now: float) -> None:
        self._clients: dict[str, Client] = {}
        self.replace(keys, now)

    def find(self, secret: str) -> Client | None:
        """Whose key it is. Takes as long whatever is given and whoever it is: every digest is compared in full."""
        digest = digest_of(secret)
        found = None
        for client in self._clients.values():
            if hmac.compare_digest(client.key.digest, digest):
                found = client
        return found

    def replace(self, keys: Iterable[ApiKey], now: float) -> None:
        """Only ``keys`` are in force. What a name has used up and under way stays with it, under whichever digest."""
        clients: dict[str, Client] = {}
        for key in keys:
            name = key.tenant.name
            if (client := self._clients.get(name)) is None:
                client = Client(key, now)
            else:
                client.change(key, now)
            clients[name] = client
        self._clients = clients

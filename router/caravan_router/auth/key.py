"""An API key as the operator wrote it down: never the key itself, only its digest."""

import hashlib
from dataclasses import dataclass

from caravan_router.core.tenant import ANYONE, Tenant

MIN_PRIORITY, MAX_PRIORITY = -100, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One entry of the file. None: no limit.

    ``digest``: SHA-256 of the key. ``max_priority``: the highest that its requests may ask for.
    ``concurrent_requests``: generations under way, queued ones included.
    """

    digest: bytes
    tenant: Tenant
    max_priority: int = 0
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None


# Who asks where no keys are wanted: whoever can reach the port may do anything.
NO_KEY = ApiKey(digest=b"", tenant=ANYONE, max_priority=MAX_PRIORITY)


def digest_of(secret: str) -> bytes:
    """What is stored of a key. No salt and no slow hash: a key is 256 random bits, which nobody guesses."""
    # A header may hold bytes that are no UTF-8.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()

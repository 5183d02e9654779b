"""An API key as the key file describes it: never the key itself, only its digest."""

import hashlib
from dataclasses import dataclass

from caravan_scheduler.core.generation import ANYONE, BULK_PRIORITY, Tenant

MIN_PRIORITY, MAX_PRIORITY = BULK_PRIORITY, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One entry of the key file. A limit of None means no limit.

    ``digest``: SHA-256 of the key. ``max_priority``: highest priority that its requests may have.
    ``concurrent_requests``: maximum number of generations at a time, queued ones included, and of requests that only
    tokenize. ``tokens_per_day``, ``tokens_per_month``: tokens of prompts and outputs, in UTC. ``operator``: whether it
    may use the routes under ``/admin``.
    """

    digest: bytes
    tenant: Tenant
    max_priority: int = 0
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    operator: bool = False


# The key of every request on a server without keys, where routes for operators check the client's address instead.
NO_KEY = ApiKey(digest=b"", tenant=ANYONE, max_priority=MAX_PRIORITY, operator=True)


def digest_of(secret: str) -> bytes:
    """Return the digest to store. It needs no salt and no slow hash: a key is 256 random bits, which nobody guesses."""
    # A header may hold bytes that are not UTF-8.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()

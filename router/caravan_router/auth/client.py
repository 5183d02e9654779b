"""A key in use: what it may, and what it has used of that."""

from caravan_router.auth.key import ApiKey
from caravan_router.auth.permits import PermitPool
from caravan_router.auth.token_bucket import TokenBucket


class Client:
    """Lives as long as the key's name is in the file, so that reloading it gives nobody a fresh allowance.

    ``now``: seconds on ``time.monotonic``, here and below.
    """

    __slots__ = ("_bucket", "key", "permits")

    def __init__(self, key: ApiKey, now: float) -> None:
        self.key = key
        self.permits = PermitPool(key.concurrent_requests)
        self._bucket = None if key.requests_per_minute is None else TokenBucket(key.requests_per_minute, now)

    def take_request(self, now: float) -> float:
        """0.0 when a request may pass, which is then counted; else the seconds until one may."""
        return 0.0 if self._bucket is None else self._bucket.take(now)

    def change(self, key: ApiKey, now: float) -> None:
        """The limits of the same key's new entry, from now on."""
        self.permits.set_limit(key.concurrent_requests)
        if key.requests_per_minute is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = TokenBucket(key.requests_per_minute, now)
        else:
            self._bucket.set_rate(key.requests_per_minute, now)
        self.key = key

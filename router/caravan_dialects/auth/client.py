"""An API key in use: its limits, and what its requests have used of them."""

from caravan_dialects.auth.key import ApiKey
from caravan_dialects.auth.permits import PermitPool
from caravan_dialects.auth.token_bucket import TokenBucket


class Client:
    """The holder of a key. Lives as long as its name is in the key file, so that reloading the file resets no limit.

    ``now`` is in seconds on ``time.monotonic`` in all methods.
    """

    __slots__ = ("_bucket", "key", "permits")

    def __init__(self, key: ApiKey, now: float) -> None:
        self.key = key
        self.permits = PermitPool(key.concurrent_requests)
        self._bucket = None if key.requests_per_minute is None else TokenBucket(key.requests_per_minute, now)

    def take_request(self, now: float) -> float:
        """Count one request and return 0.0 if it may pass now, else return the seconds until one may."""
        return 0.0 if self._bucket is None else self._bucket.take(now)

    def change(self, key: ApiKey, now: float) -> None:
        """Apply the limits of a new entry of the same name from now on."""
        self.permits.set_limit(key.concurrent_requests)
        if key.requests_per_minute is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = TokenBucket(key.requests_per_minute, now)
        else:
            self._bucket.set_rate(key.requests_per_minute, now)
        self.key = key

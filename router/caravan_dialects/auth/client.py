"""API keys in use: their limits, what their requests have used of them, and the permits of keys and models."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from caravan_dialects.auth.key import ApiKey


class TokenBucket:
    """Holds at most one minute's requests and refills evenly: such a burst passes, and then only the rate does."""

    __slots__ = ("_filled_at", "_per_minute", "_tokens")

    def __init__(self, per_minute: int, now: float) -> None:
        """Start full. ``now`` is in seconds on a clock that never goes back, in all methods."""
        self._per_minute = per_minute
        self._tokens = float(per_minute)
        self._filled_at = now

    def take(self, now: float) -> float:
        """Count one request and return 0.0 if it may pass now, else return the seconds until one may."""
        self._fill(now)
        if self._tokens < 1.0:
            return (1.0 - self._tokens) * 60.0 / self._per_minute
        self._tokens -= 1.0
        return 0.0

    def set_rate(self, per_minute: int, now: float) -> None:
        """Change the rate from now on; requests that were used up stay used up."""
        self._fill(now)
        self._per_minute = per_minute
        self._tokens = min(self._tokens, float(per_minute))

    def _fill(self, now: float) -> None:
        self._tokens = min(self._per_minute, self._tokens + (now - self._filled_at) * self._per_minute / 60.0)
        self._filled_at = now


class PermitPool:
    """Each generation holds one permit while it is queued or runs. A limit of None means no limit.

    A limit that is set below the number of held permits admits nothing until enough of them are returned.
    """

    __slots__ = ("_held", "_limit")

    def __init__(self, limit: int | None) -> None:
        self._held = 0
        self.set_limit(limit)

    def set_limit(self, limit: int | None) -> None:
        self._limit = sys.maxsize if limit is None else limit

    @property
    def free(self) -> int:
        return self._limit - self._held

    def can_take(self, count: int) -> bool:
        return count <= self.free

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold ``count`` permits inside the ``with`` block. Does not check the limit: call ``can_take`` first."""
        self._held += count
        try:
            yield
        finally:
            self._held -= count


class PermitPools:
    """A pool for each model, all with the same limit: a flood of requests for one model takes no permit of another.

    Only names of models that are served may be used: the pools stay.
    """

    __slots__ = ("_limit", "_pools")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pools: dict[str, PermitPool] = {}

    def of(self, model: str) -> PermitPool:
        """Return the pool of the model of this name."""
        if model not in self._pools:
            self._pools[model] = PermitPool(self._limit)
        return self._pools[model]

    @property
    def held(self) -> int:
        """Number of permits of all models that are held."""
        return sum(self._limit - pool.free for pool in self._pools.values())


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

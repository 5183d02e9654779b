"""Limits requests per minute without fixed windows, which would admit two bursts in a row at their border."""


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

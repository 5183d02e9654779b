"""So many requests a minute, without a window that begins anew on the minute."""


class TokenBucket:
    """Holds a minute's worth at most and refills evenly: a burst of that many passes, then the rate alone."""

    __slots__ = ("_filled_at", "_per_minute", "_tokens")

    def __init__(self, per_minute: int, now: float) -> None:
        """Full. ``now``: seconds on a clock that never goes back, here and below."""
        self._per_minute = per_minute
        self._tokens = float(per_minute)
        self._filled_at = now

    def take(self, now: float) -> float:
        """0.0 when a request may pass, which is then counted; else the seconds until one may."""
        self._fill(now)
        if self._tokens < 1.0:
            return (1.0 - self._tokens) * 60.0 / self._per_minute
        self._tokens -= 1.0
        return 0.0

    def set_rate(self, per_minute: int, now: float) -> None:
        """From now on; what was used up stays used up."""
        self._fill(now)
        self._per_minute = per_minute
        self._tokens = min(self._tokens, float(per_minute))

    def _fill(self, now: float) -> None:
        self._tokens = min(self._per_minute, self._tokens + (now - self._filled_at) * self._per_minute / 60.0)
        self._filled_at = now

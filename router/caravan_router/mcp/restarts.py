"""When a server that does not work is started again, so that requests do not start it over and over."""

_FIRST_WAIT_S, _MAX_WAIT_S = 1.0, 60.0


class Restarts:
    """The starts of one server. ``now`` is in seconds on a clock that never goes back, in all methods."""

    def __init__(self) -> None:
        self._failures = 0
        self._may_start_at = 0.0

    def failed(self, now: float) -> None:
        """Note a start after which the server has answered nothing. Each in a row doubles the wait, to a minute."""
        self._may_start_at = now + min(_FIRST_WAIT_S * 2**self._failures, _MAX_WAIT_S)
        self._failures = min(self._failures + 1, 16)

    def worked(self) -> None:
        """Note that the server has answered. If it ends then, it is started at once."""
        self._failures = 0

    def wait_s(self, now: float) -> float:
        """Return for how long the server may not be started yet."""
        return max(0.0, self._may_start_at - now) if self._failures else 0.0

"""How long a shard may go without completing a step, by what its steps have taken."""

from collections import deque

# A limit needs this many steps to go by. The first ones also read the model from disk.
_ENOUGH_STEPS = 16
_REMEMBERED_STEPS = 64
# Steps vary: other programs take processors, contexts grow.
_TIMES_SLOWER = 4.0
# After this time without a step, the system may have to read the model from disk again.
_COLD_AFTER_S = 30.0


class StepPace:
    """The last steps of one shard. No step counts as hung before ``shortest_s``, and every one after ``longest_s``."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_STEPS)
        self._last_at = 0.0

    def note(self, tokens: int, seconds: float, now: float) -> None:
        """Note a step over ``tokens`` tokens that took ``seconds`` and has just ended."""
        self._steps.append((tokens, seconds))
        self._last_at = now

    def limit_s(self, tokens: int, began: float) -> float:
        """Return the time after which a step over ``tokens`` tokens that ``began`` then counts as hung.

        That is four times what it would take if it were as slow as the slowest of the last steps, in proportion to its
        tokens where it has more.
        """
        if len(self._steps) < _ENOUGH_STEPS or began - self._last_at > _COLD_AFTER_S:
            return self._longest_s
        slowest_s = max(seconds * max(1.0, tokens / noted) for noted, seconds in self._steps)
        return min(self._longest_s, max(self._shortest_s, _TIMES_SLOWER * slowest_s))

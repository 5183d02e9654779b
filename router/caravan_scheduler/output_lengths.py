"""How long outputs get, learned from requests that have ended."""

import bisect
from collections import deque

# Expecting too few output tokens costs a preemption, too many only some room: rather many.
_QUANTILE = 0.8
# With fewer ended requests than this, the longest output is expected.
_FEWEST_RECORDS = 16


class OutputLengths:
    """Numbers of output tokens of the last ``window`` requests that ended.

    LightLLM's "past-future" scheduler (Gong et al., arXiv 2507.10150) samples a length for each request from the same
    distribution; a quantile needs no randomness.
    """

    def __init__(self, window: int = 512) -> None:
        self._newest: deque[int] = deque(maxlen=window)
        self._sorted: list[int] = []
        self._sum = 0

    def observe(self, length: int) -> None:
        """Learn from a request that ended after ``length`` output tokens."""
        self._sum += length
        if len(self._newest) == self._newest.maxlen:
            self._sum -= self._newest[0]
            del self._sorted[bisect.bisect_left(self._sorted, self._newest[0])]
        self._newest.append(length)
        bisect.insort(self._sorted, length)

    @property
    def mean(self) -> float:
        """The mean number; 0 if too few are known."""
        return self._sum / len(self._newest) if len(self._newest) >= _FEWEST_RECORDS else 0.0

    def expected(self, generated: int, most: int) -> int:
        """Return how many output tokens a request will have in all that has ``generated`` of at most ``most``.

        The result is more than ``generated``, unless that is ``most`` already, and seldom too low.
        """
        first_longer = bisect.bisect_right(self._sorted, generated)
        longer = len(self._sorted) - first_longer
        if len(self._sorted) < _FEWEST_RECORDS or longer == 0:
            return most
        return min(self._sorted[first_longer + int(_QUANTILE * longer)], most)

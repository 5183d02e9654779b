"""How long outputs get, learnt from those that ended: admission by expected need instead of by the worst case."""

import bisect
from collections import deque

# Too low costs a preemption, too high only some room: rather high.
_QUANTILE = 0.8
# With fewer records than this, the worst case is assumed.
_FEWEST_RECORDS = 16


class OutputLengths:
    """Output tokens of the last ``window`` requests that ended.

    LightLLM's "past-future" scheduler (Gong et al., arXiv 2507.10150) samples a length for each request from the same
    distribution; a quantile needs no randomness.
    """

    def __init__(self, window: int = 512) -> None:
        self._newest: deque[int] = deque(maxlen=window)
        self._sorted: list[int] = []

    def observe(self, length: int) -> None:
        """Learn from a request that ended after ``length`` output tokens."""
        if len(self._newest) == self._newest.maxlen:
            del self._sorted[bisect.bisect_left(self._sorted, self._newest[0])]
        self._newest.append(length)
        bisect.insort(self._sorted, length)

    def expected(self, generated: int, most: int) -> int:
        """Output tokens in all of a request that has ``generated`` of at most ``most``: seldom fewer than it will have.

        More than ``generated``, unless that is ``most`` already.
        """
        first_longer = bisect.bisect_right(self._sorted, generated)
        longer = len(self._sorted) - first_longer
        if len(self._sorted) < _FEWEST_RECORDS or longer == 0:
            return most
        return min(self._sorted[first_longer + int(_QUANTILE * longer)], most)

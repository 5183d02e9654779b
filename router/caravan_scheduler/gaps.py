"""How soon jobs come back, learnt from how soon they came back before."""

import bisect
import math
from collections.abc import Iterator, Sequence

# Where bins of gaps end, in seconds. A job that was away for longer than that does not come back.
EDGES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
_FIRST_EDGE_S = 0.25
# Before anything is known of a key: the chance to come back within a bin, of a session and of a request without one,
# for which nothing is kept until others of its key have come back.
SESSION_GUESS = (0.1,) * 8 + (0.0,) * 3
REQUEST_GUESS = (0.0,) * 11
# What is known of all jobs of a key counts like so many gaps of a job, and the first guess like so many of a key.
_STRENGTH = 4.0
# A bin knows so many gaps at most: the newest count most.
_MEMORY = 64.0
# A shorter time than this is no time.
_LEAST_S = 0.05


class Gaps:
    """The times between an answer and the next request, of one job or of all jobs of a key.

    A bin has the chance that a job which has been away until it begins comes back before it ends, so that those that
    are still away count, too. ``guess``: these chances before any gap is known, or those of a larger population.
    """

    def __init__(self, guess: "Gaps | Sequence[float]") -> None:
        self._guess = guess
        self._away = [0.0] * len(EDGES_S)
        self._back = [0.0] * len(EDGES_S)
        self._has_returned = False

    def note_away(self, place: int, times: float = 1.0) -> None:
        """Note that a job is away as the bin at ``place`` begins; -1 times: that it is not."""
        if self._away[place] >= _MEMORY:
            self._away[place] *= 1 - 1 / _MEMORY
            self._back[place] *= 1 - 1 / _MEMORY
        self._away[place] += times

    def note_back(self, gap_s: float) -> None:
        """Note that a job has come back after ``gap_s``."""
        place = bisect.bisect_left(EDGES_S, gap_s)
        if place < len(EDGES_S):
            self._back[place] += 1.0
            self._has_returned = True

    @property
    def may_return(self) -> bool:
        """Whether any chance is more than 0."""
        if self._has_returned:
            return True
        return self._guess.may_return if isinstance(self._guess, Gaps) else any(self._guess)

    def chance(self, place: int) -> float:
        """Return the chance that a job comes back in the bin at ``place`` that was away until then."""
        guess = self._guess.chance(place) if isinstance(self._guess, Gaps) else self._guess[place]
        return min(1.0, (self._back[place] + _STRENGTH * guess) / (self._away[place] + _STRENGTH))

    def return_rate(self, age_s: float) -> float:
        """Return the best ratio of the chance that a job comes back to the time until then, or until one gives up.

        In 1/s, for a job that has been away for ``age_s``. This is the Gittins index of waiting for it: of keeping
        something at a cost per second until it comes back, or for the time that pays best (Gittins, "Bandit processes
        and dynamic allocation indices", 1979).
        """
        if not self.may_return:
            return 0.0  # as for most requests without a session
        best = came = waited_s = 0.0
        away = 1.0
        for chance, in_s in self._ahead(age_s):
            came += away * chance
            waited_s += away * chance * in_s
            away *= 1 - chance
            best = max(best, came / (waited_s + away * in_s))
        return best

    def _ahead(self, age_s: float) -> Iterator[tuple[float, float]]:
        """Yield the chance in each bin that is left after ``age_s``, and in how many seconds that is, on average."""
        for place in range(bisect.bisect_right(EDGES_S, age_s), len(EDGES_S)):
            low_s, high_s = EDGES_S[place - 1] if place else _FIRST_EDGE_S, EDGES_S[place]
            from_s = max(low_s, age_s)
            part = math.log(high_s / from_s) / math.log(high_s / low_s)
            yield part * self.chance(place), max(_LEAST_S, math.sqrt(from_s * high_s) - age_s)

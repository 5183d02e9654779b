"""A table of seconds by size, learnt from measurements that come one at a time."""

# Sizes 1, 2, 4, ... 8192.
_NODES = 14
_LARGEST = 1 << (_NODES - 1)
# Nothing takes no time: else any size would fit.
_LEAST_S = 1e-6
# Nothing that is computed at all takes longer.
_MOST_S = 1e4
# A disturbed measurement counts as at most this multiple of the expected one.
_MOST_SURPRISE = 3.0
# After this many measurements elsewhere, a size follows them completely.
_STALE_AFTER = 32
# After this many, what was learnt of it begins to fade, by the part _FADING with each.
_FADES_AFTER = 256
_FADING = 1 / 256


class CostCurve:
    """Seconds by size, never falling: straight lines between entries at sizes that are powers of two.

    The first measurement draws the whole curve: each unit costs the same, and each size as much as ``fixed`` units
    more. A later one of a size that lies the part ``share`` of the way between two entries expects
    ``(1 - share) * left + share * right``: a linear function of the entries, with the weights 1 - share, share, and 0
    for all others. Its error, measured less expected, does three things:

    1. The entries go down the gradient of half the squared error, which is -error * weight in each of them: an entry
       gets ``newest * error * weight``. This is least mean squares (Widrow and Hoff, 1960). The squares of both weights
       add up to 1/2 at least and 1 at most, so the curve moves by between a half and all of ``newest * error`` there,
       and no step overshoots. Entries are positive, so downwards an entry loses the part
       ``newest * error * weight / expected`` of itself: the first order of the exponentiated gradient (Kivinen and
       Warmuth, 1997), and never more than half. With equal losses, the smaller of two entries would pay for both.
    2. The machine may have become slower or faster as a whole, so all entries are scaled. If the curve is wrong by a
       factor 1 + a and the other parts of the step by 1 + b, then error = a * expected + b * beside. The smallest a and
       b that explain it are those of normalised least mean squares (Nagumo and Noda, 1967):
       a = error * expected / (expected² + beside²). The step taken is divided by (expected + beside)² instead. It is
       the slowdown of the whole step times the part that the curve has in it, and at least half as large. An entry that
       was measured lately knows better and follows by a part only, which grows with its staleness.
    3. Entries that would make the curve fall are lifted or lowered to the one that was measured.
    """

    __slots__ = ("_fixed", "_is_guess", "_newest", "_seconds", "_staleness", "largest_measured")

    def __init__(self, *, newest: float, fixed: float = 0.0) -> None:
        self._newest = newest
        self._fixed = fixed
        self._is_guess = False
        # Empty before the first measurement.
        self._seconds: list[float] = []
        # Measurements elsewhere since the last one near each size.
        self._staleness = [float(_STALE_AFTER)] * _NODES
        self.largest_measured = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._seconds)

    def seconds(self, size: int) -> float:
        """Return the expected seconds of ``size``; 0 before the first measurement."""
        if size <= 0 or not self._seconds:
            return 0.0
        if size >= _LARGEST:
            return self._seconds[-1] * size / _LARGEST
        node, share = _locate(size)
        return self._seconds[node] + share * (self._seconds[node + 1] - self._seconds[node])

    def size_within(self, seconds: float, extra_unit_s: float = 0.0) -> int:
        """Return the largest size that takes at most ``seconds`` if each unit takes ``extra_unit_s`` longer."""
        before = 0.0
        for node, table_s in enumerate(self._seconds):
            total = table_s + extra_unit_s * (1 << node)
            if total > seconds:
                size = (1 << node) >> 1
                return size + int(size * (seconds - before) / (total - before))
            before = total
        return int(_LARGEST * seconds / before) if before else 0

    def doubt(self, size: int) -> float:
        """Return how far the seconds of ``size`` are a guess: from 0, just measured, to 1, not measured for long."""
        node, share = _locate(min(max(1, size), _LARGEST - 1))
        stale = (1 - share) * self._staleness[node] + share * self._staleness[node + 1]
        return min(1.0, stale / _STALE_AFTER)

    def guess_from(self, other: "CostCurve") -> None:
        """Start from what ``other`` has learnt. Its shape is believed, its level only until the first measurement."""
        self._is_guess = True
        self._seconds = list(other._seconds)
        self.largest_measured = other.largest_measured

    def observe(self, size: int, seconds: float, beside_s: float = 0.0) -> None:
        """Learn that ``size`` > 0 took ``seconds``, as part of a step whose other parts take ``beside_s``.

        The smaller its part of the step, the less stale sizes follow: the error is then probably that of the others.
        """
        self.largest_measured = max(self.largest_measured, size)
        if size > _LARGEST:
            size, seconds = _LARGEST, seconds * _LARGEST / size
        if not self._seconds:
            unit_s = max(_LEAST_S, seconds) / (size + self._fixed)
            self._seconds = [unit_s * ((1 << node) + self._fixed) for node in range(_NODES)]
        expected = self.seconds(size)
        whole = beside_s + expected
        gain = 1.0 if self._is_guess else self._newest
        self._is_guess = False
        correction = gain * min(seconds - expected, (_MOST_SURPRISE - 1) * whole)
        scaling = correction / whole * expected / whole
        table, staleness = self._seconds, self._staleness
        # Most entries are only scaled. This runs for every step, so it calls nothing.
        self._seconds = [
            entry_s * (1 + (stale / _STALE_AFTER if stale < _STALE_AFTER else 1.0) * scaling)
            for entry_s, stale in zip(table, staleness, strict=True)
        ]
        self._staleness = [stale + 1 for stale in staleness]
        node, share = _locate(size)
        for entry, weight in ((node, 1 - share), (node + 1, share)) if share else ((node, 1.0),):
            entry_s, stale = table[entry], staleness[entry]
            # As far as the measurement is of another size, the entry is one of those that are only scaled.
            follows = (1 - weight) * min(1.0, stale / _STALE_AFTER)
            step_s = weight * correction if correction > 0 else entry_s * max(-0.5, weight * correction / expected)
            self._seconds[entry] = max(_LEAST_S, entry_s * (1 + follows * scaling) + step_s)
            self._staleness[entry] = (1 - weight) * (stale + 1)
        self._straighten(node if share < 0.5 else node + 1)

    def _straighten(self, right: int) -> None:
        """Let no size take less than a smaller one. The entry ``right`` stays.

        Sizes that are not measured follow the errors of others, which would add up over thousands of steps. So they
        also go a small part of the way to a cost in proportion with that of their neighbours.
        """
        table, staleness = self._seconds, self._staleness
        for node in range(right + 1, _NODES):
            before = table[node - 1]
            if staleness[node] > _FADES_AFTER:
                table[node] += _FADING * (2 * before - table[node])
            if table[node] < before:
                table[node] = before
            elif table[node] > _MOST_S:
                table[node] = _MOST_S
        for node in range(right - 1, -1, -1):
            behind = table[node + 1]
            if staleness[node] > _FADES_AFTER:
                table[node] += _FADING * (0.5 * behind - table[node])
            if table[node] > behind:
                table[node] = behind
            if table[node] < _LEAST_S:
                table[node] = _LEAST_S


def _locate(size: int) -> tuple[int, float]:
    """Return the entry at or below ``size``, and how far ``size`` is on the way to the next."""
    node = size.bit_length() - 1
    return node, (size - (1 << node)) / (1 << node)

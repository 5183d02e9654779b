"""A table of seconds by size, learnt from measurements that come one at a time."""

# Sizes 1, 2, 4, ... 8192.
_NODES = 14
_LARGEST = 1 << (_NODES - 1)
# Nothing takes no time: else any size would fit.
_LEAST_S = 1e-6
# Nothing that is computed at all takes longer.
_MOST_S = 1e4
# A disturbed measurement counts as at most so many times the expected one.
_MOST_SURPRISE = 3.0
# After so many measurements elsewhere, a size follows them completely.
_STALE_AFTER = 32
# After so many, what was learnt of it begins to fade, by this part with each.
_FADES_AFTER = 256
_FADING = 1 / 256


class CostCurve:
    """Seconds by size, never falling: straight lines between sizes that are powers of two.

    A measurement corrects the two sizes around its own by the part ``newest`` of the error. A size that was not
    measured lately changes in proportion with those that were, so that what was learnt on a fast day is forgotten when
    the machine gets slow. The first measurement draws the whole curve: each unit costs the same, and each size as much
    as ``fixed`` units more.
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
        trend = correction / whole * expected / whole
        node, share = _locate(size)
        near = range(node, node + 2) if share else range(node, node + 1)
        before = [(self._seconds[other], self._staleness[other]) for other in near]
        # Other sizes move as if they were measured elsewhere. This runs for every step, so it calls nothing.
        self._seconds = [
            seconds * (1 + (staleness / _STALE_AFTER if staleness < _STALE_AFTER else 1.0) * trend)
            for seconds, staleness in zip(self._seconds, self._staleness, strict=True)
        ]
        self._staleness = [staleness + 1 for staleness in self._staleness]
        for other, part, (seconds_before, staleness) in zip(near, (1 - share, share), before, strict=False):
            follows = (1 - part) * min(1.0, staleness / _STALE_AFTER)
            # Added, so that a size of which nothing is known comes near at once; taken away in proportion, so that one
            # of the two does not pay for the error of both.
            change_s = part * correction if correction > 0 else seconds_before * max(-0.5, part * correction / expected)
            self._seconds[other] = max(_LEAST_S, seconds_before * (1 + follows * trend) + change_s)
            self._staleness[other] = (1 - part) * (staleness + 1)
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

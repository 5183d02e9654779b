"""Finds the highest of many logits after one pass over them, and rows of logits that have none."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats

# The logits are viewed as a table with this many rows. numpy finds the maxima of columns as fast as that of the whole.
_ROWS = 64
# If more than this share of the parts matter, a pass over all logits is faster than a look into each of those parts.
_FEW = 0.2


class Peaks:
    """The highest logit of each part of a vocabulary.

    A part is a column of the table; each logit after the table's end is a part of its own. ``highest`` is the highest
    logit, NaN if any logit is NaN.
    """

    def __init__(self, logits: Floats) -> None:
        self._logits = logits
        self._columns = len(logits) // _ROWS
        self._table = logits[: _ROWS * self._columns].reshape(_ROWS, self._columns)
        self._peaks = np.concatenate([self._table.max(axis=0), logits[_ROWS * self._columns :]])
        self.highest = np.float32(self._peaks.max())

    @property
    def is_finite(self) -> bool:
        """Whether no logit is NaN or +inf, and one is not -inf."""
        return math.isfinite(self.highest)

    def level(self, count: int) -> np.float32:
        """Return a level that the ``count`` highest logits reach, and only few others.

        ``count`` must not exceed the number of logits.
        """
        # If the peaks of ``count`` parts reach a level, at least ``count`` logits do.
        among = self._peaks if count < _FEW * len(self._peaks) else self._logits
        return np.float32(np.partition(among, -count)[-count])

    def reaching(self, level: np.float32) -> NDArray[np.intp]:
        """Return the ascending ids of all logits >= ``level``."""
        (parts,) = (self._peaks >= level).nonzero()
        if len(parts) > _FEW * len(self._peaks):
            return (self._logits >= level).nonzero()[0]
        end = int(parts.searchsorted(self._columns))
        columns = parts[:end]
        (places,) = (self._table[:, columns] >= level).ravel().nonzero()
        row, index = np.divmod(places, end)
        in_rest = parts[end:] + (_ROWS - 1) * self._columns
        return np.concatenate([row * self._columns + columns[index], in_rest])


def rows_without_numbers(logits: Floats, tokens: Sequence[int]) -> list[int]:
    """Return which rows of raw ``logits`` [rows, vocabulary] are no distribution, of which ``tokens`` were chosen.

    A weight of the model that overflows for some prompts makes them so. Where a row has NaN or +inf, the token that is
    chosen from it is one of those; so a look at the chosen logits suffices.
    """
    chosen = logits[np.arange(len(tokens)), tokens]
    if math.isfinite(chosen.sum()):
        return []
    return [row for row, logit in enumerate(chosen.tolist()) if not math.isfinite(logit) and not has_peak(logits[row])]


def has_peak(logits: Floats) -> bool:
    """Whether raw ``logits`` [vocabulary] have a highest one that is a number. Those of some tokens may be -inf."""
    return math.isfinite(logits.max())

"""The tokens that a constraint allows."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats

# The lowest values that hide a logit or let it be, for the eight tokens of a mask's byte, the lowest bit first.
_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.float32("inf"), -np.inf
).astype(np.float32)
# Where less than this share of the vocabulary is allowed, ids are faster than a pass over the vocabulary.
_FEW = 1 / 16


class Allowed:
    """A set of tokens, at least one. ``count``: how many they are."""

    __slots__ = ("_flags", "_ids", "_limits", "count")

    def __init__(self, count: int) -> None:
        """Use `of` or `from_mask`, which set either ``_ids`` or both ``_flags`` and ``_limits`` [vocabulary]."""
        self.count = count
        self._ids: NDArray[np.intp] | None = None
        self._flags: NDArray[np.bool_] | None = None
        self._limits: Floats | None = None

    @classmethod
    def of(cls, ids: Sequence[int] | NDArray[np.intp]) -> Self:
        """Allow the tokens with these ids, which are ascending."""
        made = cls(len(ids))
        made._ids = np.asarray(ids, np.intp)
        return made

    @classmethod
    def from_mask(cls, mask: NDArray[np.uint8], vocabulary_size: int) -> Self:
        """Allow the tokens whose bit is set, the lowest bit of a byte first. Ignore bits behind the vocabulary."""
        # numpy finds Booleans ten times as fast as bytes.
        flags = np.unpackbits(mask, bitorder="little", count=vocabulary_size).view(np.bool_)
        made = cls(int(np.count_nonzero(flags)))
        if made.count < _FEW * vocabulary_size:
            made._ids = np.flatnonzero(flags)
        else:
            made._flags = flags
            made._limits = _LIMITS.take(mask, axis=0).reshape(-1)[:vocabulary_size]
        return made

    @property
    def ids(self) -> NDArray[np.intp]:
        """Ascending ids of the tokens."""
        if self._ids is None:
            assert self._flags is not None
            self._ids = np.flatnonzero(self._flags)
        return self._ids

    def hide_others(self, logits: Floats, out: Floats) -> None:
        """Write ``logits`` [vocabulary] to ``out``, which may be the same array, with -inf for all other tokens.

        If ``logits`` has NaN, ``out`` may have it too.
        """
        if self._limits is not None:
            np.minimum(logits, self._limits, out=out)
            return
        values = logits[self.ids]
        out.fill(-np.inf)
        out[self.ids] = values

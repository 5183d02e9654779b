"""The tokens that a constraint allows."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray


class Allowed:
    """A set of tokens, at least one. ``count``: how many they are.

    ``mask``: a bit for each token of the vocabulary, the lowest bit of a byte first; None if only `ids` are known.
    """

    __slots__ = ("_ids", "_size", "count", "mask")

    def __init__(self, count: int) -> None:
        """Use `of` or `from_mask`."""
        self.count = count
        self.mask: NDArray[np.uint8] | None = None
        self._size = 0
        self._ids: NDArray[np.intp] | None = None

    @classmethod
    def of(cls, ids: Sequence[int] | NDArray[np.intp]) -> Self:
        """Allow the tokens with these ids, which are ascending."""
        made = cls(len(ids))
        made._ids = np.asarray(ids, np.intp)
        return made

    @classmethod
    def from_mask(cls, mask: NDArray[np.uint8], vocabulary_size: int) -> Self:
        """Allow the tokens whose bit is set. Ignore bits behind the vocabulary. ``mask`` must not be changed later."""
        made = cls(_count(mask, vocabulary_size))
        made.mask, made._size = mask, vocabulary_size
        return made

    @property
    def ids(self) -> NDArray[np.intp]:
        """Ascending ids of the tokens."""
        if self._ids is None:
            assert self.mask is not None
            bits = np.unpackbits(self.mask, bitorder="little", count=self._size)
            # numpy finds Booleans ten times as fast as bytes.
            self._ids = np.flatnonzero(bits.view(np.bool_))
        return self._ids


def _count(mask: NDArray[np.uint8], size: int) -> int:
    whole, rest = divmod(size, 8)
    count = int(np.bitwise_count(mask[:whole]).sum())
    return count + (int(mask[whole]) & ((1 << rest) - 1)).bit_count() if rest else count

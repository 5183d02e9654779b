"""The counter-based draw: the token at position p of a sequence with seed s is drawn with the number of (s, p).

The number is the same on every shard, in every batch and after every interruption.
"""

from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats

Weights = Floats | NDArray[np.float64]

_BLOCK = 128
# Words in a block of Philox4x64. Each position has a block.
_WORDS = 4
# Positions whose numbers are computed together.
_GROUP = 64
_ONES = np.ones(_BLOCK, np.float32)
# Sums of blocks in float32 move a border between two tokens by less than this share of the whole. Each addition rounds
# by at most 2**-24, and three sums matter: the whole, the blocks before the border, and the border's own block.
_ROUNDING = 3 * _BLOCK * 2.0**-24


class Purpose(IntEnum):
    """What a number is for. The values are the places of the numbers in a block of Philox4x64, which has four."""

    TOKEN = 0
    XTC = 1


def uniform(seed: int, position: int, purpose: Purpose = Purpose.TOKEN) -> float:
    """Return the number in [0, 1) that belongs to (seed, position, purpose), by Philox4x64 (Salmon et al. 2011)."""
    group, place = divmod(position, _GROUP)
    return float(_group_numbers(seed, group)[place, purpose])


@lru_cache(maxsize=1024)
def _group_numbers(seed: int, group: int) -> NDArray[np.float64]:
    """Return the numbers [position, purpose] of adjacent positions, which one generator gives much faster."""
    words = np.random.Philox(key=seed, counter=group * _GROUP).random_raw(_GROUP * _WORDS)
    integers = words.reshape(_GROUP, _WORDS)[:, : len(Purpose)] >> np.uint64(11)
    numbers: NDArray[np.float64] = integers.astype(np.float64)
    numbers *= 2.0**-53
    return numbers


def draw_index(logits: Floats, number: float) -> int:
    """Return the index that ``number`` selects under softmax(logits), by inverse CDF in the order given.

    ``logits`` are relative to the highest, which is 0, so that no exponential overflows. The order must depend on the
    candidates alone: callers sort by token id.
    """
    return draw_weighted(np.exp(logits), number)


def draw_weighted(weights: Weights, number: float) -> int:
    """Return the index that ``number`` selects where probabilities are in proportion to ``weights``."""
    if len(weights) < _BLOCK * _BLOCK:
        return _invert(weights.cumsum(dtype=np.float64), number)
    # In a running sum each addition waits for the one before it: sum blocks, then look into one.
    # Sums in float32 take a fifth of the time, and nearly always suffice.
    index, distance = _invert_blocks(weights, sum_blocks(weights), number)
    if distance > _ROUNDING:
        return index
    end = len(weights) // _BLOCK * _BLOCK
    sums = weights[:end].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    sums = np.append(sums, weights[end:].sum(dtype=np.float64))
    return _invert_blocks(weights, sums, number)[0]


def sum_blocks(weights: Weights) -> NDArray[np.float64]:
    """Return the sums of all blocks of adjacent ``weights``, with the precision of float32."""
    end = len(weights) // _BLOCK * _BLOCK
    sums = np.vecdot(weights[:end].reshape(-1, _BLOCK), _ONES)
    return np.append(sums, weights[end:].sum(dtype=np.float64))


def _invert(cumulative: NDArray[np.float64], number: float) -> int:
    """Return the index whose part of the running sum, as a share of the whole, contains ``number``."""
    index = int(cumulative.searchsorted(number * cumulative[-1], side="right"))
    return min(index, len(cumulative) - 1)


def _invert_blocks(weights: Weights, sums: NDArray[np.float64], number: float) -> tuple[int, float]:
    """Return the index that `_invert` would find, from the ``sums`` of blocks of ``weights``.

    Also return the distance from ``number`` to the nearer end of the index's part.
    """
    cumulative = sums.cumsum()
    target = number * cumulative[-1]
    # Rounding may put the target at the very end. The last block that has any weight takes it then.
    block = min(int(cumulative.searchsorted(target, side="right")), int(np.flatnonzero(sums)[-1]))
    start = block * _BLOCK
    within = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
    share = (target - cumulative[block] + sums[block]) / sums[block]
    index = _invert(within, share)
    low, high = (within[index - 1] if index else 0.0), within[index]
    place = share * within[-1]
    return start + index, float(min(place - low, high - place) / cumulative[-1])

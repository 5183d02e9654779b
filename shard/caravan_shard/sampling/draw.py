"""The counter-based draw: the token at position p of a sequence with seed s is drawn with the number of (s, p).

The number is the same on every shard, in every batch and after every interruption.
"""

from enum import Enum

import numpy as np

from caravan_shard.arrays import Floats

_BLOCK = 128


class Purpose(Enum):
    """What a number is for. The values are the places of the numbers in a block of Philox4x64, which has four."""

    TOKEN = 0
    XTC = 1


def uniform(seed: int, position: int, purpose: Purpose = Purpose.TOKEN) -> float:
    """Return the number in [0, 1) that belongs to (seed, position, purpose), by Philox4x64 (Salmon et al. 2011)."""
    block = np.random.Philox(key=seed, counter=position).random_raw(purpose.value + 1)
    return (int(block[-1]) >> 11) * 2.0**-53


def draw_index(logits: Floats, number: float) -> int:
    """Return the index that ``number`` selects under softmax(logits), by inverse CDF in the order given.

    ``logits`` are relative to the highest, which is 0, so that no exponential overflows. The order must depend on the
    candidates alone: callers sort by token id.
    """
    weights = np.exp(logits)
    whole_blocks = len(weights) // _BLOCK
    if whole_blocks < _BLOCK:
        return _invert(weights, number)
    # In a running sum each addition waits for the one before it: sum blocks, then look into one.
    end = whole_blocks * _BLOCK
    sums = weights[:end].reshape(whole_blocks, _BLOCK).sum(axis=1, dtype=np.float64)
    sums = np.append(sums, weights[end:].sum(dtype=np.float64))
    cumulative = np.cumsum(sums)
    target = number * cumulative[-1]
    # Rounding may put the target at the very end. The last block that has any weight takes it then.
    block = min(int(np.searchsorted(cumulative, target, side="right")), int(np.flatnonzero(sums)[-1]))
    start = block * _BLOCK
    return start + _invert(weights[start : start + _BLOCK], (target - cumulative[block] + sums[block]) / sums[block])


def _invert(weights: Floats, number: float) -> int:
    """Return the index whose part of the running sum, as a share of the whole, contains ``number``."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return min(index, len(cumulative) - 1)

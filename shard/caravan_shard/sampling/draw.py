"""The counter-based draw: the token at position p of a sequence with seed s is drawn with the number of (s, p).

The number is the same on every shard, in every batch and after every interruption.
"""

import numpy as np

from caravan_shard.arrays import Floats

_BLOCK = 128


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, position), by Philox4x64 (Salmon et al. 2011)."""
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


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

"""The counter-based draw: the token at position p of a sequence with seed s is drawn with the number (s, p).

Whoever draws it, in whatever company and after whatever interruption, draws the same number.
"""

import numpy as np

from caravan_shard.arrays import Floats

_BLOCK = 128


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position)."""
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def draw_index(logits: Floats, number: float) -> int:
    """The index that ``number`` selects under softmax(logits), by inverse CDF in the order given.

    ``logits`` are relative to the highest (which is 0), so that no exponential overflows.
    The order must not depend on anything but the candidates: callers sort by token id.
    """
    weights = np.exp(logits)
    whole_blocks = len(weights) // _BLOCK
    if whole_blocks < _BLOCK:
        return _invert(weights, number)
    # A running sum is slow because each addition waits for the one before: sum blocks, then look into one.
    end = whole_blocks * _BLOCK
    sums = weights[:end].reshape(whole_blocks, _BLOCK).sum(axis=1, dtype=np.float64)
    sums = np.append(sums, weights[end:].sum(dtype=np.float64))
    cumulative = np.cumsum(sums)
    target = number * cumulative[-1]
    # Rounding may put the target at the very end: the last block that has any weight has it then.
    block = min(int(np.searchsorted(cumulative, target, side="right")), int(np.flatnonzero(sums)[-1]))
    start = block * _BLOCK
    return start + _invert(weights[start : start + _BLOCK], (target - cumulative[block] + sums[block]) / sums[block])


def _invert(weights: Floats, number: float) -> int:
    """The index whose part of the running sum, as a share of the whole, holds ``number``."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return min(index, len(cumulative) - 1)

"""The counter-based draw: the token at position p of a sequence with seed s is drawn with the number (s, p).

Whoever draws it, in whatever company and after whatever interruption, draws the same number.
"""

import numpy as np

from caravan_shard.backends.base import Floats


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position)."""
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def draw_index(logits: Floats, number: float) -> int:
    """The index that ``number`` selects under softmax(logits), by inverse CDF in the order given.

    The order must not depend on anything but the candidates: callers sort by token id.
    """
    weights = np.exp(logits - logits.max(), dtype=np.float64)
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return min(index, len(cumulative) - 1)

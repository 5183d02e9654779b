"""Finds rows of logits that are no numbers: a weight of the model that overflows for some prompts makes them so.

Where a row has NaN or +inf, the token that is chosen from it is one of those; so a look at the chosen logits suffices.
"""

import math
from collections.abc import Sequence

import numpy as np

from caravan_shard.arrays import Floats


def rows_without_numbers(logits: Floats, tokens: Sequence[int]) -> list[int]:
    """Return which rows of raw ``logits`` [rows, vocabulary] are no distribution, of which ``tokens`` were chosen."""
    chosen = logits[np.arange(len(tokens)), tokens]
    if math.isfinite(chosen.sum()):
        return []
    return [row for row, logit in enumerate(chosen.tolist()) if not math.isfinite(logit) and not has_peak(logits[row])]


def has_peak(logits: Floats) -> bool:
    """Whether raw ``logits`` [vocabulary] have a highest one that is a number. Those of some tokens may be -inf."""
    return math.isfinite(logits.max())

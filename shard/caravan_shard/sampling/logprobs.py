"""Log probabilities under the model's own distribution, before penalties, temperature and filters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.sampling.draw import sum_blocks
from caravan_shard.sampling.peaks import Peaks


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of the chosen token, of the likeliest in falling order (equal ones by id), and of others.

    ``chosen`` is NaN if no token was chosen.
    """

    chosen: float
    top_ids: list[int]
    top: list[float]
    others: list[float]


def token_logprobs(logits: Floats, token: int | None, top_n: int, others: Sequence[int] = ()) -> TokenLogprobs:
    """Compute them from raw ``logits`` [vocabulary]."""
    peaks = Peaks(logits)
    weights = logits - peaks.highest
    normalizer = float(peaks.highest) + math.log(sum_blocks(np.exp(weights, out=weights)).sum())
    chosen = math.nan if token is None else float(logits[token]) - normalizer
    other = [float(logits[one]) - normalizer for one in others]
    if top_n == 0:
        return TokenLogprobs(chosen, [], [], other)
    near = peaks.reaching(peaks.level(top_n))
    likely = near[np.lexsort((near, -logits[near]))][:top_n]
    return TokenLogprobs(chosen, likely.tolist(), (logits[likely].astype(np.float64) - normalizer).tolist(), other)

"""Log probabilities under the model's own distribution, before penalties, temperature and filters."""

import math
from dataclasses import dataclass

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.sampling.draw import sum_blocks
from caravan_shard.sampling.peaks import Peaks


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of the chosen token and of the most likely ones, in falling order (equal ones by id)."""

    chosen: float
    top_ids: list[int]
    top: list[float]


def token_logprobs(logits: Floats, token: int, top_n: int) -> TokenLogprobs:
    """Compute them from raw ``logits`` [vocabulary]."""
    peaks = Peaks(logits)
    weights = logits - peaks.highest
    normalizer = float(peaks.highest) + math.log(sum_blocks(np.exp(weights, out=weights)).sum())
    chosen = float(logits[token]) - normalizer
    if top_n == 0:
        return TokenLogprobs(chosen, [], [])
    near = peaks.reaching(peaks.level(top_n))
    likely = near[np.lexsort((near, -logits[near]))][:top_n]
    return TokenLogprobs(chosen, likely.tolist(), (logits[likely].astype(np.float64) - normalizer).tolist())

"""Log probabilities under the model's own distribution, before penalties, temperature and filters."""

from dataclasses import dataclass

import numpy as np

from caravan_shard.backends.base import Floats


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the chosen token, and of the most likely ones in falling order (equal ones by id)."""

    chosen: float
    top_ids: list[int]
    top: list[float]


def token_logprobs(logits: Floats, token: int, top_n: int) -> TokenLogprobs:
    """From raw ``logits`` [vocabulary]."""
    peak = logits.max()
    normalizer = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    chosen = float(logits[token]) - normalizer
    if top_n == 0:
        return TokenLogprobs(chosen, [], [])
    likely = np.argpartition(logits, -top_n)[-top_n:]
    likely = likely[np.lexsort((likely, -logits[likely]))]
    return TokenLogprobs(chosen, likely.tolist(), (logits[likely].astype(np.float64) - normalizer).tolist())

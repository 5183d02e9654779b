"""Log probabilities under the model's own distribution, before penalties, temperature and filters."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats

# A vocabulary is cut into this many parts. Their peaks bound the highest logits, and selecting among them is cheap.
_PARTS = 512


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of the chosen token and of the most likely ones, in falling order (equal ones by id)."""

    chosen: float
    top_ids: list[int]
    top: list[float]


def token_logprobs(logits: Floats, token: int, top_n: int) -> TokenLogprobs:
    """Compute them from raw ``logits`` [vocabulary]."""
    peak = logits.max()
    normalizer = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    chosen = float(logits[token]) - normalizer
    if top_n == 0:
        return TokenLogprobs(chosen, [], [])
    likely = _most_likely(logits, top_n)
    return TokenLogprobs(chosen, likely.tolist(), (logits[likely].astype(np.float64) - normalizer).tolist())


def _most_likely(logits: Floats, count: int) -> NDArray[np.intp]:
    """Return the ids of the ``count`` highest logits in falling order, equal ones by id."""
    width = max(1, len(logits) // _PARTS)
    peaks = logits[: len(logits) // width * width].reshape(-1, width).max(axis=1)
    # ``count`` parts have a peak at or above this level, so at least ``count`` tokens do.
    level = np.partition(peaks, -count)[-count]
    near = np.flatnonzero(logits >= level)
    ids: NDArray[np.intp] = near[np.lexsort((near, -logits[near]))][:count]
    return ids

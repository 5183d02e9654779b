"""The filters in numpy: the toy model uses them, and llama.cpp's are tested against them."""

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats, Ids


def _softmax(logits: Floats) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return probabilities


def _kept(below: NDArray[np.bool_]) -> int:
    """Return the length of the shortest run that reaches the limit: all entries below it, and one more."""
    return int(np.count_nonzero(below)) + 1


def filter_candidates(logits: Floats, parameters: SamplingParams) -> Ids:
    """Apply top_k, then typical_p, top_p, min_p and XTC, each to what the one before left. A CandidateFilter."""
    ids = np.argsort(-logits, kind="stable").astype(np.int32)
    if 0 < parameters.top_k < len(ids):
        ids = ids[: parameters.top_k]
    if parameters.typical_p < 1.0:
        probabilities = _softmax(logits[ids])
        surprise = -np.log(probabilities)
        entropy = float((probabilities * surprise).sum())
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        below = np.cumsum(probabilities[order]) <= parameters.typical_p
        ids = ids[order][: _kept(below)]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
    if parameters.top_p < 1.0:
        below = np.cumsum(_softmax(logits[ids])) < parameters.top_p
        ids = ids[: _kept(below)]
    if parameters.min_p > 0.0:
        ids = ids[logits[ids] >= logits[ids[0]] + np.log(parameters.min_p)]
    if parameters.xtc_probability > 0.0:
        likely = int(np.count_nonzero(_softmax(logits[ids]) >= parameters.xtc_threshold))
        ids = ids[max(0, likely - 1) :]
    return ids

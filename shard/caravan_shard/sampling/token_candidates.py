"""Finds the few tokens that can be drawn at all, with vector operations, before any filter has to sort.

A vocabulary has 50,000 to 260,000 tokens, and a filter that sorts them costs milliseconds a row. What survives top_k or
top_p nearly always lies within ten logits of the peak: some hundred tokens.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats, Ids
from caravan_shard.sampling.parameters import SamplingParameters

# Logits below the peak. A token this far down is less likely than one in 4e15.
HOPELESS = 36.0
# Where to look first, in scaled logits below the peak.
_FIRST_REACH = 10.0
# The largest share of the probability within the first reach that is trusted. Above it, rounding could matter.
_SAFE_SHARE = 0.9999


class CandidateFilter(Protocol):
    """Takes unlikely candidates away. Any thread may call it."""

    def __call__(self, logits: Floats, parameters: SamplingParameters) -> Ids:
        """Return the indices of ``logits`` that are left, in any order, at least one.

        ``logits`` [candidates] are already divided by the temperature and must not be changed. None of them is more
        than HOPELESS below the highest. XTC is applied if ``parameters.xtc_probability`` is not 0: the caller has drawn
        whether it is.
        """


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ascending token ids, their scaled logits relative to the peak, and the filters that are still to be applied."""

    ids: NDArray[np.intp]
    scaled: Floats
    parameters: SamplingParameters


def find_candidates(logits: Floats, parameters: SamplingParameters) -> Candidates:
    """Find the candidates among penalized ``logits`` [vocabulary], at a temperature > 0; none if the logits are NaN.

    The remaining filters leave the same of these candidates as all filters would leave of the whole vocabulary.
    """
    peak = logits.max()
    temperature = np.float32(parameters.temperature)

    def within(reach: float, left: SamplingParameters) -> Candidates:
        ids = np.flatnonzero(logits >= peak - np.float32(reach) * temperature)
        return Candidates(ids, (logits[ids] - peak) / temperature, left)

    if parameters.top_k > 0:
        near = within(_FIRST_REACH, parameters)
        # The top_k likeliest are among any top_k or more that reach down to one level.
        if len(near.ids) >= parameters.top_k:
            return near
    elif parameters.typical_p == 1.0 and parameters.top_p < 1.0:
        near = within(_FIRST_REACH, parameters)
        with np.errstate(over="ignore"):
            whole = np.exp((logits - peak) / temperature).sum(dtype=np.float64)
        # top_p of the whole is a larger share of a part of it.
        share = float(parameters.top_p * whole / np.exp(near.scaled).sum(dtype=np.float64)) if len(near.ids) else 1.0
        if share <= _SAFE_SHARE:
            return Candidates(near.ids, near.scaled, replace(parameters, top_p=share))
    return within(HOPELESS, parameters)

"""Mirostat and adaptive-p: draws that steer by a value which a sequence carries from token to token.

The value after a token cannot be computed from the tokens alone. It leaves the shard with the token and comes back with
a sequence that is computed again, so that nothing is lost with the cells.
"""

import math

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.draw import draw_weighted

# Mirostat estimates the slope of the distribution from this many of the likeliest tokens.
_SLOPE_TOKENS = 100
# Constants of adaptive-p in llama.cpp.
_WIDTH = 0.3
_PEAK = 5.0
_SHARPNESS = 10.0


class Feedback:
    """Draws the tokens of one sequence, and has the ``value`` that each of them changes.

    With mirostat (arXiv 2007.14966) it is the highest surprise that a token may have, in bits. With adaptive-p it is
    the mean probability of the tokens so far, of which the last ones count most. It is exact in float32, in which
    messages carry it.
    """

    def __init__(self, parameters: SamplingParams, vocabulary_size: int, value: float | None) -> None:
        """``value``: the one behind the last token of the output; None if there is none yet."""
        self._parameters = parameters
        self._vocabulary_size = vocabulary_size
        if value is None:
            value = 2 * parameters.mirostat_tau if parameters.mirostat else parameters.adaptive_target
        assert value is not None, "feedback needs mirostat or a target"
        self.value = _rounded(value)

    def draw(self, logits: Floats, number: float) -> int:
        """Return the index of ``logits`` [candidates] that ``number`` selects; note what was selected."""
        shares = _shares(logits)
        if self._parameters.mirostat:
            return self._draw_by_surprise(shares, number)
        return self._draw_near_target(shares, number)

    def _draw_by_surprise(self, shares: NDArray[np.float64], number: float) -> int:
        parameters = self._parameters
        if parameters.mirostat == 1:
            kept = _likeliest(shares, _most_tokens(shares, self.value, self._vocabulary_size))
        else:
            kept = (shares >= 2.0 ** min(0.0, -self.value)).nonzero()[0]
        if len(kept) == 0:
            kept = _likeliest(shares, 1)
        rest = shares[kept] / shares[kept].sum()
        place = draw_weighted(rest, number)
        error = -math.log2(rest[place]) - parameters.mirostat_tau
        self.value = _rounded(self.value - parameters.mirostat_eta * error)
        return int(kept[place])

    def _draw_near_target(self, shares: NDArray[np.float64], number: float) -> int:
        parameters = self._parameters
        assert parameters.adaptive_target is not None
        target = min(1.0, max(0.0, 2 * parameters.adaptive_target - self.value))
        distance = np.abs(shares - target) / _WIDTH
        index = draw_weighted(_shares(_PEAK - _SHARPNESS * distance * distance / (1 + distance)), number)
        decay = parameters.adaptive_decay
        self.value = _rounded((1 - decay) * float(shares[index]) + decay * self.value)
        return index


def make_feedback(parameters: SamplingParams, vocabulary_size: int, value: float | None) -> Feedback | None:
    """Make the feedback that ``parameters`` switch on; None if none is on, or nothing is drawn."""
    on = parameters.has_feedback and not parameters.greedy
    return Feedback(parameters, vocabulary_size, value) if on else None


def _rounded(value: float) -> float:
    return float(np.float32(value))


def _shares(logits: Floats | NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def _likeliest(shares: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the ascending indices of the ``count`` highest; of equal ones the first."""
    if count >= len(shares):
        return np.arange(len(shares))
    return np.sort(np.argsort(-shares, kind="stable")[:count])


def _most_tokens(shares: NDArray[np.float64], surprise: float, vocabulary_size: int) -> int:
    """Return how many of the likeliest tokens mirostat 1 keeps, so that they have this mean ``surprise``.

    It takes the shares for those of a Zipf distribution, whose exponent it estimates by the likeliest ones.
    """
    top = np.sort(np.partition(shares, -_SLOPE_TOKENS)[-_SLOPE_TOKENS:] if len(shares) > _SLOPE_TOKENS else shares)
    top = top[top > 0.0][::-1]
    if len(top) < 2:
        return 1
    ranks = np.arange(1, len(top) + 1)
    steps = np.log((ranks[:-1] + 1) / ranks[:-1])
    exponent = float(steps @ np.log(top[:-1] / top[1:])) / float(steps @ steps)
    if exponent <= 0.0:
        return len(shares)
    excess = exponent - 1.0
    # The limit for an exponent of 1 is the logarithm of the vocabulary's size.
    whole = (
        math.log(vocabulary_size) if abs(excess) < 1e-9 else -math.expm1(-excess * math.log(vocabulary_size)) / excess
    )
    power = (surprise * math.log(2.0) - math.log(max(whole, 1e-300))) / exponent
    return max(1, int(math.exp(min(power, math.log(len(shares)) + 1.0))))

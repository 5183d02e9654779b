"""Finds the few tokens that can be drawn at all, with vector operations, before any filter has to sort.

A vocabulary has 50,000 to 260,000 tokens, and a filter that sorts them costs milliseconds a row. The tokens that
survive top_k or top_p nearly always lie within ten logits of the peak, and are a few hundred.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats, Ids
from caravan_shard.sampling.draw import sum_blocks
from caravan_shard.sampling.peaks import Peaks

# Logits below the peak. A token this far down is less likely than one in 4e15.
HOPELESS = 36.0
# The same where the logits will still be divided by a temperature, which may bring tokens nearer to the peak. Behind
# it, probabilities in float32 have too few digits for llama.cpp's filters.
FAR = 80.0
# How far below the peak to look for the likeliest tokens, in scaled logits, until enough are found.
_REACHES = (10.0, 15.0, 20.0, HOPELESS)
# The largest share of the probability within the first reach that top_p may ask for. Above it, rounding could matter.
_SAFE_SHARE = 0.9999
# The reach of min_p, in logits, is widened by this, so that the filter sees every token that it could keep.
_MARGIN = 0.001


class CandidateFilter(Protocol):
    """Takes unlikely candidates away. Any thread may call it."""

    def __call__(self, logits: Floats, parameters: SamplingParams) -> Ids:
        """Return the indices of ``logits`` that are left, in any order, at least one.

        ``logits`` [candidates] are already divided by the temperature and must not be changed. None of them is more
        than FAR below the highest. XTC is applied if ``parameters.xtc_probability`` is not 0: the caller has drawn
        whether it is.
        """


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ascending token ids, and their scaled logits relative to the peak.

    ``parameters`` has the filters that are still to be applied; None if there are none.
    """

    ids: NDArray[np.intp]
    scaled: Floats
    parameters: SamplingParams | None


def scale(logits: Floats, peak: np.float32, temperature: float) -> Floats:
    """Return ``logits`` relative to ``peak``, divided by ``temperature`` > 0."""
    scaled: Floats = logits - peak
    if temperature != 1.0:
        with np.errstate(over="ignore"):
            scaled /= np.float32(temperature)
    return scaled


def min_p_reach(min_p: float) -> float:
    """Return how far below the peak, in scaled logits, a token may be that ``min_p`` > 0 keeps."""
    return _MARGIN - math.log(min_p)


def find_candidates(logits: Floats, parameters: SamplingParams, hopeless: float = HOPELESS) -> Candidates:
    """Find the candidates among penalized ``logits`` [vocabulary], at a temperature > 0; none if the peak is no number.

    The remaining filters leave the same of these candidates as all filters would leave of the whole vocabulary, but for
    those that are more than ``hopeless`` below the peak.
    """
    search = _Search(logits, parameters, hopeless)
    if not search.peaks.is_finite:
        return Candidates(np.empty(0, np.intp), np.empty(0, np.float32), None)
    if parameters.top_n_sigma > 0.0:
        return search.top_n_sigma()
    if parameters.top_k > 0:
        return search.top_k()
    if parameters.typical_p < 1.0:
        return search.within(hopeless)
    if parameters.top_p < 1.0:
        return search.top_p()
    if parameters.min_p > 0.0:
        return search.within(min(hopeless, min_p_reach(parameters.min_p)))
    return search.within(hopeless)


def filtered(
    logits: Floats, parameters: SamplingParams, candidate_filter: CandidateFilter, hopeless: float = HOPELESS
) -> tuple[NDArray[np.intp], Floats]:
    """Return the ascending ids of the tokens that the filters leave of penalized ``logits`` [vocabulary].

    Also return their scaled logits relative to the peak of ``logits``. None are left if that is no number.
    """
    candidates = find_candidates(logits, parameters, hopeless)
    if candidates.parameters is None or len(candidates.ids) == 0:
        return candidates.ids, candidates.scaled
    # Ascending, so that the draw does not depend on the order in which the filter returned them.
    left = np.sort(candidate_filter(candidates.scaled, candidates.parameters))
    return candidates.ids[left], candidates.scaled[left]


class _Search:
    """Finds the candidates of one row of logits. Each method suits one filter as the first."""

    def __init__(self, logits: Floats, parameters: SamplingParams, hopeless: float) -> None:
        self.peaks = Peaks(logits)
        self._logits = logits
        self._parameters = parameters
        self._hopeless = hopeless

    def within(self, reach: float) -> Candidates:
        """Return the tokens at most ``reach`` scaled logits below the peak."""
        return self._among(self._ids(reach), self._parameters)

    def top_n_sigma(self) -> Candidates:
        """Return the candidates among the tokens within ``top_n_sigma`` standard deviations of the peak."""
        level = self.peaks.highest - self._parameters.top_n_sigma * _deviation(self._logits)
        near = self.peaks.reaching(np.float32(level))
        rest = replace(self._parameters, top_n_sigma=0.0)
        found = find_candidates(self._logits[near], rest, self._hopeless)
        return Candidates(near[found.ids], found.scaled, found.parameters if rest.filters else None)

    def top_k(self) -> Candidates:
        """Return the ``top_k`` likeliest tokens and a few more."""
        count = min(self._parameters.top_k, len(self._logits))
        level = max(self.peaks.level(count), self._level(self._hopeless))
        found = self._among(self.peaks.reaching(level), self._parameters)
        rising = np.sort(found.scaled)
        if (rising[1:] > rising[:-1]).all():
            return found
        # Which of several equally likely tokens a filter keeps depends on all the candidates that it gets.
        near = self.within(_REACHES[0])
        return near if len(near.ids) >= count else self.within(self._hopeless)

    def top_p(self) -> Candidates:
        """Return the fewest likeliest tokens that together are ``top_p`` likely."""
        parameters = self._parameters
        others = replace(parameters, top_p=1.0)
        rest = others if others.filters else None
        weights = scale(self._logits, self.peaks.highest, parameters.temperature)
        np.exp(weights, out=weights)
        near = self._ids(_REACHES[0])
        part = weights[near]
        # top_p of the whole is a larger share of a part of it.
        share = float(parameters.top_p * sum_blocks(weights).sum() / part.sum(dtype=np.float64))
        if share <= _SAFE_SHARE:
            kept = _likeliest(part, part.cumsum()[-1], share)
            if kept is None:
                return self._among(near, replace(parameters, top_p=share))
            return self._among(near[kept], rest)
        total = weights.cumsum()[-1]
        for reach in _REACHES[1:]:
            ids = self._ids(reach)
            kept = _likeliest(weights[ids], total, parameters.top_p)
            if kept is not None:
                return self._among(ids[kept], rest)
        return self.within(self._hopeless)

    def _among(self, ids: NDArray[np.intp], parameters: SamplingParams | None) -> Candidates:
        return Candidates(ids, scale(self._logits[ids], self.peaks.highest, self._parameters.temperature), parameters)

    def _ids(self, reach: float) -> NDArray[np.intp]:
        return self.peaks.reaching(self._level(reach))

    def _level(self, reach: float) -> np.float32:
        return np.float32(self.peaks.highest - np.float32(reach) * np.float32(self._parameters.temperature))


def _deviation(logits: Floats) -> float:
    """Return the standard deviation of the ``logits`` of tokens that are not ruled out, which are -inf."""
    if np.isneginf(logits.min()):
        logits = logits[logits > -np.inf]
    return float(logits.std(dtype=np.float64))


def _likeliest(weights: Floats, total: np.float32, share: float) -> NDArray[np.bool_] | None:
    """Mark the fewest highest ``weights`` that add up to ``share`` of ``total``.

    Return None if ``weights`` may be too few, or if one that is needed equals one that is not, so that the order of
    llama.cpp's sort decides. Sums are in float32 and add one number after the other, because llama.cpp's do: more
    precise sums would keep other tokens of a flat distribution, and seeds would draw others.
    """
    shares = weights / total
    falling = np.sort(shares)[::-1]
    count = int(falling.cumsum().searchsorted(np.float32(share))) + 1
    if count >= len(falling) or falling[count] == falling[count - 1]:
        return None
    marked: NDArray[np.bool_] = shares >= falling[count - 1]
    return marked

"""Draws the tokens of many rows of logits at once, where few candidates are left and filters leave no doubt about them.

numpy takes about a microsecond for a call, however little there is to compute, and a draw has fifty of them. Here each
call is for all rows. The filters compute shares and their sums more precisely than those of llama.cpp, which round.
Wherever rounding could decide, as with equal logits, a row is not drawn here but alone, by `filtered`. So both ways draw
the same token.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.row_peaks import RowPeaks
from caravan_shard.sampling.token_candidates import HOPELESS, min_p_reach

# A row with more candidates is drawn alone, since each row here takes as long as the one with most candidates.
_MOST_CANDIDATES = 256
# The largest top_k for rows here: a few more tokens than top_k are looked at.
_MOST_TOP_K = 200
# Sums of n shares in float32 differ by less than n + 8 times this from the exact ones: each addition rounds by at most
# 2**-24, and so do exponentials and quotients; twice that for safety.
_ROUNDING = 2.0**-23
# Logits in units of the temperature that are so near to min_p's border may be on either side of it.
_MIN_P_ROUNDING = 1e-4

ALONE = -1


class Row(NamedTuple):
    """A row that is drawn with ``number``; ``xtc``: whether XTC is drawn for it."""

    index: int
    parameters: SamplingParams
    number: float
    xtc: bool


def can_draw(parameters: SamplingParams, vocabulary_size: int) -> bool:
    """Whether `draw` may find the tokens of rows with these parameters, which are not greedy."""
    if parameters.order or parameters.top_n_sigma > 0.0 or parameters.typical_p < 1.0:
        return False
    if parameters.top_k > 0:
        return parameters.top_k <= min(_MOST_TOP_K, RowPeaks.most_counted(vocabulary_size))
    return parameters.min_p > 0.0 and parameters.top_p == 1.0


def draw(logits: Floats, rows: Sequence[Row]) -> list[int]:
    """Return the token of each of ``rows`` of ``logits`` [rows, vocabulary], ALONE for one that must be drawn alone.

    `can_draw` holds for the parameters of each.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return _draw(logits, _Columns(rows))


def _draw(logits: Floats, columns: "_Columns") -> list[int]:
    count = len(columns.index)
    peaks = RowPeaks(logits, columns.index)
    level = np.maximum(_count_levels(peaks, columns.top_k), peaks.highest - columns.reach * columns.temperature)
    at, ids, values = peaks.reaching(level, _MOST_CANDIDATES)
    if len(at) == 0:
        return [ALONE] * count
    counts = np.bincount(at, minlength=count)
    starts = counts.cumsum() - counts
    # Rows of candidates in ascending order of token id, with nothing behind the last.
    scaled = np.full((count, counts.max()), -np.inf, np.float32)
    scaled[at, np.arange(len(at)) - starts[at]] = (values - peaks.highest[at]) / columns.temperature[at]
    most, least, sure = _kept(scaled, counts, columns)
    weights = np.exp(scaled)
    weights[(scaled < least[:, None]) | (scaled > most[:, None])] = 0.0
    cumulative = weights.cumsum(axis=1, dtype=np.float64)
    index = (cumulative <= (columns.number * cumulative[:, -1])[:, None]).sum(axis=1)
    sure &= index < counts
    tokens: list[int] = np.where(sure, ids[np.minimum(starts + index, len(ids) - 1)], ALONE).tolist()
    return tokens


class _Columns:
    """Rows and their parameters, as columns."""

    def __init__(self, rows: Sequence[Row]) -> None:
        table = np.array([_numbers(row) for row in rows]).T
        self.temperature: Floats = table[0].astype(np.float32)
        self.top_k = table[1].astype(np.intp)
        self.top_p = table[2]
        self.min_p = table[3]
        # How far below the peak candidates may be, in units of the temperature.
        self.reach: Floats = table[4].astype(np.float32)
        # Infinite without XTC.
        self.xtc_threshold = table[5]
        self.number = table[6]
        self.index = table[7].astype(np.intp)


def _numbers(row: Row) -> tuple[float, ...]:
    parameters = row.parameters
    top_k, min_p = parameters.top_k, parameters.min_p
    return (
        parameters.temperature,
        top_k,
        parameters.top_p,
        min_p,
        HOPELESS if top_k > 0 else min(HOPELESS, min_p_reach(min_p)),
        parameters.xtc_threshold if row.xtc else math.inf,
        row.number,
        row.index,
    )


def _count_levels(peaks: RowPeaks, counts: NDArray[np.intp]) -> Floats:
    """Return a level for each row that as many logits reach, and few others; -inf for a count of 0."""
    first = int(counts[0])
    if (counts == first).all():
        return peaks.levels(first)
    levels = np.full(len(counts), -np.inf, np.float32)
    for count in set(counts.tolist()) - {0}:
        (rows,) = (counts == count).nonzero()
        levels[rows] = peaks.levels(count, rows)
    return levels


def _kept(
    scaled: Floats, counts: NDArray[np.intp], columns: _Columns
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return the highest and the lowest of the ``scaled`` logits that the filters keep in each row.

    Also return where that is sure. ``counts``: how many candidates each row has.
    """
    falling = -np.sort(-scaled, axis=1)
    rows = np.arange(len(falling))
    sure = counts > 0
    # Which of equal logits a filter keeps depends on how it sorts. Only min_p alone keeps both.
    has_order = (columns.top_k > 0) | (columns.xtc_threshold < math.inf)
    ties = (falling[:, 1:] == falling[:, :-1]) & (falling[:, 1:] > -np.inf)
    sure &= ~(has_order & ties.any(axis=1))
    kept = np.where(columns.top_k > 0, np.minimum(columns.top_k, counts), counts)
    weights = np.exp(falling.astype(np.float64))
    cumulative = weights.cumsum(axis=1)
    rounding = (kept + 8) * _ROUNDING
    places = np.arange(falling.shape[1])
    has_top_p = columns.top_p < 1.0
    if has_top_p.any():
        shares = cumulative / cumulative[rows, kept - 1][:, None]
        behind = np.minimum(kept, (shares < columns.top_p[:, None]).sum(axis=1) + 1)
        near = np.abs(shares - columns.top_p[:, None]).min(axis=1) < rounding
        sure &= ~(has_top_p & near)
        kept = np.where(has_top_p, behind, kept)
    if (columns.min_p > 0.0).any():
        least = np.log(columns.min_p)[:, None]
        # The highest is never taken away.
        near = (np.abs(falling[:, 1:] - least) < _MIN_P_ROUNDING) & (places[1:] < kept[:, None])
        sure &= ~near.any(axis=1)
        kept = np.minimum(kept, np.maximum(1, (falling >= least).sum(axis=1)))
    first = np.zeros(len(rows), np.intp)
    if (columns.xtc_threshold < math.inf).any():
        # XTC takes the likeliest away, but for the last that reaches the threshold.
        shares = weights / cumulative[rows, kept - 1][:, None]
        threshold = columns.xtc_threshold[:, None]
        sure &= ~(np.abs(shares - threshold) < rounding[:, None]).any(axis=1)
        first = np.maximum(0, np.minimum(kept, (shares >= threshold).sum(axis=1)) - 1)
    return falling[rows, first], falling[rows, kept - 1], sure

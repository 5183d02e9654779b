"""Log probabilities under the model's own distribution, before penalties, temperature and filters.

A backend may compute those of several rows in one call, where it has a faster way. Its values differ by no more than
rounding does; it leaves rows with NaN, with an infinite peak, or with thousands of likeliest tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


NO_LOGPROBS = TokenLogprobs(math.nan, [], [], [])


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


class LogprobRow(NamedTuple):
    """The row at ``place``: the log probability of ``token`` is wanted, and those of the ``top_n`` likeliest.

    If there are ``scored`` tokens, their log probabilities are wanted, in their order, in place of the likeliest.
    """

    place: int
    token: int
    top_n: int
    scored: tuple[int, ...] = ()


class JointLogprobs(Protocol):
    """Computes log probabilities of rows. Any thread may call it."""

    def __call__(self, logits: Floats, rows: Sequence[LogprobRow], /) -> list[TokenLogprobs | None]:
        """Return those of ``rows`` of ``logits`` [any, vocabulary], which are contiguous; None if one is left.

        No row has `LogprobRow.scored`.
        """
        ...


def leave_all_logprobs(_logits: Floats, rows: Sequence[LogprobRow]) -> list[TokenLogprobs | None]:
    """Leave all rows: the JointLogprobs of a backend that has no faster way."""
    return [None] * len(rows)


def row_logprobs(logits: Floats, rows: Sequence[LogprobRow], joint: JointLogprobs) -> list[TokenLogprobs]:
    """Return the log probabilities of each of ``rows`` of raw ``logits`` [any, vocabulary]."""
    plain = [row for row in rows if not row.scored]
    found = iter(joint(logits, plain) if plain else [])
    return [_scored(logits, row) if row.scored else next(found) or _alone(logits, row) for row in rows]


def _alone(logits: Floats, row: LogprobRow) -> TokenLogprobs:
    return token_logprobs(logits[row.place], row.token, row.top_n)


def _scored(logits: Floats, row: LogprobRow) -> TokenLogprobs:
    found = token_logprobs(logits[row.place], row.token, 0, row.scored)
    return TokenLogprobs(found.chosen, [*row.scored], found.others, [])

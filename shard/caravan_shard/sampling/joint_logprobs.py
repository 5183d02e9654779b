"""What a backend needs to compute the log probabilities of several rows in one call.

`caravan_shard.sampling.logprobs` computes those of any row. A backend may have a faster way, whose values differ by no
more than rounding does; it leaves rows with NaN, with an infinite peak, or with thousands of likeliest tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from caravan_shard.arrays import Floats
from caravan_shard.sampling.logprobs import TokenLogprobs, token_logprobs


class LogprobRow(NamedTuple):
    """The row at ``place``: the log probability of ``token`` is wanted, and those of the ``top_n`` likeliest.

    ``others``: tokens whose log probabilities are wanted too.
    """

    place: int
    token: int
    top_n: int
    others: tuple[int, ...] = ()


class JointLogprobs(Protocol):
    """Computes log probabilities of rows. Any thread may call it."""

    def __call__(self, logits: Floats, rows: Sequence[LogprobRow], /) -> list[TokenLogprobs | None]:
        """Return those of ``rows`` of ``logits`` [any, vocabulary], which are contiguous; None if one is left.

        No row has `LogprobRow.others`.
        """
        ...


def leave_all_logprobs(_logits: Floats, rows: Sequence[LogprobRow]) -> list[TokenLogprobs | None]:
    """Leave all rows: the JointLogprobs of a backend that has no faster way."""
    return [None] * len(rows)


def row_logprobs(logits: Floats, rows: Sequence[LogprobRow], joint: JointLogprobs) -> list[TokenLogprobs]:
    """Return the log probabilities of each of ``rows`` of raw ``logits`` [any, vocabulary]."""
    joined = [row for row in rows if not row.others]
    found = iter(joint(logits, joined) if joined else [])
    known = [None if row.others else next(found) for row in rows]
    return [
        token_logprobs(logits[row.place], row.token, row.top_n, row.others) if one is None else one
        for row, one in zip(rows, known, strict=True)
    ]

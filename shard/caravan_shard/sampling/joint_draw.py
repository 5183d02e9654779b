"""What a backend needs to draw the tokens of several rows in one call, where filters leave no doubt about them.

`caravan_shard.sampling.choice` draws any row, and decides what a draw is. A backend may have a faster way for common
filters, as long as it draws the same tokens: it leaves the rows of which it is not sure.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.token_candidates import HOPELESS, min_p_reach

# Stands for the token of a row that is left.
LEFT = -1


class Filters(NamedTuple):
    """The parameters of a `JointDraw`.

    ``reach``: how far below the peak candidates may be, in scaled logits, if there is top_k, or min_p without top_p.
    """

    temperature: float
    top_k: float
    typical_p: float
    top_p: float
    min_p: float
    reach: float


class Row(NamedTuple):
    """A row, at ``place``, that is drawn with ``number``.

    ``mask``: that of `Allowed`; None if all tokens may be chosen. ``xtc_threshold``: infinite if XTC is not drawn.
    """

    place: int
    mask: NDArray[np.uint8] | None
    number: float
    xtc_threshold: float
    filters: Filters


class JointDraw(Protocol):
    """Chooses the tokens of rows that have `joint_filters`. Any thread may call it.

    ``threads``: how many share the rows.
    """

    threads: int

    def __call__(self, logits: Floats, rows: Sequence[Row], /) -> list[int]:
        """Return the token of each of ``rows`` of ``logits`` [any, vocabulary], which are contiguous; or LEFT."""
        ...


class LeaveAll:
    """The JointDraw of a backend that has no faster way."""

    threads = 1

    def __call__(self, _logits: Floats, rows: Sequence[Row], /) -> list[int]:
        """Leave all rows."""
        return [LEFT] * len(rows)


leave_all = LeaveAll()


def joint_filters(parameters: SamplingParams) -> Filters | None:
    """Return the filters of ``parameters``; None if a JointDraw does not have them."""
    if parameters.greedy:
        return _GREEDY
    top_k, typical_p, min_p = parameters.top_k, parameters.typical_p, parameters.min_p
    if parameters.order or parameters.top_n_sigma > 0.0 or (typical_p < 1.0 and top_k == 0):
        return None
    reach = min(HOPELESS, min_p_reach(min_p)) if top_k == 0 and min_p > 0.0 else HOPELESS
    return Filters(parameters.temperature, top_k, typical_p, parameters.top_p, min_p, reach)


_GREEDY = Filters(0.0, 0, 1.0, 1.0, 0.0, 0.0)

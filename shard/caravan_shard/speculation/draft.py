"""Draft tokens and where they come from."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from caravan_proto.messages.results import DraftSource


class DraftKind(Enum):
    """Drafts of one kind are about equally often right.

    ``first_guess``: the probability that the first token is right, before anything was learnt. ``next_guess``: the same
    for each token behind right ones. ``matched``: how many last tokens of the sequence the draft followed elsewhere.
    """

    # The output agrees with the prediction, or its last tokens do not.
    PREDICTION = DraftSource.PREDICTION, 0.9, 0.95
    PREDICTION_LOST = DraftSource.PREDICTION, 0.4, 0.8
    CONTEXT_3 = DraftSource.CONTEXT, 0.4, 0.7, 3
    CONTEXT_5 = DraftSource.CONTEXT, 0.6, 0.8, 5
    CONTEXT_8 = DraftSource.CONTEXT, 0.8, 0.9, 8
    CONTEXT_16 = DraftSource.CONTEXT, 0.9, 0.95, 16
    POOL_8 = DraftSource.POOL, 0.5, 0.85, 8
    POOL_16 = DraftSource.POOL, 0.8, 0.95, 16
    CONSTRAINT = DraftSource.CONSTRAINT, 0.8, 0.9
    MODEL = DraftSource.MODEL, 0.7, 0.75

    def __init__(self, source: DraftSource, first_guess: float, next_guess: float, matched: int = 0) -> None:
        self.source = source
        self.first_guess = first_guess
        self.next_guess = next_guess
        self.matched = matched


class Draft(NamedTuple):
    """At least one token that may follow a sequence."""

    tokens: Sequence[int]
    kind: DraftKind

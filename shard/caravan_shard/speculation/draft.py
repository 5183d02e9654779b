"""Draft tokens and where they come from."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class DraftSource(Enum):
    """Where a draft comes from."""

    # What the client predicts the output to be.
    PREDICTION = "prediction"
    # The sequence's own prompt and output, behind an earlier occurrence of its last tokens.
    CONTEXT = "context"
    # Tokens that the constraint forces.
    CONSTRAINT = "constraint"
    # A second, smaller model.
    MODEL = "model"


class DraftKind(Enum):
    """Drafts of one kind are about equally often right.

    ``first_guess``: the probability that the first token is right, before anything was learnt. ``next_guess``: the same
    of each token behind right ones.
    """

    # The output agrees with the prediction, or its last tokens do not.
    PREDICTION = DraftSource.PREDICTION, 0.9, 0.95
    PREDICTION_LOST = DraftSource.PREDICTION, 0.4, 0.8
    # So many last tokens occurred before.
    CONTEXT_3 = DraftSource.CONTEXT, 0.4, 0.7
    CONTEXT_5 = DraftSource.CONTEXT, 0.6, 0.8
    CONTEXT_8 = DraftSource.CONTEXT, 0.8, 0.9
    CONTEXT_16 = DraftSource.CONTEXT, 0.9, 0.95
    CONSTRAINT = DraftSource.CONSTRAINT, 0.95, 0.99
    MODEL = DraftSource.MODEL, 0.7, 0.75

    def __init__(self, source: DraftSource, first_guess: float, next_guess: float) -> None:
        self.source = source
        self.first_guess = first_guess
        self.next_guess = next_guess


class Draft(NamedTuple):
    """At least one token that may follow a sequence."""

    tokens: Sequence[int]
    kind: DraftKind

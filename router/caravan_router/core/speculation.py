"""Draft tokens: guesses of a sequence's next tokens, which a step verifies. They never change an output."""

from enum import Enum
from typing import NamedTuple


class DraftSource(Enum):
    """Where draft tokens come from. The values are metric labels and names in replies."""

    # What the client predicts the output to be.
    PREDICTION = "prediction"
    # The sequence's own prompt and output.
    CONTEXT = "context"
    # Tokens that the constraint forces.
    CONSTRAINT = "constraint"
    # A draft model.
    MODEL = "model"
    # Ended outputs of the same API key and salt.
    POOL = "pool"


class DraftCount(NamedTuple):
    """How many draft tokens of one source there were, and how many of them the output has."""

    source: DraftSource
    drafted: int
    accepted: int

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


class Draft(NamedTuple):
    """At least one token that may follow a sequence."""

    tokens: Sequence[int]
    source: DraftSource

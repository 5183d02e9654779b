"""What is wrong with a constraint."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a constraint cannot be used: a short sentence for the client."""

    sentence: str

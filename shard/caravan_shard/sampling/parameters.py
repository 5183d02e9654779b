"""How the tokens of a sequence are chosen."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Columns: ``values[n]`` is added to the logit of token ``ids[n]``. No id occurs twice."""

    ids: NDArray[np.intp]
    values: NDArray[np.float32]

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change ``logits`` [vocabulary] in place."""
        logits[self.ids] += self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How tokens are chosen; a field at its default switches its filter off.

    Order: biases, penalties, what a grammar allows, temperature, top_k, typical_p, top_p, min_p. ``temperature`` 0
    chooses the most likely token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logprobs: bool = False
    top_n_tokens: int = 0
    biases: Biases | None = None

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is on."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def filters(self) -> bool:
        """Whether a filter may take candidates away."""
        return self.top_k > 0 or self.typical_p < 1.0 or self.top_p < 1.0 or self.min_p > 0.0

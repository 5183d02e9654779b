"""Values that are added to the logits of single tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats
from caravan_shard.sampling.change import Change


@dataclass(frozen=True, slots=True, eq=False)
class LogitBiases:
    """Columns: ``values[n]`` is added to the logit of token ``ids[n]``. No id occurs twice."""

    ids: NDArray[np.intp]
    values: NDArray[np.float32]

    def apply(self, logits: Floats) -> Change:
        """Change ``logits`` [vocabulary] in place, and return what has changed."""
        before = logits[self.ids]
        logits[self.ids] = before + self.values
        return Change(self.ids, before)


def make_biases(biases: Sequence[tuple[int, float]]) -> LogitBiases | None:
    """Return the columns of pairs of a token id and a value; None if there are none."""
    if not biases:
        return None
    ids, values = zip(*biases, strict=True)
    return LogitBiases(np.array(ids, np.intp), np.array(values, np.float32))

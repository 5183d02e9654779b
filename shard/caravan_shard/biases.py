"""What a client adds to the logits of some tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Columns: ``values`` belong to the tokens ``ids``, each of which occurs once."""

    ids: NDArray[np.intp]
    values: NDArray[np.float32]

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change ``logits`` [vocabulary] in place."""
        logits[self.ids] += self.values

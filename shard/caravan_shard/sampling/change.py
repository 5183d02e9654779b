"""What was changed in a row of logits, so that it can be undone without a copy of the vocabulary."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats


class Change(NamedTuple):
    """Columns: the logit of token ``ids[n]`` was ``before[n]``. No id occurs twice."""

    ids: NDArray[np.integer]
    before: Floats

    def undo(self, logits: Floats) -> None:
        """Undo the change, the last of ``logits`` [vocabulary] that is not undone."""
        logits[self.ids] = self.before

"""What the toy model thinks of a prompt."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caravan_shard.backends.toy.cache import EMPTY_STATE, next_state
from caravan_shard.backends.toy.model import toy_logits


def expected_logprobs(prompt: Sequence[int], adapter: str = "") -> list[NDArray[np.float64]]:
    """[vocabulary] before each token but the first."""
    state, rows = EMPTY_STATE, []
    for position, token in enumerate(prompt[:-1]):
        state = next_state(state, token, position, adapter)
        logits = toy_logits(np.array([state], np.uint64))[0].astype(np.float64)
        rows.append(logits - np.log(np.exp(logits).sum()))
    return rows

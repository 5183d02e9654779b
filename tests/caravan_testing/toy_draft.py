"""A toy model that drafts for another, and is wrong at times."""

from typing import Any

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import EMPTY_STATE, next_state
from caravan_testing.shard_builders import EngineDriver


class ToyDraftModel(ToyBackend):
    """The toy model, whose tokens are wrong in every ``wrong_every``-th step; 0: never, 1: always."""

    def __init__(self, *, wrong_every: int = 0, **fields: Any) -> None:
        super().__init__(**fields)
        self.wrong_every = wrong_every
        self.steps = 0

    def logits(self, rows: int) -> Floats:
        """Return the right ones, or those of the next tokens of the vocabulary."""
        self.steps += 1
        is_wrong = self.wrong_every and self.steps % self.wrong_every == 0
        return np.roll(super().logits(rows), 1, axis=1) if is_wrong else super().logits(rows)


def check_draft_cells(driver: EngineDriver, draft_model: ToyBackend) -> None:
    """Check that the draft model holds nothing but computed beginnings of held sequences."""
    held = driver.engine._pool.held
    for sequence_id, cells in draft_model.cache.held.items():
        if not cells:
            continue
        sequence = held[sequence_id]
        assert len(cells) <= sequence.computed, f"sequence {sequence_id}"
        states = [EMPTY_STATE]
        for position, token in enumerate(sequence.tokens[: len(cells)]):
            states.append(next_state(states[-1], token, position))
        assert [cell.state for cell in cells] == states[1:], f"sequence {sequence_id}"
    assert draft_model.cache.used <= draft_model.capacity.current.cells

"""Proposes the next tokens of one sequence."""

from collections.abc import Sequence

from caravan_shard.speculation.context import Context
from caravan_shard.speculation.draft import Draft, DraftSource
from caravan_shard.speculation.prediction import Prediction


class Drafter:
    """Asks the prediction first, if there is one, then the sequence's own prompt and output."""

    __slots__ = ("_context", "_prediction")

    def __init__(self, predicted: Sequence[int]) -> None:
        """``predicted``: tokens of the output as the client expects it; empty if it expects nothing."""
        self._prediction = Prediction(predicted) if predicted else None
        self._context = Context()

    def propose(self, tokens: Sequence[int], output_start: int, most: int) -> Draft | None:
        """Return up to ``most`` tokens that may follow ``tokens``, whose output begins at ``output_start``."""
        if self._prediction is not None:
            proposed = self._prediction.propose(tokens, output_start, most)
            if proposed:
                return Draft(proposed, DraftSource.PREDICTION)
        proposed = self._context.propose(tokens, most)
        return Draft(proposed, DraftSource.CONTEXT) if proposed else None

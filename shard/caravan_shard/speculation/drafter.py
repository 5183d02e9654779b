"""Proposes the next tokens of one sequence."""

from collections.abc import Sequence

from caravan_shard.speculation.acceptance import KindAcceptance, SequenceAcceptance
from caravan_shard.speculation.context import Context
from caravan_shard.speculation.draft import Draft
from caravan_shard.speculation.prediction import Prediction


class Drafter:
    """Asks the prediction first, if there is one, then the sequence's own prompt and output.

    ``acceptance``: how often the drafts of the sequence were right.
    """

    __slots__ = ("_context", "_prediction", "acceptance")

    def __init__(self, predicted: Sequence[int], kinds: KindAcceptance) -> None:
        """``predicted``: tokens of the output as the client expects it; empty if it expects nothing.

        ``kinds``: what all sequences of the shard have shown.
        """
        self.acceptance = SequenceAcceptance(kinds)
        self._prediction = Prediction(predicted) if predicted else None
        self._context = Context()

    def propose(self, tokens: Sequence[int], output_start: int, most: int) -> Draft | None:
        """Return up to ``most`` tokens that may follow ``tokens``, whose output begins at ``output_start``."""
        if self._prediction is not None:
            predicted = self._prediction.propose(tokens, output_start, most)
            if predicted is not None:
                return predicted
        return self._context.propose(tokens, most)

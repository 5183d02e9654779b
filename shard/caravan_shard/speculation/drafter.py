"""Proposes the next tokens of one sequence."""

from collections.abc import Sequence

from caravan_shard.speculation.acceptance import KindAcceptance, SequenceAcceptance
from caravan_shard.speculation.context import Context
from caravan_shard.speculation.draft import Draft
from caravan_shard.speculation.ended_texts import EndedTexts
from caravan_shard.speculation.prediction import PredictionFollower


class Drafter:
    """Proposes by the prediction if it can, else by the sequence's own text or the texts of its pool.

    The own text comes first unless the pool has more of the last tokens. ``acceptance``: how often the drafts of the
    sequence were right.
    """

    __slots__ = ("_context", "_ended", "_pool", "_prediction", "acceptance")

    def __init__(self, predicted: Sequence[int], kinds: KindAcceptance, ended: EndedTexts, pool: bytes) -> None:
        """``predicted``: tokens of the output as the client expects it; empty if it expects nothing.

        ``kinds``: what all sequences of the shard have shown. ``ended``: the texts that the shard keeps, of which the
        sequence may see those of ``pool``; with an empty name none.
        """
        self.acceptance = SequenceAcceptance(kinds)
        self._prediction = PredictionFollower(predicted) if predicted else None
        self._context = Context()
        self._ended = ended
        self._pool = pool

    def propose(self, tokens: Sequence[int], output_start: int, most: int) -> Draft | None:
        """Return up to ``most`` tokens that may follow ``tokens``, whose output begins at ``output_start``."""
        if self._prediction is not None:
            predicted = self._prediction.propose(tokens, output_start, most)
            if predicted is not None:
                return predicted
        own = self._context.propose(tokens, most)
        if not self._pool:
            return own
        return self._ended.propose(self._pool, tokens, most, own.kind.matched if own is not None else 0) or own

    def end(self, tokens: Sequence[int], output_start: int) -> None:
        """Keep the output of the sequence for others of its pool."""
        if self._pool:
            self._ended.keep(self._pool, tokens, output_start)

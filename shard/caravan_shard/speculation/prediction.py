"""Follows an output through what its client predicted."""

from collections.abc import Sequence

from caravan_shard.speculation.draft import Draft, DraftKind
from caravan_shard.speculation.token_text import TokenText, as_bytes

# After this many output tokens in a row that the prediction lacks, it proposes nothing until it has them again.
_MOST_MISSES = 3
# Numbers of last tokens by which the output is found again in the prediction, the largest first.
_TAILS = (4, 3, 2)


class PredictionFollower:
    """Knows the place in the predicted tokens that the output has reached.

    Where the output differs, it is searched for by its last tokens, first behind the place. Until it is found, each
    token of the output counts as one that replaces a token of the prediction.
    """

    __slots__ = ("_misses", "_place", "_read", "_text")

    def __init__(self, predicted: Sequence[int]) -> None:
        self._text = TokenText(predicted)
        self._place = 0
        # Number of output tokens that were followed.
        self._read = 0
        self._misses = 0

    def propose(self, tokens: Sequence[int], output_start: int, most: int) -> Draft | None:
        """Return up to ``most`` tokens that may follow ``tokens``, whose output begins at ``output_start``."""
        for end in range(output_start + self._read + 1, len(tokens) + 1):
            self._follow(tokens, output_start, end)
        self._read = len(tokens) - output_start
        if self._misses >= _MOST_MISSES or self._place >= len(self._text):
            return None
        kind = DraftKind.PREDICTION_LOST if self._misses else DraftKind.PREDICTION
        return Draft(self._text.tokens(self._place, self._place + most), kind)

    def _follow(self, tokens: Sequence[int], output_start: int, end: int) -> None:
        """Read the output token before position ``end``."""
        place = self._place
        if place < len(self._text) and self._text[place] == tokens[end - 1]:
            self._place, self._misses = place + 1, 0
            return
        for count in _TAILS:
            if end - count >= output_start:
                tail = as_bytes(tokens[end - count : end])
                found = self._text.first_end(tail, max(0, place - count)) or self._text.first_end(tail, 0)
                if found is not None:
                    self._place, self._misses = found, 0
                    return
        self._place, self._misses = place + 1, self._misses + 1

"""DRY ("don't repeat yourself"): penalizes tokens that would extend a repetition of earlier tokens.

Described in https://github.com/oobabooga/text-generation-webui/pull/5677. Gives the same penalties as llama.cpp's
sampler with its default sequence breakers, which is the reference in the tests. That sampler is not called: making one
reads the whole vocabulary for each sequence (11 ms for 49,000 tokens, 63 ms for 262,000), and each token would have to
be copied through an array of the whole vocabulary.
"""

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats, Ids
from caravan_shard.sampling.change import Change

# No repetition reaches across a token that contains one of these characters, and such a token is never penalized.
SEQUENCE_BREAKERS = frozenset(b'\n:"*')
# Rules a token out; keeps logits finite.
_MAX_PENALTY = 1e9
_NO_CHANGE = Change(np.empty(0, np.int32), np.empty(0, np.float32))


class DryPenalty:
    """The DRY penalty of one sequence. A Penalty.

    A token that follows an earlier occurrence of the last n >= ``dry_allowed_length`` tokens, n as large as possible,
    loses ``dry_multiplier`` x ``dry_base`` ^ (n - ``dry_allowed_length``).
    """

    sampler = "dry"

    def __init__(self, parameters: SamplingParams, piece: Callable[[int], bytes]) -> None:
        self._parameters = parameters
        self._piece = piece
        self._tokens = array("i")
        # Number of tokens, for each token, that end there and equal the last ones; made by `_update`.
        self._matches: Ids = np.empty(0, np.int32)
        self._since_breaker = 0

    def add(self, tokens: Sequence[int], *, output: bool) -> None:
        """Append tokens of the prompt or of the output."""
        self._tokens.extend(tokens)
        after = next((count for count, token in enumerate(reversed(tokens)) if self._breaks(token)), None)
        self._since_breaker = self._since_breaker + len(tokens) if after is None else after

    def apply(self, logits: Floats) -> Change:
        """Change ``logits`` [vocabulary] in place, and return what has changed."""
        parameters = self._parameters
        self._update()
        count = len(self._tokens)
        start = max(0, count - (parameters.dry_penalty_last_n or count))
        window = count - start
        longest = min(window, self._since_breaker)
        allowed = parameters.dry_allowed_length
        if window <= allowed or longest < allowed:
            return _NO_CHANGE
        # A match may not reach back beyond the window or the last breaker.
        matches = np.minimum(self._matches[start:-1], np.minimum(np.arange(1, window), longest))
        following = np.frombuffer(self._tokens, np.int32)[start + 1 :]
        tokens, place = np.unique(following[matches >= allowed], return_inverse=True)
        lengths = np.zeros(len(tokens))
        np.maximum.at(lengths, place, matches[matches >= allowed])
        with np.errstate(over="ignore"):
            penalties = parameters.dry_multiplier * parameters.dry_base ** (lengths - allowed)
        penalties[[self._breaks(token) for token in tokens.tolist()]] = 0.0
        before: Floats = logits[tokens]
        logits[tokens] = before - np.minimum(penalties, _MAX_PENALTY).astype(np.float32)
        return Change(tokens, before)

    def _update(self) -> None:
        """Bring ``_matches`` up to the last token."""
        count = len(self._tokens)
        if 0 < len(self._matches) == count - 1:
            # Each match of the tokens before is one longer where its next token equals the new one, and over elsewhere.
            tokens = np.frombuffer(self._tokens, np.int32)
            longer = np.concatenate([[0], self._matches[:-1]]) + 1
            self._matches = np.append(np.where(tokens[:-1] == tokens[-1], longer, 0), count).astype(np.int32)
        elif len(self._matches) != count:
            if self._parameters.dry_penalty_last_n is not None:
                del self._tokens[: -self._parameters.dry_penalty_last_n]
            self._matches = np.array(suffix_matches(self._tokens), np.int32)

    def _breaks(self, token: int) -> bool:
        return not SEQUENCE_BREAKERS.isdisjoint(self._piece(token))


def suffix_matches(tokens: Sequence[int]) -> list[int]:
    """Return the length of the longest common suffix of each prefix of ``tokens`` and the whole.

    The Z-algorithm (Gusfield 1997) on the reversed tokens: linear in their number.
    """
    reverse = list(reversed(tokens))
    count = len(reverse)
    matches = [count] * count
    # reverse[left:right] equals the beginning of ``reverse``, and no match found so far ends later.
    left = right = 0
    for start in range(1, count):
        length = min(matches[start - left], right - start) if start < right else 0
        while start + length < count and reverse[length] == reverse[start + length]:
            length += 1
        if start + length > right:
            left, right = start, start + length
        matches[start] = length
    return matches[::-1]

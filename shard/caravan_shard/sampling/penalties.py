"""What changes the logits of single tokens: biases, and the penalties, which depend on a sequence's tokens so far."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats, Ids

# No repetition reaches across a token that contains one of these characters, and such a token is never penalized.
SEQUENCE_BREAKERS = frozenset(b'\n:"*')
# Rules a token out; keeps logits finite.
_MAX_PENALTY = 1e9


class Change(NamedTuple):
    """What was changed in a row of logits, so that it can be undone without a copy of the vocabulary.

    Columns: the logit of token ``ids[n]`` was ``before[n]``. No id occurs twice.
    """

    ids: NDArray[np.integer]
    before: Floats

    def undo(self, logits: Floats) -> None:
        """Undo the change, the last of ``logits`` [vocabulary] that is not undone."""
        logits[self.ids] = self.before


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


_NO_CHANGE = Change(np.empty(0, np.int32), np.empty(0, np.float32))


class DryPenalty:
    """DRY ("don't repeat yourself"): penalizes tokens that would extend a repetition of earlier tokens. A Penalty.

    Described in https://github.com/oobabooga/text-generation-webui/pull/5677. Gives the same penalties as llama.cpp's
    sampler with its default sequence breakers, which is the reference in the tests. That sampler is not called: making
    one reads the whole vocabulary for each sequence (11 ms for 49,000 tokens, 63 ms for 262,000), and each token would
    have to be copied through an array of the whole vocabulary.

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


class Penalty(Protocol):
    """Lowers the logits of tokens because of the tokens of one sequence so far.

    A token's new logit depends on its own alone. ``sampler``: its name in `caravan_proto.messages.sampling.SAMPLERS`.
    """

    sampler: str

    def add(self, tokens: Sequence[int], *, output: bool) -> None:
        """Append tokens of the prompt or of the output."""
        ...

    def apply(self, logits: Floats) -> Change:
        """Change ``logits`` [vocabulary] in place, and return what has changed."""
        ...


def make_penalties(parameters: SamplingParams, piece: Callable[[int], bytes]) -> tuple[Penalty, ...]:
    """Make the penalties that ``parameters`` switch on, in order. ``piece`` gives the bytes of a token."""
    penalties: list[Penalty] = []
    if parameters.repeat_last_n != 0 and (
        parameters.repetition_penalty != 1.0
        or parameters.frequency_penalty != 0.0
        or parameters.presence_penalty != 0.0
    ):
        penalties.append(OccurrencePenalty(parameters))
    if parameters.dry_multiplier > 0.0 and parameters.dry_penalty_last_n != 0:
        penalties.append(DryPenalty(parameters, piece))
    return tuple(penalties)


class OccurrencePenalty:
    """Repetition, frequency and presence penalties. A Penalty.

    Keeps the distinct tokens and how often each occurs among the last ``repeat_last_n`` tokens. The arrays double when
    full, so that `apply` costs the number of distinct tokens and no Python loop.
    """

    sampler = "penalties"

    def __init__(self, parameters: SamplingParams) -> None:
        self._parameters = parameters
        self._index: dict[int, int] = {}
        self._ids: Ids = np.empty(256, np.int32)
        # Rows: occurrences in prompt and output, and in the output alone.
        self._counts: Floats = np.zeros((2, 256), np.float32)
        # The index of each token in the window and whether it is output; empty without a window.
        self._window: deque[tuple[int, bool]] = deque()

    def add(self, tokens: Sequence[int], *, output: bool) -> None:
        """Append tokens of the prompt or of the output."""
        most = self._parameters.repeat_last_n
        for token in tokens if most is None else tokens[-most:]:
            index = self._index.get(token)
            if index is None:
                index = self._append(token)
            self._count(index, 1, output=output)
            if most is None:
                continue
            self._window.append((index, output))
            if len(self._window) > most:
                index, was_output = self._window.popleft()
                self._count(index, -1, output=was_output)

    def apply(self, logits: Floats) -> Change:
        """Change ``logits`` [vocabulary] in place, and return what has changed."""
        parameters = self._parameters
        ids = self._ids[: len(self._index)]
        occurrences, outputs = self._counts[:, : len(self._index)]
        before: Floats = logits[ids]
        touched = before
        if parameters.repetition_penalty != 1.0:
            penalty = np.where(occurrences > 0, np.float32(parameters.repetition_penalty), np.float32(1.0))
            touched = np.where(touched > 0, touched / penalty, touched * penalty)
        touched = touched - outputs * np.float32(parameters.frequency_penalty)
        touched -= (outputs > 0) * np.float32(parameters.presence_penalty)
        logits[ids] = touched
        return Change(ids, before)

    def _append(self, token: int) -> int:
        index = len(self._index)
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._ids[index] = token
        self._index[token] = index
        return index

    def _count(self, index: int, by: int, *, output: bool) -> None:
        self._counts[0, index] += by
        if output:
            self._counts[1, index] += by

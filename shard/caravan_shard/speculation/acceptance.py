"""Draft tokens, where they come from, and how probably they are right, learnt from what was chosen."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from caravan_proto.messages.results import DraftSource

# What is known of a kind is weighted by _KIND_KEPT with each new draft token, and so is the guess, which counts as
# _GUESS_WEIGHT tokens at first.
_KIND_KEPT = 0.99
_GUESS_WEIGHT = 10.0
# What is known of a kind counts as this many draft tokens of a sequence, which are weighted by _KEPT with each new one.
# It counts less the more a sequence has shown, down to the second number if its drafts are of one kind, as the model's.
_KIND_WEIGHT = 4.0
_LEAST_KIND_WEIGHT = 1.0
_KEPT = 0.9
# Places in a draft that are told apart. Those behind are like the last one.
_PLACES = 8
# Nothing is certain, so that what is rare is still weighed.
_LEAST = 0.001


class DraftKind(Enum):
    """Drafts of one kind are about equally often right.

    ``first_guess``: the probability that the first token is right, before anything was learnt. ``next_guess``: the same
    for each token behind right ones. ``matched``: how many last tokens of the sequence the draft followed elsewhere.
    """

    # The output agrees with the prediction, or its last tokens do not.
    PREDICTION = DraftSource.PREDICTION, 0.9, 0.95
    PREDICTION_LOST = DraftSource.PREDICTION, 0.4, 0.8
    CONTEXT_3 = DraftSource.CONTEXT, 0.4, 0.7, 3
    CONTEXT_5 = DraftSource.CONTEXT, 0.6, 0.8, 5
    CONTEXT_8 = DraftSource.CONTEXT, 0.8, 0.9, 8
    CONTEXT_16 = DraftSource.CONTEXT, 0.9, 0.95, 16
    POOL_8 = DraftSource.POOL, 0.5, 0.85, 8
    POOL_16 = DraftSource.POOL, 0.8, 0.95, 16
    CONSTRAINT = DraftSource.CONSTRAINT, 0.8, 0.9
    MODEL = DraftSource.MODEL, 0.7, 0.75

    def __init__(self, source: DraftSource, first_guess: float, next_guess: float, matched: int = 0) -> None:
        self.source = source
        self.first_guess = first_guess
        self.next_guess = next_guess
        self.matched = matched


class Draft(NamedTuple):
    """At least one token that may follow a sequence."""

    tokens: Sequence[int]
    kind: DraftKind


class KindAcceptance:
    """How often drafts of all sequences were right, by kind and by place in the draft, where all tokens before were.

    Heads and draft models read their own guesses, so the third token of a draft is less often right than the second.
    A place of which little is known is like the one before it.
    """

    def __init__(self) -> None:
        self._right = {kind: [0.0] * _PLACES for kind in DraftKind}
        self._total = {kind: [0.0] * _PLACES for kind in DraftKind}
        self._guess_weights = {kind: [_GUESS_WEIGHT] * _PLACES for kind in DraftKind}
        self.probabilities = {kind: [kind.first_guess, *[kind.next_guess] * (_PLACES - 1)] for kind in DraftKind}

    @property
    def most_probable(self) -> float:
        """The probability of the first token of the most trusted kind that takes no model."""
        return max(shares[0] for kind, shares in self.probabilities.items() if kind is not DraftKind.MODEL)

    def observe(self, kind: DraftKind, place: int, *, is_right: bool) -> None:
        """Learn from the token at ``place`` of a draft, before which all were right."""
        place = min(place, _PLACES - 1)
        right, total, weights = self._right[kind], self._total[kind], self._guess_weights[kind]
        right[place] = _KIND_KEPT * right[place] + is_right
        total[place] = _KIND_KEPT * total[place] + 1
        weights[place] *= _KIND_KEPT
        found = self.probabilities[kind]
        for at in range(place, _PLACES):
            guess = found[at - 1] if at > 1 else kind.next_guess if at else kind.first_guess
            share = (right[at] + weights[at] * guess) / (total[at] + weights[at])
            found[at] = min(max(share, _LEAST), 1 - _LEAST)


class _Watch:
    """How often drafts of one sequence were right by place, and the draft that is compared with its output."""

    __slots__ = ("_least_weight", "_right", "_total", "draft", "place")

    def __init__(self, least_weight: float) -> None:
        self._least_weight = least_weight
        self._right = [0.0] * _PLACES
        self._total = [0.0] * _PLACES
        # It need not be computed. ``place`` is that of its next token.
        self.draft: Draft | None = None
        self.place = 0

    def observe(self, tokens: Sequence[int], kinds: KindAcceptance) -> None:
        for token in tokens:
            if self.draft is None:
                return
            is_right = self.draft.tokens[self.place] == token
            at = min(self.place, _PLACES - 1)
            self._right[at] = _KEPT * self._right[at] + is_right
            self._total[at] = _KEPT * self._total[at] + 1
            kinds.observe(self.draft.kind, self.place, is_right=is_right)
            self.place += 1
            if not is_right or self.place == len(self.draft.tokens):
                self.draft = None

    def probability(self, place: int, of_kind: float) -> float:
        """Return the probability of the token at ``place``, where ``of_kind`` holds for all sequences."""
        total = self._total[place]
        weight = max(self._least_weight, _KIND_WEIGHT * (1 - total * (1 - _KEPT)))
        return (self._right[place] + weight * of_kind) / (total + weight)

    def survivals(self, of_kind: Sequence[float], count: int) -> list[float]:
        """Return for ``count`` tokens the probability that each is right and all before it are."""
        found: list[float] = []
        survival, probability = 1.0, 0.0
        for place in range(min(count, _PLACES)):
            known = of_kind[place]
            if place > 1:
                known = _as_different(known, probability, of_kind[place - 1])
            probability = self.probability(place, known)
            survival *= probability
            found.append(survival)
        while len(found) < count:
            survival *= probability
            found.append(survival)
        return found


def _as_different(usual: float, seen: float, usual_before: float) -> float:
    """Return ``usual`` with the difference that ``seen`` makes to ``usual_before``."""
    if seen < usual_before:
        return usual * seen / usual_before
    return 1 - (1 - usual) * (1 - seen) / (1 - usual_before)


class SequenceAcceptance:
    """How often drafts of one sequence were right; without experience of its own, how often those of all were.

    A text may repeat nothing and still be easy for a draft model, so drafts of the model count apart.
    """

    __slots__ = ("_kinds", "_of_model", "_others")

    def __init__(self, kinds: KindAcceptance) -> None:
        self._kinds = kinds
        self._of_model, self._others = _Watch(_LEAST_KIND_WEIGHT), _Watch(_KIND_WEIGHT)

    @property
    def most_probable(self) -> float:
        """The probability of the first token of the most trusted kind of draft that takes no model."""
        return self._others.probability(0, self._kinds.most_probable)

    def watch(self, draft: Draft) -> None:
        """Compare ``draft`` with the next tokens, unless another one from a model, or not from one, is compared."""
        watch = self._watch_of(draft)
        if watch.draft is None:
            watch.draft, watch.place = draft, 0

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn from the next ``tokens`` of the output."""
        self._of_model.observe(tokens, self._kinds)
        self._others.observe(tokens, self._kinds)

    def survivals(self, draft: Draft) -> list[float]:
        """Return for each token of ``draft`` the probability that it is right and all before it are."""
        return self._watch_of(draft).survivals(self._kinds.probabilities[draft.kind], len(draft.tokens))

    def _watch_of(self, draft: Draft) -> _Watch:
        return self._of_model if draft.kind is DraftKind.MODEL else self._others

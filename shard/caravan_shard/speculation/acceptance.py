"""Draft tokens, where they come from, and how probably they are right, learnt from what was chosen."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from caravan_proto.messages.results import DraftSource

# The weight of one draft token in what is known of its kind. The first ones weigh more, beside a guess that counts as
# _GUESS_WEIGHT tokens.
_NEWEST = 0.01
_GUESS_WEIGHT = 20
# What is known of a kind counts as this many draft tokens of a sequence, which are weighted by _KEPT with each new one.
_KIND_WEIGHT = 4.0
_KEPT = 0.9


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


class _Share:
    """The share of draft tokens that were right, of a kind and of one sequence."""

    __slots__ = ("right", "total")

    def __init__(self) -> None:
        self.right = self.total = 0.0

    def observe(self, *, is_right: bool) -> None:
        self.right = _KEPT * self.right + is_right
        self.total = _KEPT * self.total + 1

    def probability(self, of_kind: float) -> float:
        return (self.right + _KIND_WEIGHT * of_kind) / (self.total + _KIND_WEIGHT)


class KindAcceptance:
    """How often drafts of all sequences were right, by kind: their first tokens, and each token behind right ones."""

    def __init__(self) -> None:
        self.shares = {kind: [kind.first_guess, kind.next_guess] for kind in DraftKind}
        self._counts = {kind: [_GUESS_WEIGHT, _GUESS_WEIGHT] for kind in DraftKind}

    @property
    def most_probable(self) -> float:
        """The probability of the first token of the most trusted kind that takes no model."""
        return max(first for kind, (first, _) in self.shares.items() if kind is not DraftKind.MODEL)

    def observe(self, kind: DraftKind, place: int, *, is_right: bool) -> None:
        """Learn from the token at ``place`` of a draft, before which all were right."""
        shares, counts, part = self.shares[kind], self._counts[kind], min(place, 1)
        counts[part] += 1
        shares[part] += max(_NEWEST, 1 / counts[part]) * (is_right - shares[part])


class _Watch:
    """How often drafts of one sequence were right, and the draft that is compared with its output."""

    __slots__ = ("draft", "place", "shares")

    def __init__(self) -> None:
        self.shares = (_Share(), _Share())
        # It need not be computed. ``place`` is that of its next token.
        self.draft: Draft | None = None
        self.place = 0

    def observe(self, tokens: Sequence[int], kinds: KindAcceptance) -> None:
        for token in tokens:
            if self.draft is None:
                return
            is_right = self.draft.tokens[self.place] == token
            self.shares[min(self.place, 1)].observe(is_right=is_right)
            kinds.observe(self.draft.kind, self.place, is_right=is_right)
            self.place += 1
            if not is_right or self.place == len(self.draft.tokens):
                self.draft = None


class SequenceAcceptance:
    """How often drafts of one sequence were right; without experience of its own, how often those of all were.

    A text may repeat nothing and still be easy for a draft model, so drafts of the model count apart.
    """

    __slots__ = ("_kinds", "_of_model", "_others")

    def __init__(self, kinds: KindAcceptance) -> None:
        self._kinds = kinds
        self._of_model, self._others = _Watch(), _Watch()

    @property
    def most_probable(self) -> float:
        """The probability of the first token of the most trusted kind of draft that takes no model."""
        return self._others.shares[0].probability(self._kinds.most_probable)

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
        first, following = self._kinds.shares[draft.kind]
        shares = self._watch_of(draft).shares
        survival = shares[0].probability(first)
        step = shares[1].probability(following)
        found = []
        for _ in draft.tokens:
            found.append(survival)
            survival *= step
        return found

    def _watch_of(self, draft: Draft) -> _Watch:
        return self._of_model if draft.kind is DraftKind.MODEL else self._others

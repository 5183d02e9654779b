"""How probably the tokens of a draft are right, learnt from what was chosen."""

from collections.abc import Sequence

from caravan_shard.speculation.draft import Draft, DraftKind

# A draft token counts for so much of what is known of all drafts of its kind.
_NEWEST = 0.01
# What is known of a kind counts as so many draft tokens of a sequence, and these fade by this part with each new one.
_KIND_WEIGHT = 4.0
_KEPT = 0.9


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
    """What all sequences of a shard have shown: by kind, for the first token of a draft and for each that follows."""

    def __init__(self) -> None:
        self.shares = {kind: [kind.first_guess, kind.next_guess] for kind in DraftKind}

    @property
    def most_probable(self) -> float:
        """The probability of the first token of the most trusted kind."""
        return max(first for first, _ in self.shares.values())

    def observe(self, kind: DraftKind, place: int, *, is_right: bool) -> None:
        """Learn from the token at ``place`` of a draft, before which all were right."""
        shares = self.shares[kind]
        shares[min(place, 1)] += _NEWEST * (is_right - shares[min(place, 1)])


class SequenceAcceptance:
    """What one sequence has shown, and what it is told by all."""

    __slots__ = ("_kinds", "_place", "_shares", "_watched")

    def __init__(self, kinds: KindAcceptance) -> None:
        self._kinds = kinds
        self._shares = (_Share(), _Share())
        # A draft that is compared with the output without being computed, and the place of its next token.
        self._watched: Draft | None = None
        self._place = 0

    @property
    def most_probable(self) -> float:
        """The probability of the first token of the most trusted kind of draft."""
        return self._shares[0].probability(self._kinds.most_probable)

    def watch(self, draft: Draft) -> None:
        """Compare ``draft`` with the next tokens, unless another draft is being compared."""
        if self._watched is None:
            self._watched, self._place = draft, 0

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn from the next ``tokens`` of the output."""
        for token in tokens:
            if self._watched is None:
                return
            draft, place = self._watched, self._place
            is_right = draft.tokens[place] == token
            self._shares[min(place, 1)].observe(is_right=is_right)
            self._kinds.observe(draft.kind, place, is_right=is_right)
            self._place += 1
            if not is_right or self._place == len(draft.tokens):
                self._watched = None

    def survivals(self, draft: Draft) -> list[float]:
        """Return for each token of ``draft`` the probability that it is right and all before it are."""
        first, following = self._kinds.shares[draft.kind]
        survival = self._shares[0].probability(first)
        step = self._shares[1].probability(following)
        found = []
        for _ in draft.tokens:
            found.append(survival)
            survival *= step
        return found

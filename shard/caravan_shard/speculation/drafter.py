"""Proposes the next tokens of one sequence, out of a prediction, its own text, or texts of ended sequences."""

from collections import OrderedDict
from collections.abc import Sequence

from caravan_shard.media import NO_TOKEN
from caravan_shard.speculation.acceptance import Draft, DraftKind, KindAcceptance, SequenceAcceptance
from caravan_shard.speculation.token_text import TokenText, as_bytes

# The more of the last tokens occurred before, the likelier the same tokens follow again.
_KINDS = (DraftKind.CONTEXT_3, DraftKind.CONTEXT_5, DraftKind.CONTEXT_8, DraftKind.CONTEXT_16)

# After this many output tokens in a row that the prediction lacks, it proposes nothing until it has them again.
_MOST_MISSES = 3
# Numbers of last tokens by which the output is found again in the prediction, the largest first.
_TAILS = (4, 3, 2)

# Most tokens of all pools together, and of each: one that is much used leaves room for others.
_MOST_TOKENS = 64 * 1024
_MOST_OF_POOL = 16 * 1024
# Number of last prompt tokens that are kept in front of an output, so that the same prompt finds it.
_PROMPT_TOKENS = 32
_POOL_KINDS = (DraftKind.POOL_16, DraftKind.POOL_8)
# Stands behind each text, and is no token.
_END = -1


class Context:
    """The prompt and the output of one sequence, to be searched."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = TokenText()

    def propose(self, tokens: Sequence[int], most: int) -> Draft | None:
        """Return ``most`` tokens that may follow ``tokens``, or none.

        ``tokens`` must begin with those of the last call. They are taken from behind the last occurrence of the longest
        possible tail. One that is close to the end repeats itself.
        """
        text = self._text
        text.extend(tokens[len(text) :])
        found = kind = None
        stop = len(text) - 1
        for longer in _KINDS:
            end = text.last_end(text.tail(longer.matched), stop) if longer.matched <= stop else None
            if end is None:
                break
            # A longer tail cannot end later than the shorter one that is a part of it.
            found = stop = end
            kind = longer
        if found is None or kind is None:
            return None
        proposed = text.tokens(found, found + most)
        period = len(text) - found
        while len(proposed) < most:
            proposed.append(proposed[-period])
        if NO_TOKEN in proposed:
            # A medium is no draft.
            del proposed[proposed.index(NO_TOKEN) :]
            if not proposed:
                return None
        return Draft(proposed, kind)


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


class EndedTexts:
    """The newest texts of each pool. A pool is a name that the router gives to requests that may see each other's."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        # The pool of the newest text is the last one.
        self._pools: OrderedDict[bytes, TokenText] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of tokens that are kept."""
        return sum(map(len, self._pools.values()))

    def keep(self, pool: bytes, tokens: Sequence[int], output_start: int) -> None:
        """Keep the output of an ended sequence, which begins at ``output_start`` of ``tokens``."""
        if len(tokens) <= output_start:
            return
        text = tokens[max(0, output_start - _PROMPT_TOKENS, len(tokens) - _MOST_OF_POOL + 1) :]
        kept = self._pools.setdefault(pool, TokenText())
        self._pools.move_to_end(pool)
        if kept.last_end(as_bytes(text), len(kept)) is not None:
            return
        kept.extend([*text, _END])
        kept.forget_first(len(kept) - _MOST_OF_POOL)
        while len(self) > _MOST_TOKENS:
            self._pools.popitem(last=False)

    def propose(self, pool: bytes, tokens: Sequence[int], most: int, matched: int) -> Draft | None:
        """Return up to ``most`` tokens that followed more than ``matched`` of the last ``tokens`` in a kept text."""
        kept = self._pools.get(pool)
        if kept is None:
            return None
        for kind in _POOL_KINDS:
            if matched < kind.matched <= len(tokens):
                end = kept.last_end(as_bytes(tokens[-kind.matched :]), len(kept) - 1)
                if end is not None:
                    proposed = kept.tokens(end, end + most)
                    if _END in proposed:
                        del proposed[proposed.index(_END) :]
                    return Draft(proposed, kind) if proposed else None
        return None


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

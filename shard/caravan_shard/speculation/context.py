"""Finds what followed the last tokens of a sequence when they occurred in it before."""

from collections.abc import Sequence

from caravan_shard.media.encoder import NO_TOKEN
from caravan_shard.speculation.draft import Draft, DraftKind
from caravan_shard.speculation.token_text import TokenText

# The more of the last tokens occurred before, the likelier the same tokens follow again.
_KINDS = (DraftKind.CONTEXT_3, DraftKind.CONTEXT_5, DraftKind.CONTEXT_8, DraftKind.CONTEXT_16)


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

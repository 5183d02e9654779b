"""Finds what followed the last tokens of a sequence when they occurred in it before."""

from collections.abc import Sequence

from caravan_shard.speculation.token_text import TokenText

# How many last tokens are searched for. With more of them, what follows is likelier to follow again.
_TAILS = (3, 5, 8, 16)


class Context:
    """The prompt and the output of one sequence, to be searched."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = TokenText()

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return ``most`` tokens that may follow ``tokens``, or none.

        ``tokens`` must begin with those of the last call. They are taken from behind the last occurrence of the longest
        possible tail. One that is close to the end repeats itself.
        """
        text = self._text
        text.extend(tokens[len(text) :])
        found = None
        stop = len(text) - 1
        for count in _TAILS:
            end = text.last_end(text.tail(count), stop) if count <= stop else None
            if end is None:
                break
            # A longer tail cannot end later than the shorter one that is a part of it.
            found = stop = end
        if found is None:
            return []
        proposed = text.tokens(found, found + most)
        period = len(text) - found
        while len(proposed) < most:
            proposed.append(proposed[-period])
        return proposed

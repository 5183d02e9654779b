"""Keeps texts of ended sequences, since other sequences of their pool may repeat them."""

from collections import OrderedDict
from collections.abc import Sequence

from caravan_shard.speculation.draft import Draft, DraftKind
from caravan_shard.speculation.token_text import TokenText, as_bytes

# Most tokens of all pools together, and of each: one that is much used leaves room for others.
_MOST_TOKENS = 64 * 1024
_MOST_OF_POOL = 16 * 1024
# Number of last prompt tokens that are kept in front of an output, so that the same prompt finds it.
_PROMPT_TOKENS = 32
_KINDS = (DraftKind.POOL_16, DraftKind.POOL_8)
# Stands behind each text, and is no token.
_END = -1


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
        for kind in _KINDS:
            if matched < kind.matched <= len(tokens):
                end = kept.last_end(as_bytes(tokens[-kind.matched :]), len(kept) - 1)
                if end is not None:
                    proposed = kept.tokens(end, end + most)
                    if _END in proposed:
                        del proposed[proposed.index(_END) :]
                    return Draft(proposed, kind) if proposed else None
        return None

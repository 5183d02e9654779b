"""Names of prefixes: hashes that stand for all tokens before a position, and for what else decides their KV cells."""

import hashlib
from array import array
from collections.abc import Callable, Sequence

from caravan_scheduler.core.prompt_media import CELL_NUMBER_BYTES

# Saved runs can be cut at multiples of this many tokens, and at their end.
BLOCK_TOKENS = 16
_KEY_BYTES = 16
# Keeps blocks with cells of media apart from all blocks of text.
_MEDIA = b"media"


def _hash(before: bytes, tokens: Sequence[int]) -> bytes:
    try:
        return hashlib.blake2b(before + array("i", tokens).tobytes(), digest_size=_KEY_BYTES).digest()
    except OverflowError:  # there are cells of media among them
        numbers = b"".join(token.to_bytes(CELL_NUMBER_BYTES, "little") for token in tokens)
        return hashlib.blake2b(before + numbers, digest_size=_KEY_BYTES, person=_MEDIA).digest()


class PrefixKeys:
    """The keys of the prefixes of one sequence. The key of a prefix is a hash of the last block's key and the rest.

    Two sequences have the same key of a length if, and practically only if, they have the same namespace and the same
    tokens before it. The keys are the same in every process, so that runs on disk can be found after a restart.
    """

    def __init__(self, namespace: str, tokens: Callable[[int, int], Sequence[int]]) -> None:
        """``tokens``: returns the known tokens of positions [start, stop), which never change."""
        self._tokens = tokens
        # The keys at multiples of BLOCK_TOKENS.
        self._blocks = [hashlib.blake2b(namespace.encode(), digest_size=_KEY_BYTES).digest()]

    def at(self, length: int) -> bytes:
        """Return the key of the first ``length`` tokens, which must be known."""
        whole, rest = divmod(length, BLOCK_TOKENS)
        known = len(self._blocks) - 1
        if whole > known:
            start = known * BLOCK_TOKENS
            tokens = self._tokens(start, whole * BLOCK_TOKENS)
            for at in range(0, len(tokens), BLOCK_TOKENS):
                self._blocks.append(_hash(self._blocks[-1], tokens[at : at + BLOCK_TOKENS]))
        if rest == 0:
            return self._blocks[whole]
        return _hash(self._blocks[whole], self._tokens(length - rest, length))


def state_key(key: bytes) -> bytes:
    """Return the key of the recurrent state at the end of the prefix that ``key`` names."""
    return hashlib.blake2b(key + b"state", digest_size=_KEY_BYTES).digest()


def cuts_between(start: int, end: int) -> list[int]:
    """Return where a run of the cells [start, end) can be cut, ascending; the last is ``end``."""
    first = (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS
    return [*range(first, end, BLOCK_TOKENS), end]

"""Asks llguidance whether a grammar accepts a text, with a vocabulary of single bytes and control tokens."""

import re
from collections.abc import Sequence
from random import Random

import llguidance

_EOS = 256
FIRST_CONTROL = _EOS + 1
# Where no more bytes may follow, the grammar is not in free text.
_FEW = 64
# How often a text ends where it may.
_ENDS = 0.5
# Random letters are of these, so that what is drawn is UTF-8.
_LETTERS = frozenset(b" abcxyz019.,:;<>(){}[]|/=_-+'\"\\\n\t")


def accepts(grammar: str, text: str, controls: Sequence[str] = ()) -> bool:
    """Whether ``grammar`` accepts exactly ``text``, in which ``controls`` are tokens, from FIRST_CONTROL on."""
    matcher = _matcher(grammar, controls)
    pieces = re.split(f"({'|'.join(map(re.escape, controls))})", text) if controls else [text]
    data = [
        token
        for piece in pieces
        for token in ([FIRST_CONTROL + controls.index(piece)] if piece in controls else piece.encode())
    ]
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def compiles(grammar: str) -> bool:
    """Whether llguidance takes ``grammar``."""
    return not _matcher_of(grammar, ()).is_error()


def drawn(grammar: str, random: Random, most: int) -> str:
    """Return a random text that ``grammar`` accepts.

    After ``most`` bytes it ends what could go on for ever.
    """
    matcher = _matcher(grammar)
    data = bytearray()
    while not matcher.is_stopped():
        mask = matcher.compute_logit_bias()
        allowed = [byte for byte in range(_EOS) if mask[byte]]
        if mask[_EOS] and (not allowed or random.random() < _ENDS):
            break
        usual = [byte for byte in allowed if byte in _LETTERS] if len(allowed) > _FEW else allowed
        data.append(random.choice(usual) if len(data) < most else _last(usual, random))
        assert matcher.consume_token(data[-1])
        assert len(data) < 2 * most, bytes(data)
    return data.decode()


def _last(allowed: Sequence[int], random: Random) -> int:
    """Return the byte that brings a text to its end."""
    # The digits of some numbers must not all be the same.
    first = random.choice(allowed) if allowed[0] == ord("0") else allowed[0]
    # A backslash may follow within a string only.
    closing = b'"' if ord("\\") in allowed else b'}]"'
    return next((byte for byte in closing if byte in allowed), first)


def _matcher(grammar: str, controls: Sequence[str] = ()) -> llguidance.LLMatcher:
    matcher = _matcher_of(grammar, controls)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def _matcher_of(grammar: str, controls: Sequence[str]) -> llguidance.LLMatcher:
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(control.encode() for control in controls)]
    wrapper = llguidance.TokenizerWrapper(_Bytes(tokens))
    return llguidance.LLMatcher(llguidance.LLTokenizer(wrapper), grammar)


class _Bytes:
    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = _EOS
        self.bos_token_id = None
        self.special_token_ids = [*range(_EOS, len(tokens))]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

"""Asks llguidance whether a grammar accepts a text, with a vocabulary of single bytes."""

import llguidance


def accepts(grammar: str, text: str) -> bool:
    """Whether ``grammar`` accepts exactly ``text``, with a vocabulary of single bytes."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
    wrapper = llguidance.TokenizerWrapper(_Bytes(tokens))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(wrapper), grammar)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


class _Bytes:
    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

"""llguidance's view of a vocabulary."""

from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

from caravan_shard.backends.base import ModelFacts, Vocabulary

# What llguidance marks tokens with that are no text. No UTF-8 has this byte.
_SPECIAL_MARK = b"\xff"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of each token, special ones marked; plain types, so that it can be sent to another process."""

    tokens: list[bytes]
    eog_ids: list[int]  # at least one


def make_token_table(vocabulary: Vocabulary, facts: ModelFacts) -> TokenTable:
    """Takes half a second with 260,000 tokens. A token is matched as the very bytes that clients get for it."""
    tokens = [_SPECIAL_MARK + piece.data if piece.special else piece.data for piece in vocabulary.pieces()]
    return TokenTable(tokens, sorted(facts.eog_ids))


def make_tokenizer(table: TokenTable) -> LLTokenizer:
    """Takes a second with 260,000 tokens, and the GIL all the while."""
    return LLTokenizer(TokenizerWrapper(_Tokens(table)), eos_token=table.eog_ids)


class _Tokens:
    """What TokenizerWrapper takes."""

    def __init__(self, table: TokenTable) -> None:
        self.tokens = table.tokens
        self.eos_token_id = table.eog_ids[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Only for tokens that llguidance would force, which `grammar_text` rules out."""
        raise NotImplementedError

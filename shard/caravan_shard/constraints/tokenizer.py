"""Gives llguidance the vocabulary."""

from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

from caravan_proto.messages.model import ModelFile
from caravan_shard.backends.base import Vocabulary

# llguidance's mark of tokens that are not text. The byte never occurs in UTF-8.
_SPECIAL_MARK = b"\xff"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of each token, special tokens marked. Plain types, so that it can be sent to another process."""

    tokens: list[bytes]
    eog_ids: list[int]  # at least one

    @classmethod
    def of(cls, vocabulary: Vocabulary, facts: ModelFile) -> "TokenTable":
        """Make the table, which takes half a second for 260,000 tokens.

        A token matches as exactly the bytes that clients get for it.
        """
        tokens = [_SPECIAL_MARK + piece.data if piece.special else piece.data for piece in vocabulary.pieces()]
        return cls(tokens, sorted(facts.eos_token_ids))


@dataclass(frozen=True, slots=True)
class ConstraintTokenizer:
    """What constraints need of a vocabulary."""

    table: TokenTable
    matching: LLTokenizer

    @classmethod
    def of(cls, vocabulary: Vocabulary, facts: ModelFile) -> "ConstraintTokenizer":
        """Make it, which takes a second and a half for 260,000 tokens, and holds the GIL for most of it."""
        table = TokenTable.of(vocabulary, facts)
        return cls(table, make_tokenizer(table))


def make_tokenizer(table: TokenTable) -> LLTokenizer:
    """Make llguidance's tokenizer. It holds the GIL for a second for 260,000 tokens."""
    return LLTokenizer(TokenizerWrapper(_Tokens(table)), eos_token=table.eog_ids)


class _Tokens:
    """The object that TokenizerWrapper reads."""

    def __init__(self, table: TokenTable) -> None:
        self.tokens = table.tokens
        self.eos_token_id = table.eog_ids[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Not called: llguidance tokenizes only text that it forces, and `grammar_text` turns forcing off."""
        raise NotImplementedError

"""Tokenizes and detokenizes on a few threads of its own, so that calls are answered while a step runs."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from caravan_proto.errors import ShardError
from caravan_proto.messages.model import TokenizedText
from caravan_shard.backends.base import Vocabulary
from caravan_shard.checks.tokens import check_ids
from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.service.model_calls import ModelCalls

_THREADS = 2

T = TypeVar("T")
R = TypeVar("R")


class TextService:
    """Tokenizes texts of at most ``max_bytes``, off the event loop."""

    def __init__(self, vocabulary: Vocabulary, vocabulary_size: int, max_bytes: int, calls: ModelCalls) -> None:
        self._vocabulary = vocabulary
        self._vocabulary_size = vocabulary_size
        self._max_bytes = max_bytes
        self._calls = calls
        self._pool = ThreadPoolExecutor(_THREADS, "text")

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenizedText | Refusal:
        """Return the tokens of ``text``."""
        if (refusal := self._too_long([text])) is not None:
            return refusal

        def tokenize(text: str) -> TokenizedText:
            return self._with_pieces(
                self._vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)
            )

        return await self.run(tokenize, text)

    async def tokenize_pairs(self, queries: Sequence[str], documents: Sequence[str]) -> list[list[int]] | Refusal:
        """Return the token ids of each pair as a model that ranks reads it. The limit holds for all together."""
        if len(queries) != len(documents):
            return bad_request(
                f"there must be a document for each of the {len(queries)} texts. Given: {len(documents)}"
            )
        if (refusal := self._too_long([*queries, *documents])) is not None:
            return refusal
        return await self.run(
            lambda pairs: [self._vocabulary.pair(*pair) for pair in pairs], [*zip(queries, documents, strict=True)]
        )

    async def tokenize_texts(
        self, texts: Sequence[str], *, add_special: bool, parse_special: bool
    ) -> list[list[int]] | Refusal:
        """Return the token ids of each text. The limit holds for all together."""

        def tokenize(text: str) -> list[int]:
            return self._vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

        if (refusal := self._too_long(texts)) is not None:
            return refusal
        return await self.run(lambda every: [*map(tokenize, every)], texts)

    def _too_long(self, texts: Sequence[str]) -> Refusal | None:
        # A character takes at least a byte, so a text of too many characters need not be encoded.
        size = sum(map(len, texts))
        if size <= self._max_bytes:
            size = sum(len(text.encode()) for text in texts)
        if size <= self._max_bytes:
            return None
        return Refusal(ShardError.TEXT_TOO_LONG, f"text must have <= {self._max_bytes} bytes. Given: {size}")

    def _with_pieces(self, token_ids: Sequence[int]) -> TokenizedText:
        pieces = [self._vocabulary.piece(token) for token in token_ids]
        return TokenizedText(
            tuple(token_ids), tuple(piece.data for piece in pieces), tuple(piece.special for piece in pieces)
        )

    async def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> TokenizedText | Refusal:
        """Return the tokens with their pieces; with ``skip_special`` without control tokens.

        There may be as many as a text may have bytes.
        """
        if len(token_ids) > self._max_bytes:
            return Refusal(
                ShardError.TEXT_TOO_LONG, f"there must be <= {self._max_bytes} tokens. Given: {len(token_ids)}"
            )
        if (refusal := check_ids("token ids", token_ids, self._vocabulary_size)) is not None:
            return refusal

        def detokenize(shown: Sequence[int]) -> TokenizedText:
            if skip_special:
                shown = [token for token in shown if not self._vocabulary.piece(token).special]
            return self._with_pieces(shown)

        return await self.run(detokenize, token_ids)

    async def run(self, work: Callable[[T], R], given: T) -> R | Refusal:
        """Return what ``work`` returns, which may use the model, on one of the threads."""
        return await self._calls.run(self._pool, work, given)

    def close(self) -> None:
        """End the threads, after what runs on them. The model's users are waited for before it is freed."""
        self._pool.shutdown(wait=False)

"""Reuses the tokens of earlier turns, so that what a model generated is never tokenized again.

A tokenizer may split a text otherwise than the model generated it. The tokens of the next prompt would then differ from
those in the cache, from the first such place on.
"""

from dataclasses import dataclass

from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.engine import TextEngine
from caravan_scheduler.core.prompt_media import is_cell, text_ids
from caravan_scheduler.core.tokens import common_length


async def with_exact_tokens(engine: TextEngine, exact: tuple[int, ...], rendered: TokenizedText) -> tuple[int, ...]:
    """Return the tokens of ``rendered`` with those of ``exact`` in their place, as far as both stand for the same text.

    ``exact`` may be any ids, also a client's: control tokens, and cells of media, count as the same only where
    ``rendered`` has them too. Raises NoShardError.
    """
    same = common_length(exact, rendered.token_ids)
    # The rest of `exact` may be another text, of any length.
    rest = exact[same : same + 2 * (len(rendered.token_ids) - same)]
    size = engine.model.vocabulary_size
    if not rest or not all(0 <= token_id < size or is_cell(token_id) for token_id in rest):
        return rendered.token_ids
    earlier = _Reader(await _detokenized(engine, rest), 0)
    later = _Reader(rendered, same)
    while earlier.more and later.more:
        if not earlier.read_like(later):
            break
    return (*exact[:same], *rest[: earlier.agreed], *rendered.token_ids[later.agreed :])


async def _detokenized(engine: TextEngine, token_ids: tuple[int, ...]) -> TokenizedText:
    """Return the pieces of ``token_ids``; cells of media have none, and count as control tokens."""
    text = tuple(text_ids(token_ids))
    found = await engine.queries.detokenize(text)
    if len(text) == len(token_ids):
        return found
    tokens = zip(found.pieces, found.specials, strict=True)
    columns = [(b"", True) if is_cell(token_id) else next(tokens) for token_id in token_ids]
    return TokenizedText(token_ids, tuple(piece for piece, _ in columns), tuple(special for _, special in columns))


@dataclass(slots=True)
class _Reader:
    """Reads tokens of a text. The first ``agreed`` tokens stand for the same text as those of another reader."""

    text: TokenizedText
    agreed: int

    @property
    def more(self) -> bool:
        return self.agreed < len(self.text.token_ids)

    def read_like(self, other: "_Reader") -> bool:
        """Read the next tokens of both up to a place where tokens of both end; return False if the texts differ."""
        own, others = self.agreed, other.agreed
        if self.text.specials[own] or other.text.specials[others]:
            if self.text.token_ids[own] != other.text.token_ids[others]:
                return False
            self.agreed, other.agreed = own + 1, others + 1
            return True
        mine, theirs = self.text.pieces[own], other.text.pieces[others]
        own, others = own + 1, others + 1
        while mine != theirs:
            if theirs.startswith(mine) and own < len(self.text.pieces) and not self.text.specials[own]:
                mine, theirs = self.text.pieces[own], theirs[len(mine) :]
                own += 1
            elif mine.startswith(theirs) and others < len(other.text.pieces) and not other.text.specials[others]:
                mine, theirs = mine[len(theirs) :], other.text.pieces[others]
                others += 1
            else:
                return False
        self.agreed, other.agreed = own, others
        return True

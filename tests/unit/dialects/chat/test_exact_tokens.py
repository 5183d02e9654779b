"""Tokens of earlier turns are reused exactly as far as they stand for the rendered text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from caravan_dialects.chat.prompt import with_exact_tokens
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER
from caravan_testing.scripted_engine import ScriptedEngine

CONTROL = 500
# A text of letters and control tokens, which "C" stands for.
TEXTS = st.text("abC", max_size=12)


@dataclass
class Vocabulary(ScriptedEngine):
    """Every piece of letters that was used has an id. Control tokens have an id of their own, and the text "C", too."""

    pieces: list[bytes] = field(default_factory=list)

    def id_of(self, piece: bytes) -> int:
        if piece not in self.pieces:
            self.pieces.append(piece)
        return self.pieces.index(piece)

    async def detokenize(self, token_ids: Sequence[int]) -> TokenizedText:
        return TokenizedText(
            tuple(token_ids),
            tuple(b"C" if token == CONTROL else self.pieces[token] for token in token_ids),
            tuple(token == CONTROL for token in token_ids),
        )


def split(vocabulary: Vocabulary, text: str, cuts: Sequence[bool], *, controls: bool) -> tuple[int, ...]:
    """Tokenize ``text``, with a boundary where ``cuts`` says. ``controls``: whether "C" is a control token."""
    ids, piece = [], ""
    for at, letter in enumerate(text):
        special = controls and letter == "C"
        if piece and (special or cuts[at]):
            ids.append(vocabulary.id_of(piece.encode()))
            piece = ""
        if special:
            ids.append(CONTROL)
        else:
            piece += letter
    return (*ids, vocabulary.id_of(piece.encode())) if piece else tuple(ids)


def places(text: TokenizedText) -> list[tuple[int, bool]]:
    """Return each byte of a text, and whether it is part of a control token."""
    return [(byte, special) for piece, special in zip(text.pieces, text.specials, strict=True) for byte in piece]


CUTS = st.lists(st.booleans(), min_size=24, max_size=24)


@given(TEXTS, TEXTS, TEXTS, CUTS, CUTS, st.booleans(), st.booleans())
async def test_the_result_stands_for_the_rendered_text(
    common: str, old: str, new: str, old_cuts: list[bool], new_cuts: list[bool], old_controls: bool, new_controls: bool
) -> None:
    vocabulary = Vocabulary()
    exact = split(vocabulary, common + old, old_cuts, controls=old_controls)
    rendered = await vocabulary.detokenize(split(vocabulary, common + new, new_cuts, controls=new_controls))
    result = await with_exact_tokens(vocabulary, exact, rendered)
    assert places(await vocabulary.detokenize(result)) == places(rendered)


@given(TEXTS, TEXTS, CUTS, CUTS)
async def test_all_that_agrees_is_reused(old: str, new: str, old_cuts: list[bool], new_cuts: list[bool]) -> None:
    """A control token ends each turn, so that both have a boundary there."""
    vocabulary = Vocabulary()
    exact = (*split(vocabulary, old, old_cuts, controls=True), CONTROL)
    rendered = await vocabulary.detokenize(
        (*split(vocabulary, old, new_cuts, controls=True), CONTROL, *split(vocabulary, new, new_cuts, controls=True))
    )
    assert (await with_exact_tokens(vocabulary, exact, rendered))[: len(exact)] == exact


async def test_ids_beyond_the_vocabulary_are_not_looked_up() -> None:
    rendered = TokenizedText((1, 2), (b"a", b"b"), (False, False))
    for exact in ((1, 10**9), (-1,), ()):
        assert await with_exact_tokens(Vocabulary(), exact, rendered) == (1, 2)


async def test_cells_of_media_count_as_the_same_where_both_have_them() -> None:
    vocabulary = Vocabulary()
    ab, a, b = (vocabulary.id_of(piece) for piece in (b"ab", b"a", b"b"))
    cell = FIRST_CELL_NUMBER + 7
    rendered = TokenizedText((ab, cell, ab), (b"ab", b"", b"ab"), (False, True, False))
    assert await with_exact_tokens(vocabulary, (a, b, cell, a, b), rendered) == (a, b, cell, a, b)
    assert await with_exact_tokens(vocabulary, (a, b, cell + 1, a, b), rendered) == (a, b, cell, ab)
    assert await with_exact_tokens(vocabulary, (a, b, a, b), rendered) == (a, b, cell, ab)

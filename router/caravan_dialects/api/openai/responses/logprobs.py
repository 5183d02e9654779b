"""Log probabilities of the tokens of a message."""

from collections.abc import Sequence

import msgspec

from caravan_dialects.api.openai.chat.logprobs import token_logprob
from caravan_dialects.api.openai.chat.output import Part
from caravan_dialects.chat.tool_parser import TextPart
from caravan_dialects.conversations.nodes import Json
from caravan_dialects.text.assembler import Piece


class MessageTokens:
    """Finds the tokens that a text of the answer was made of, among all tokens of an output.

    Readers hold text back that may become the mark of a thought or of a call, so that a text may come with a later
    token than its own, and tokens that were such marks belong to no text.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def of(self, pieces: Sequence[Piece], parts: Sequence[Part]) -> list[Json]:
        """Return an entry for each token of the texts in ``parts``, which ``pieces`` have completed.

        Control tokens, such as the end, are part of no text.
        """
        self._pieces += [piece for piece in pieces if not piece.token.special]
        if not parts:
            return []
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        taken = self._last(text) if text else []
        self._pieces.clear()
        return [msgspec.to_builtins(token_logprob(piece)) for piece in taken]

    def _last(self, text: str) -> list[Piece]:
        """Return the last tokens that have ``text``, with those before them that have parts of its characters only."""
        start, covered = len(self._pieces), 0
        while start and (covered < len(text) or not self._pieces[start - 1].text):
            start -= 1
            covered += len(self._pieces[start].text)
        return self._pieces[start:]

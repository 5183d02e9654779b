"""Keeps a client from writing control tokens: ``<|im_start|>`` in a message is text and begins no turn.

A control token's text inside what a client wrote gets a mark after its first character before the template sees it. The
prompt is cut at the marks and its parts are tokenized apart, so that no tokenizer ever sees the text whole; all else is
tokenized as it would be without this.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from caravan_router.core.engine import Engine

# In every vocabulary known, control tokens stand in angle or square brackets: other texts need not be looked at.
_BRACKETS = ("<", "[")


@dataclass(frozen=True, slots=True)
class Marks:
    """``control_texts``: what is broken up, the longest first. ``mark``: drawn anew for each request."""

    mark: str
    control_texts: tuple[str, ...]

    def broken_up(self, value: Any) -> Any:
        """``value``, JSON as Python has it, with a mark in every control token's text."""
        if not self.control_texts:
            return value
        match value:
            case str():
                for text in self.control_texts:
                    value = value.replace(text, text[0] + self.mark + text[1:])
                return value
            case list():
                return [self.broken_up(item) for item in value]
            case dict():
                return {self.broken_up(key): self.broken_up(item) for key, item in value.items()}
            case _:
                return value

    def parts(self, text: str) -> list[str]:
        """What to tokenize apart; joined, ``text`` without marks."""
        return text.split(self.mark) if self.control_texts else [text]


def draw_mark() -> str:
    """Noncharacters, which no text should have, around what no client can guess."""
    return f"\ufdd0{secrets.token_hex(8)}\ufdd1"


def strings_of(value: Any) -> Iterator[str]:
    """Every string in JSON as Python has it, keys included."""
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from strings_of(item)
        case dict():
            for key, item in value.items():
                yield from strings_of(key)
                yield from strings_of(item)
        case _:
            pass


async def marks_for(engine: Engine, texts: Sequence[str]) -> Marks:
    """Marks for the control tokens that a tokenizer sees in ``texts``. Raises NoShardError, TextTooLongError."""
    suspects = [text for text in texts if any(bracket in text for bracket in _BRACKETS)]
    if not suspects:
        return Marks("", ())
    seen = await engine.queries.tokenize("\n".join(suspects), add_special=False)
    found = {
        piece.decode("utf-8", "replace")
        for piece, special in zip(seen.pieces, seen.specials, strict=True)
        if special and len(piece) > 1
    }
    return Marks(draw_mark(), tuple(sorted(found, key=len, reverse=True)))

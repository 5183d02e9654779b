"""Keeps clients from writing control tokens: ``<|im_start|>`` in a message stays text and begins no turn.

Where a client's text contains the text of a control token, a mark is put after its first character before the template
is rendered. The prompt is then split at the marks and its parts are tokenized separately, so that the tokenizer never
sees such a text as a whole. All other text is tokenized as usual.

Marks also stand in messages for pictures and sounds. A template sees a mark as text, wherever it shows that text. What
a model has around a picture is added when the prompt is tokenized, and not by the template.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caravan_dialects.chat.template_messages import TemplateError
from caravan_scheduler.core.engine import TextEngine
from caravan_scheduler.core.media import Media, MediaPrompt

# In every known vocabulary, control tokens are in angle or square brackets: texts without brackets need no check.
_BRACKETS = ("<", "[")


@dataclass(frozen=True, slots=True)
class Marks:
    """A ``mark``, random for each request, and the ``control_texts`` to put it into, the longest first."""

    mark: str
    control_texts: tuple[str, ...]

    def put_into(self, value: Any) -> Any:
        """Return ``value``, decoded JSON, with a mark inside every control text."""
        match value:
            case str():
                for text in self.control_texts:
                    value = value.replace(text, text[0] + self.mark + text[1:])
                return value
            case list():
                return [self.put_into(item) for item in value]
            case dict():
                return {self.put_into(key): self.put_into(item) for key, item in value.items()}
            case _:
                return value

    def split(self, text: str) -> list[str]:
        """Split ``text`` at the marks. The parts are to be tokenized separately; joined, they are the unmarked text."""
        return text.split(self.mark)


def draw_mark() -> str:
    """Return a random mark that no client can guess, between Unicode noncharacters, which no text should contain."""
    return f"\ufdd0{secrets.token_hex(8)}\ufdd1"


def strings_of(value: Any) -> Iterator[str]:
    """Yield every string in decoded JSON, keys included."""
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


async def marks_for(engine: TextEngine, texts: Sequence[str]) -> Marks:
    """Return marks for the control tokens that the tokenizer sees in ``texts``.

    Raises NoShardError, TextTooLongError.
    """
    suspects = [text for text in texts if any(bracket in text for bracket in _BRACKETS)]
    if not suspects:
        return Marks(draw_mark(), ())
    seen = await engine.queries.tokenize("\n".join(suspects), add_special=False)
    found = {
        piece.decode("utf-8", "replace")
        for piece, special in zip(seen.pieces, seen.specials, strict=True)
        if special and len(piece) > 1
    }
    return Marks(draw_mark(), tuple(sorted(found, key=len, reverse=True)))


def with_media(texts: Sequence[str], media: Mapping[str, Media]) -> MediaPrompt:
    """Return ``texts`` with the ``media`` in the places of their marks. The first part is a text, which may be empty.

    Raises TemplateError if a mark is missing.
    """
    known = _pattern(media)
    pieces = [piece for text in texts for piece in known.split(text)]
    shown = set(pieces)
    if missing := sum(mark not in shown for mark in media):
        raise TemplateError(f"it does not show {missing} of the {len(media)} images and audio files of the messages")
    first, *rest = pieces
    return (first, *(media.get(piece, piece) for piece in rest if piece))


def without_marks(text: str, marks: Iterable[str]) -> str:
    """Return ``text`` without ``marks``."""
    for mark in marks:
        text = text.replace(mark, "")
    return text


def _pattern(marks: Iterable[str]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, marks))})")

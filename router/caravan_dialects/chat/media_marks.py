"""Finds in a rendered prompt the places of pictures and sounds, for which marks stand in the messages.

A template sees a mark as text, wherever it shows that text. What a model has around a picture is added when the prompt
is tokenized, and not by the template.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from caravan_dialects.chat.template_errors import TemplateError
from caravan_scheduler.core.media import Media, MediaPrompt


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

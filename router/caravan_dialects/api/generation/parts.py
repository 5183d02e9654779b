"""What the model reads of a part of a message that is not text. Every dialect asks here, and nowhere else.

A picture or a sound is read if the model sees or hears. In the message it is a mark, which no client can guess, so that
a message stays a text, whatever is done to it; the rendered prompt is split at the marks. Files are not read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from caravan_dialects.api.generation.rules import data_url_error, not_text_error
from caravan_dialects.chat.control_text import draw_mark, without_marks
from caravan_dialects.media.file import MediaFile
from caravan_proto.messages.media import MediaFacts

_SCHEME, _CODING = "data:", ";base64"
# A URL may have millions of characters.
_SHOWN = 200
# The words of all dialects for pictures and sounds.
_PICTURES = frozenset({"image", "image_url", "input_image"})
_SOUNDS = frozenset({"input_audio"})
# And for what the result of a tool may have beside text, with what stands for it in the prompt.
_STAND_INS = {
    "image": "[image]",
    "image_url": "[image]",
    "input_image": "[image]",
    "input_audio": "[audio]",
    "document": "[document]",
    "input_file": "[file]",
}


def data_of(field: str, url: str) -> str:
    """Return the base64 of a data URL, whose media type is not looked at. Raises ValidationError."""
    head, comma, data = url.partition(",")
    if not comma or head[: len(_SCHEME)].lower() != _SCHEME or not head.lower().endswith(_CODING):
        raise data_url_error(field, url[:_SHOWN])
    return data


def text_for(field: str, kind: str, *, of_tool: bool = False) -> str:
    """Return the text that the model reads for a part that it does not read; ``kind`` is the client's word for it.

    ``of_tool``: it belongs to the result of a tool. Agents send results again with each turn, so refusing one would
    end the conversation; the model reads that there was something. Raises ValidationError otherwise.
    """
    if of_tool and kind in _STAND_INS:
        return _STAND_INS[kind]
    if kind in _PICTURES:
        raise not_text_error(field, kind, "the model does not read images")
    if kind in _SOUNDS:
        raise not_text_error(field, kind, "the model does not read audio")
    raise not_text_error(field, kind, "the model reads nothing else")


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file, and the field of the request that has it."""

    field: str
    file: MediaFile


class MediaParts:
    """The pictures and sounds of a request, which are not decoded yet, by their marks."""

    def __init__(self, facts: MediaFacts | None) -> None:
        """``facts``: what the model sees and hears; None if it does neither."""
        self._facts = facts
        self._files: dict[str, NamedFile] = {}

    @property
    def files(self) -> Mapping[str, NamedFile]:
        """The files, in the order in which they were read."""
        return self._files

    @property
    def sees(self) -> bool:
        """Whether the model sees pictures. If not, no picture may be added."""
        return self._facts is not None and self._facts.images

    @property
    def hears(self) -> bool:
        """Whether the model hears. If not, no sound may be added."""
        return self._facts is not None and self._facts.audio

    def picture(self, field: str, data: str | bytes) -> str:
        """Return the mark of a picture; ``data`` is its file, in base64 if it is a text."""
        assert self.sees
        return self._add(field, MediaFile(data))

    def picture_at(self, field: str, url: str) -> str:
        """Return the mark of the picture that a data URL has. Raises ValidationError."""
        return self.picture(field, data_of(field, url))

    def sound(self, field: str, data: str | bytes) -> str:
        """Return the mark of a sound; ``data`` is its file, in base64 if it is a text."""
        assert self._facts is not None
        assert self._facts.audio
        return self._add(field, MediaFile(data, self._facts.audio_sample_rate))

    def without_marks(self, text: str) -> str:
        """Return ``text`` as its client wrote it."""
        return without_marks(text, self._files)

    def joined(self, parts: Iterable[str]) -> str:
        """Join the parts of a message: a line break between two texts, as in llama-server and vLLM.

        Beside a picture or a sound there is none: templates write what they want there.
        """
        made = ""
        after_text = False
        for part in parts:
            is_text = part not in self._files
            made += "\n" + part if after_text and is_text and part else part
            after_text = is_text and bool(part or after_text)
        return made

    def _add(self, field: str, file: MediaFile) -> str:
        mark = draw_mark()
        self._files[mark] = NamedFile(field, file)
        return mark


# Of what can have text only.
NO_MEDIA = MediaParts(None)

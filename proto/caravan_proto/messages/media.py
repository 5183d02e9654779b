"""Pictures, sound and embeddings in prompts: what is said of them between router and shard."""

from dataclasses import dataclass
from enum import Enum


class MediaKind(Enum):
    """What a medium is."""

    IMAGE = "image"
    AUDIO = "audio"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaShape:
    """A medium without its content, for which ``media_id`` stands.

    An image has ``width`` and ``height`` in pixels, sound has ``samples``, embeddings have ``rows`` of ``row_size``
    values. ``kind``: None if it is one that the shard does not know.
    """

    media_id: bytes
    kind: MediaKind | None
    width: int = 0
    height: int = 0
    samples: int = 0
    rows: int = 0
    row_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpan:
    """Cells [first, first + count) of a slice of a medium, from ``offset`` on among the tokens of what has the span.

    ``positions``: how much later the next cell is for the model; ``count`` unless positions have several dimensions.
    """

    offset: int
    media_id: bytes
    slice_index: int = 0
    first: int = 0
    count: int
    positions: int

    @property
    def end(self) -> int:
        """The offset behind its last cell."""
        return self.offset + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFacts:
    """What a model sees and hears, and what a prompt may have of it.

    ``atomic``: a span is computed whole in one step, and no prefix ends within it. ``max_cells``: most cells of a span.
    ``fingerprint``: equal where the same medium has the same embeddings. ``audio_sample_rate``: samples of a second; 0
    if the model does not hear. ``max_bytes``: most bytes of the content of a medium. ``input_size``: values of a row
    that a prompt may have in place of a token; 0 if prompts have no such rows.
    """

    images: bool
    audio: bool
    atomic: bool
    max_cells: int
    fingerprint: bytes
    audio_sample_rate: int = 0
    max_bytes: int
    input_size: int = 0


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text of a prompt; the flags are those of Tokenize."""

    text: str
    add_special: bool = False
    parse_special: bool = False


PromptPart = TextPart | MediaShape


@dataclass(frozen=True, slots=True)
class TokenizedParts:
    """A prompt in columns, as `TokenizedText` has them. Cells under ``media`` have id 0, no bytes, and are special."""

    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...]
    specials: tuple[bool, ...]
    media: tuple[MediaSpan, ...]


@dataclass(frozen=True, slots=True)
class EncodedMedia:
    """The cells of each slice of a medium that a shard has encoded, and how long that took; 0 if it had been before."""

    cells: tuple[int, ...]
    seconds: float

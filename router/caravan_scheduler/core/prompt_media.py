"""The pictures and sounds of a prompt: which cells are theirs, and the numbers that stand for these cells.

A token of a prompt is a number, and a cell of a medium has one too: above all token ids, and made of the medium, its
encoder and the cell's place. So whatever compares tokens finds equal media as it finds equal texts. These numbers stay
in the router: a shard gets `MediaSpan`s, a client the ids of the text.
"""

import hashlib
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from caravan_proto.messages.media import MediaFacts, MediaSpan, TokenizedParts
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.media import Media

# The numbers of cells begin here: a token id has at most 32 bits.
FIRST_CELL_NUMBER = 1 << 32
# Narrower digests would let a client make a picture that is taken for another.
_DIGEST_BYTES = 12
CELL_NUMBER_BYTES = 16


def is_cell(token: int) -> bool:
    """Whether ``token`` is the number of a cell of a medium."""
    return token >= FIRST_CELL_NUMBER


def cell_numbers(span: MediaSpan, encoder: bytes) -> list[int]:
    """Return the numbers of the cells of ``span``, whose medium ``encoder`` encodes (its fingerprint)."""
    parts = (encoder, span.media_id, span.slice_index.to_bytes(4, "little"))
    before = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        before.update(len(part).to_bytes(4, "little") + part)
    numbers = []
    for place in range(span.first, span.first + span.count):
        digest = before.copy()
        digest.update(place.to_bytes(4, "little"))
        numbers.append(FIRST_CELL_NUMBER + int.from_bytes(digest.digest(), "little"))
    return numbers


def text_ids(tokens: Iterable[int]) -> list[int]:
    """Return ``tokens`` without the numbers of cells of media: what a client may see of them."""
    return [token for token in tokens if token < FIRST_CELL_NUMBER]


def token_array(tokens: Sequence[int]) -> Sequence[int]:
    """Return ``tokens`` in an array, which takes 4 bytes for each; empty if cells of media are among them."""
    try:
        return array("i", tokens)
    except OverflowError:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptMedia:
    """The media of one prompt. ``spans`` say which cells they have, in order, by their offsets in the prompt.

    ``contents``: the media by their ids. ``encoder``: fingerprint of the projector that the spans were counted for.
    ``atomic``: a span is computed whole in one step, and no prefix ends within it.
    """

    spans: tuple[MediaSpan, ...]
    contents: Mapping[bytes, Media]
    encoder: bytes
    atomic: bool = False

    @property
    def largest(self) -> int:
        """The most cells of a span."""
        return max(span.count for span in self.spans)

    def border(self, position: int) -> int:
        """Return the last place up to ``position`` where a chunk, or a prefix that is shared, may end."""
        if not self.atomic:
            return position
        span = self._span_at(position)
        return position if span is None else span.offset

    def border_behind(self, position: int) -> int:
        """Return the first place behind ``position`` where a chunk may end."""
        span = self._span_at(position + 1) if self.atomic else None
        return position + 1 if span is None else span.end

    def _span_at(self, position: int) -> MediaSpan | None:
        """Return the span that a cut at ``position`` would divide."""
        before = bisect_right(self.spans, position, key=lambda span: span.offset) - 1
        if before < 0:
            return None
        span = self.spans[before]
        return span if span.offset < position < span.end else None

    def behind(self, position: int) -> list[MediaSpan]:
        """Return the spans of which cells are at ``position`` or behind it."""
        return [span for span in self.spans if span.end > position]

    def second_behind(self, position: int) -> float:
        """Return where the second of the media behind ``position`` begins; infinite if there are no two."""
        first: bytes | None = None
        for span in self.behind(position):
            if first is not None and span.media_id != first:
                return span.offset
            first = span.media_id
        return math.inf

    def within(self, start: int, stop: int) -> tuple[MediaSpan, ...]:
        """Return what the cells [start, stop) have of the spans, with offsets from ``start``."""
        found = []
        for span in self.spans:
            first, end = max(span.offset, start), min(span.end, stop)
            if first < end:
                part = replace(span, offset=first - start)
                if end - first < span.count:
                    part = replace(
                        part, first=span.first + first - span.offset, count=end - first, positions=end - first
                    )
                found.append(part)
        return tuple(found)

    def located(self, tokens: Sequence[int]) -> "PromptMedia | None":
        """Return the media with their places in ``tokens``, other ones of the same media; None if it has none.

        Raises ValueError if ``tokens`` has part of a span, or of a medium that is not here.
        """
        numbers = {(own := cell_numbers(span, self.encoder))[0]: (own, span) for span in self.spans}
        spans: list[MediaSpan] = []
        at = 0
        while at < len(tokens):
            if not is_cell(tokens[at]):
                at += 1
                continue
            own, span = numbers.get(tokens[at], ([], None))
            if span is None or list(tokens[at : at + len(own)]) != own:
                raise ValueError(f"the prompt has part of a medium at {at}")
            spans.append(replace(span, offset=at))
            at += len(own)
        return replace(self, spans=tuple(spans)) if spans else None


def without_cells(tokens: tuple[int, ...], media: PromptMedia, start: int) -> tuple[int, ...]:
    """Return ``tokens``, which begin at ``start`` of a sequence, as they travel: with 0 for each cell of its media."""
    if start >= media.spans[-1].end:
        return tokens
    return tuple(0 if token >= FIRST_CELL_NUMBER else token for token in tokens)


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The tokens of a prompt, in which cells of ``media`` have numbers, no bytes, and count as control tokens.

    ``media``: None if the prompt has text only.
    """

    tokens: TokenizedText
    media: PromptMedia | None


def media_tokens_of(parts: TokenizedParts, media: Iterable[Media], facts: MediaFacts) -> MediaTokens:
    """Return the tokens of ``parts`` of a prompt that has ``media``, as a shard with ``facts`` has counted them."""
    token_ids = list(parts.token_ids)
    for span in parts.media:
        token_ids[span.offset : span.end] = cell_numbers(span, facts.fingerprint)
    found = PromptMedia(
        spans=parts.media,
        contents={medium.id: medium for medium in media},
        encoder=facts.fingerprint,
        atomic=facts.atomic,
    )
    tokens = TokenizedText(tuple(token_ids), parts.pieces, parts.specials)
    return MediaTokens(tokens, found if parts.media else None)

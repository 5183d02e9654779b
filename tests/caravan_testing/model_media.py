"""Pictures in prompts of the simulation: which tokens of a prompt they take, and what a shard gets of them."""

from collections.abc import Sequence

from caravan_proto.messages.commands import Chunk, LoadEntry, Row
from caravan_proto.messages.media import MediaSpan
from caravan_scheduler.core.media import Picture
from caravan_scheduler.core.prompt_media import PromptMedia, cell_numbers

ENCODER = b"encoder"
# The place of each number that has been made: its medium and the cell in it. And the last number of each medium.
_PLACES: dict[int, tuple[bytes, int]] = {}
_LAST: set[int] = set()


def picture(seed: int) -> Picture:
    """Return a picture of its own."""
    return Picture.of(2, 2, bytes([seed]) * 12)


def with_pictures(
    tokens: Sequence[int], places: Sequence[tuple[int, int, int]], *, atomic: bool = False
) -> tuple[tuple[int, ...], PromptMedia | None]:
    """Return ``tokens`` with pictures in place of some, and the media. ``places``: offset, cells and seed of each."""
    found = list(tokens)
    spans, contents = [], {}
    for offset, count, seed in sorted(places):
        shown = picture(seed)
        contents[shown.id] = shown
        span = MediaSpan(offset=offset, media_id=shown.id, count=count, positions=count)
        numbers = cell_numbers(span, ENCODER)
        _PLACES.update({number: (shown.id, place) for place, number in enumerate(numbers)})
        _LAST.add(numbers[-1])
        found[offset : offset + count] = numbers
        spans.append(span)
    if not spans:
        return tuple(found), None
    return tuple(found), PromptMedia(spans=tuple(spans), contents=contents, encoder=ENCODER, atomic=atomic)


def in_pictures(tokens: Sequence[int], cells: int, *, atomic: bool) -> tuple[tuple[int, ...], PromptMedia | None]:
    """Return ``tokens`` with a picture in place of each ``cells`` equal ones."""
    places, at = [], 0
    while at + cells <= len(tokens):
        if len(set(tokens[at : at + cells])) == 1:
            places.append((at, cells, tokens[at] + 10 * (at % 3)))
            at += cells
        else:
            at += 1
    return with_pictures(tokens, places, atomic=atomic)


def tokens_of(part: Chunk | Row | LoadEntry) -> list[int]:
    """Return the tokens that a shard gets with ``part``, with the numbers of cells of media in them."""
    found = list(part.token_ids)
    at = 0
    for span in part.media:
        assert at <= span.offset < span.end <= len(found), f"a span from {span.offset} to {span.end} of {len(found)}"
        assert found[span.offset : span.end] == [0] * span.count, "a token in place of a cell"
        numbers = cell_numbers(span, ENCODER)
        assert all(_PLACES[number] == (span.media_id, span.first + i) for i, number in enumerate(numbers))
        found[span.offset : span.end] = numbers
        at = span.end
    assert all(token < 1 << 32 for token in part.token_ids), "the number of a cell was sent to a shard"
    return found


def is_border(tokens: Sequence[int], length: int) -> bool:
    """Whether the first ``length`` of ``tokens`` end with no part of a picture."""
    if not 0 < length < len(tokens):
        return True
    last, following = _PLACES.get(tokens[length - 1]), _PLACES.get(tokens[length])
    return last is None or following != (last[0], last[1] + 1)


def is_whole(numbers: Sequence[int]) -> bool:
    """Whether these are the numbers of all cells of a medium, the first of which is among them."""
    return numbers[-1] in _LAST

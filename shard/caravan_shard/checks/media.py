"""Checks the spans of media in what a command computes or loads."""

from collections.abc import Iterator, Mapping, Sequence

from caravan_proto.errors import ShardError
from caravan_proto.limits import MAX_MEDIA_ID_BYTES
from caravan_proto.messages.media import MediaFacts, MediaSpan
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.media.spans import CellSpan, is_within
from caravan_shard.media.store import Slices
from caravan_shard.protocol.results import Refusal, bad_request

# What is here of the media that a command names.
FoundMedia = Mapping[bytes, Slices | None]


class MediaCheck:
    """Checks spans. ``found``: their embeddings, as far as these are here; None if they are not needed."""

    def __init__(self, facts: MediaFacts | None, found: FoundMedia | None = None) -> None:
        self._facts = facts
        self._found = found

    @first_refusal
    def __call__(self, media: Sequence[MediaSpan], token_ids: Sequence[int]) -> Iterator[Refusal | None]:
        """Check the spans among the tokens of a chunk, a row or an entry."""
        if not media:
            return
        if self._facts is None:
            yield bad_request("this model reads neither images nor audio")
            return
        end = 0
        for span in media:
            if not 0 < len(span.media_id) <= MAX_MEDIA_ID_BYTES:
                yield bad_request(f"a media_id has 1 to {MAX_MEDIA_ID_BYTES} bytes. Given: {len(span.media_id)}")
            if span.count < 1 or min(span.first, span.slice_index) < 0:
                yield bad_request("a span of media has at least one cell")
            if not end <= span.offset < span.end <= len(token_ids):
                yield bad_request(
                    f"spans of media must ascend, within {len(token_ids)} tokens. Given: {span.offset} to {span.end}"
                )
            if any(token_ids[span.offset : span.end]):
                yield bad_request(f"the tokens {span.offset} to {span.end} must be 0, as a medium is there")
            yield self._check_extent(span, self._facts)
            yield self._check_slice(span, self._facts)
            end = span.end

    def _check_extent(self, span: MediaSpan, facts: MediaFacts) -> Refusal | None:
        if facts.atomic and (span.first != 0 or not 1 <= span.positions <= span.count):
            return bad_request("a span of media is computed whole by this model")
        if not facts.atomic and span.positions != span.count:
            return bad_request(f"each cell has its own position. Given: {span.positions} for {span.count} cells")
        if span.count > facts.max_cells:
            return Refusal(
                ShardError.MEDIA_TOO_LARGE, f"a span of media has <= {facts.max_cells} cells. Given: {span.count}"
            )
        return None

    def _check_slice(self, span: MediaSpan, facts: MediaFacts) -> Refusal | None:
        """Check the span against what the medium was encoded to."""
        slices = None if self._found is None else self._found[span.media_id]
        if slices is None:
            return None
        if span.slice_index >= len(slices):
            return bad_request(f"the medium has {len(slices)} slices. Given: slice {span.slice_index}")
        size = slices[span.slice_index].size
        if span.first + span.count > size.cells:
            return bad_request(
                f"the slice has {size.cells} cells. Given: cells {span.first} to {span.first + span.count}"
            )
        if facts.atomic and (span.count, span.positions) != (size.cells, size.positions):
            return bad_request(
                f"the slice has {size.cells} cells and {size.positions} positions. "
                f"Given: {span.count} and {span.positions}"
            )
        return None


def check_border(spans: Sequence[CellSpan], cell: int) -> Refusal | None:
    """Check that what is kept, copied or saved does not end within one of ``spans``, which are never cut."""
    if is_within(spans, cell):
        return Refusal(ShardError.WRONG_POSITION, f"a medium is around {cell}, and this model cannot cut it")
    return None

"""Checks media: a medium before an encoder gets it, and the spans of media in what a command computes or loads."""

from collections.abc import Iterator, Mapping, Sequence

from caravan_proto.errors import ShardError
from caravan_proto.limits import MAX_MEDIA_ID_BYTES, MEDIA_SAMPLES, MEDIA_SIDES
from caravan_proto.messages.media import MediaFacts, MediaKind, MediaShape, MediaSpan
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.media import CellSpan, Slices, is_within
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


@first_refusal
def check_shape(shape: MediaShape, facts: MediaFacts | None) -> Iterator[Refusal | None]:
    """Check that the model takes a medium of this shape. An encoder may end the process at others."""
    if not 0 < len(shape.media_id) <= MAX_MEDIA_ID_BYTES:
        yield bad_request(f"a media_id has 1 to {MAX_MEDIA_ID_BYTES} bytes. Given: {len(shape.media_id)}")
    match shape.kind:
        case MediaKind.IMAGE:
            if facts is None or not facts.images:
                yield bad_request("this model does not read images")
            least, most = MEDIA_SIDES
            if not least <= min(shape.width, shape.height) <= max(shape.width, shape.height) <= most:
                yield Refusal(
                    ShardError.MEDIA_TOO_LARGE,
                    f"sides of an image have {least} to {most} pixels. Given: {shape.width} x {shape.height}",
                )
        case MediaKind.AUDIO:
            if facts is None or not facts.audio:
                yield bad_request("this model does not read audio")
            least, most = MEDIA_SAMPLES
            if not least <= shape.samples <= most:
                yield Refusal(
                    ShardError.MEDIA_TOO_LARGE, f"audio has {least} to {most} samples. Given: {shape.samples}"
                )
        case MediaKind.EMBEDDINGS:
            size = 0 if facts is None else facts.input_size
            if not size:
                yield bad_request("prompts have no embeddings here: start the shard with --enable-prompt-embeds")
            if shape.row_size != size:
                yield bad_request(f"embeddings have {size} values for each token. Given: {shape.row_size}")
            if shape.rows < 1:
                yield bad_request("embeddings have at least one row")
        case None:
            yield bad_request("a medium is an image, audio or embeddings")
    if facts is not None and content_bytes(shape) > facts.max_bytes:
        yield Refusal(
            ShardError.MEDIA_TOO_LARGE,
            f"a medium has <= {facts.max_bytes} bytes. Given: {content_bytes(shape)}",
        )


def content_bytes(shape: MediaShape) -> int:
    """Return how many bytes the content of a medium has."""
    match shape.kind:
        case MediaKind.IMAGE:
            return 3 * shape.width * shape.height
        case MediaKind.EMBEDDINGS:
            return 4 * shape.rows * shape.row_size
        case _:
            return 4 * shape.samples

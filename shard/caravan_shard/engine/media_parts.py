"""Gives the parts of a step the embeddings of their media."""

from collections.abc import Sequence

from caravan_proto.messages.commands import Chunk, Row
from caravan_proto.messages.media import MediaFacts
from caravan_shard.checks.media import FoundMedia
from caravan_shard.engine.step import Part
from caravan_shard.media.encoder import MediaRows
from caravan_shard.media.spans import held_spans, with_media
from caravan_shard.media.store import MediaStore

Chunks = Sequence[Chunk | Row]


def find_media(store: MediaStore, chunks: Chunks) -> FoundMedia:
    """Return the embeddings that a step needs, as far as they are here. They stay valid when they are forgotten."""
    return {span.media_id: store.find(span.media_id) for chunk in chunks for span in chunk.media}


def missing_media(media: FoundMedia) -> tuple[bytes, ...]:
    """Return the ids of the media that are not here."""
    return tuple(media_id for media_id, slices in media.items() if slices is None)


def parts_with_media(parts: Sequence[Part], chunks: Chunks, media: FoundMedia, facts: MediaFacts | None) -> list[Part]:
    """Return the parts of a step with the embeddings of their spans, all of which are here.

    The first parts are those of ``chunks``; others ride.
    """
    with_rows = [
        part._replace(
            tokens=with_media(chunk.token_ids, chunk.media),
            media=_rows(chunk, media),
            spans=held_spans(facts, chunk.media, chunk.start),
        )
        for part, chunk in zip(parts, chunks, strict=False)
    ]
    return [*with_rows, *parts[len(with_rows) :]]


def _rows(chunk: Chunk | Row, media: FoundMedia) -> list[MediaRows]:
    rows = []
    for span in chunk.media:
        slices = media[span.media_id]
        assert slices is not None, "a medium is missing"
        rows.append(MediaRows(span.offset, slices[span.slice_index], span.first, span.count))
    return rows

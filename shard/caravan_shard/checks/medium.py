"""Checks the shape and the content of a medium before an encoder gets it."""

from collections.abc import Iterator

from caravan_proto.errors import ShardError
from caravan_proto.limits import MAX_MEDIA_ID_BYTES, MEDIA_SAMPLES, MEDIA_SIDES
from caravan_proto.messages.media import MediaFacts, MediaKind, MediaShape
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.protocol.results import Refusal, bad_request


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
        case None:
            yield bad_request("a medium is an image or audio")
    if facts is not None and content_bytes(shape) > facts.max_bytes:
        yield Refusal(
            ShardError.MEDIA_TOO_LARGE,
            f"a medium has <= {facts.max_bytes} bytes. Given: {content_bytes(shape)}",
        )


def content_bytes(shape: MediaShape) -> int:
    """Return how many bytes the content of a medium has."""
    return 3 * shape.width * shape.height if shape.kind is MediaKind.IMAGE else 4 * shape.samples

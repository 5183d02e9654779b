"""What shards are told of media."""

from collections.abc import Sequence

from caravan_proto.messages.media import MediaKind, MediaShape, PromptPart, TextPart
from caravan_scheduler.core.media import Media, MediaPrompt, Picture


def shape_of(media: Media) -> MediaShape:
    """Return a medium without its content."""
    if isinstance(media, Picture):
        return MediaShape(media_id=media.id, kind=MediaKind.IMAGE, width=media.width, height=media.height)
    return MediaShape(media_id=media.id, kind=MediaKind.AUDIO, samples=media.count)


def content_of(media: Media) -> bytes:
    """Return the content of a medium."""
    return media.rgb if isinstance(media, Picture) else media.samples


def parts_of(prompt: MediaPrompt, *, add_special: bool, parse_special: bool) -> Sequence[PromptPart]:
    """Return the parts of ``prompt`` without contents. ``add_special``: begin it as the model wants it to begin."""
    parts: list[PromptPart] = []
    if add_special and not isinstance(prompt[0], str):
        parts.append(TextPart("", add_special=True))
    for part in prompt:
        if isinstance(part, str):
            parts.append(TextPart(part, add_special=add_special and not parts, parse_special=parse_special))
        else:
            parts.append(shape_of(part))
    return parts

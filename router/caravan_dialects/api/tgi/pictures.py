"""Finds pictures in a prompt as TGI does: in Markdown, without a text in place of the picture."""

import re

from caravan_dialects.api.generation.parts import MediaParts

_PICTURE = re.compile(r"!\[\]\(([^)]*)\)")


def with_pictures(text: str, media: MediaParts) -> str:
    """Return ``text`` with marks for its pictures, if the model sees. Raises ValidationError."""
    if not media.sees:
        return text
    return _PICTURE.sub(lambda found: media.picture_at("inputs", found[1]), text)

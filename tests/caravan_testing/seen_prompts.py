"""What a scripted engine's model saw: the text and the media of a prompt, and the forms in which clients send them."""

import base64
from typing import Any

from caravan_scheduler.core.media import Media, Picture
from caravan_scheduler.core.prompt_media import is_cell
from caravan_testing.hostile_pictures import noise, picture_file
from caravan_testing.scripted_engine import BOS, ScriptedEngine

FILE = picture_file(noise())
PICTURE = Picture.of(24, 24, noise().tobytes())


def in_base64(data: bytes = FILE) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes = FILE, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{in_base64(data)}"


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def picture_part(data: bytes = FILE) -> dict[str, Any]:
    """Return a picture as OpenAI's chats have it."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def sound_part(data: bytes) -> dict[str, Any]:
    """Return a sound as OpenAI's chats have it."""
    return {"type": "input_audio", "input_audio": {"data": in_base64(data), "format": "wav"}}


def seen(engine: ScriptedEngine) -> list[str | Media]:
    """Return the prompt of the last request: its texts, and the media in the places of their cells."""
    spec = engine.spec
    spans = {} if spec.media is None else {span.offset: span for span in spec.media.spans}
    assert spec.prompt[0] == BOS
    found: list[str | Media] = []
    at = 1
    while at < len(spec.prompt):
        if (span := spans.get(at)) is not None:
            assert spec.media is not None
            assert all(is_cell(token) for token in spec.prompt[at : span.end])
            found.append(spec.media.contents[span.media_id])
            at = span.end
            continue
        last = found.pop() if found and isinstance(found[-1], str) else ""
        assert isinstance(last, str)
        found.append(last + chr((spec.prompt[at] - 100) % 800))
        at += 1
    return found

"""A program's images and audio in messages, as the parts that the HTTP API has for them."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# How files of sound begin; those of AAC and the like are not decoded.
_SOUNDS = {b"RIFF": "wav", b"fLaC": "flac", b"ID3": "mp3", b"\xff\xfb": "mp3", b"\xff\xf3": "mp3", b"\xff\xf2": "mp3"}
# The keys of parts that hold a picture or a sound itself: those of transformers and vLLM.
_KEYS = ("image", "image_pil", "audio")


def portable(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return ``messages`` with each image and audio clip of a program as a part that JSON can hold.

    In the content of a message, that is a Pillow image, a `Picture`, a `Sound`, the path of a file or its bytes:
    as a part by itself, or as ``{"type": "image", "image": ...}`` and ``{"type": "audio", "audio": ...}``. A text by
    itself is a part, too. Raises RequestError, OSError.
    """
    return [
        {**message, "content": [_part(part) for part in content]}
        if isinstance(content := message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        return _shown(part)
    key = part.get("type")
    if key in _KEYS and key in part:
        value = part[key]
        return _shown(Path(value) if isinstance(value, str) else value)
    return part


def _shown(value: Any) -> dict[str, Any]:
    if isinstance(value, Path):
        value = value.read_bytes()
    if not isinstance(value, bytes | bytearray):
        # Imported here, since it needs the router's types.
        from caravan.media_files import file_of

        value = file_of(value)
    return _file_part(bytes(value))


def _file_part(data: bytes) -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    kind = next((kind for start, kind in _SOUNDS.items() if data.startswith(start)), None)
    if kind is not None and data[8:12] != b"WEBP":
        return {"type": "input_audio", "input_audio": {"data": text, "format": kind}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}

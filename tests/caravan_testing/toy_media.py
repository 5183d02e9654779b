"""Media that spell a text for the toy's encoder."""

import hashlib

import numpy as np

from caravan_proto.messages.media import MediaKind, MediaShape
from caravan_shard.backends.toy.media import HOP, PATCH
from caravan_testing.media_prompts import Medium


def spelled_picture(text: str) -> tuple[int, int, bytes]:
    """Return width, height and pixels of a picture that spells ``text`` in a row of patches."""
    return spelled_bytes(text.encode())


def spelled_bytes(data: bytes) -> tuple[int, int, bytes]:
    """Return width, height and pixels of a picture that spells ``data``."""
    row = np.repeat(np.frombuffer(data, np.uint8), PATCH)
    pixels = np.zeros((PATCH, len(row), 3), np.uint8)
    pixels[:, :, 0] = row
    return len(row), PATCH, pixels.tobytes()


def spelled_sound(text: str) -> bytes:
    """Return the samples of a sound that spells ``text``."""
    return np.repeat(np.frombuffer(text.encode(), np.uint8).astype("<f4") / 256, HOP).tobytes()


def toy_picture(text: str) -> Medium:
    """Return a picture that spells ``text``."""
    width, height, pixels = spelled_picture(text)
    return Medium(MediaShape(media_id=_id(text), kind=MediaKind.IMAGE, width=width, height=height), pixels)


def toy_sound(text: str) -> Medium:
    """Return a sound that spells ``text``."""
    data = spelled_sound(text)
    return Medium(MediaShape(media_id=_id(f"sound {text}"), kind=MediaKind.AUDIO, samples=len(data) // 4), data)


def _id(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()

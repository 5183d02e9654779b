"""Prompts with media for an engine: cells, spans, and the chunks that they are sent in."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from caravan_proto.messages.commands import Chunk
from caravan_proto.messages.media import MediaKind, MediaShape, MediaSpan
from caravan_shard.backends.toy.media import HOP, PATCH
from caravan_shard.media import MediaEncoder, SliceSize
from caravan_testing.shard_builders import EngineDriver, first_chunk, next_chunk


@dataclass(frozen=True)
class Medium:
    """A medium with its content."""

    shape: MediaShape
    data: bytes


@dataclass(frozen=True)
class MediaPrompt:
    """The cells of a prompt, 0 under ``media``."""

    token_ids: Sequence[int]
    media: Sequence[MediaSpan] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def spans(self, start: int, end: int) -> list[MediaSpan]:
        """Return what the chunk [start, end) has of the spans."""
        found = []
        for span in self.media:
            first, last = max(start, span.offset), min(end, span.end)
            if first < last:
                skipped, count = first - span.offset, last - first
                positions = span.positions if count == span.count else count
                found.append(
                    replace(span, offset=first - start, first=span.first + skipped, count=count, positions=positions)
                )
        return found

    def first_chunk(self, sequence_id: int, end: int | None = None, **fields: Any) -> Chunk:
        """Make the first chunk, up to ``end``, behind a ``copy`` if there is one."""
        copy = fields.get("copy")
        start, stop = 0 if copy is None else copy.length, len(self) if end is None else end
        fields = {"total": len(self), "last": stop == len(self), **fields}
        chunk = first_chunk(sequence_id, self.token_ids[start:stop], **fields)
        return replace(chunk, media=self.spans(start, stop))

    def chunks(self, sequence_id: int, cuts: Sequence[int] = (), **fields: Any) -> Iterator[Chunk]:
        """Make the chunks between ``cuts``."""
        borders = [*cuts, len(self)]
        yield self.first_chunk(sequence_id, borders[0], **fields)
        for start, end in pairwise(borders):
            chunk = next_chunk(sequence_id, start, self.token_ids[start:end], last=end == len(self))
            yield replace(chunk, media=self.spans(start, end))


def media_prompt(driver: EngineDriver, *parts: Sequence[int] | Medium, encodes: bool = True) -> MediaPrompt:
    """Return the prompt of token ids and media, which are encoded for the engine unless told otherwise."""
    token_ids: list[int] = []
    media: list[MediaSpan] = []
    for part in parts:
        if not isinstance(part, Medium):
            token_ids += part
            continue
        if encodes:
            encode(driver, part)
        number = 0
        for piece in _encoder(driver).tokenize(part.shape):
            if isinstance(piece, SliceSize):
                media.append(
                    MediaSpan(
                        offset=len(token_ids),
                        media_id=part.shape.media_id,
                        slice_index=number,
                        count=piece.cells,
                        positions=piece.positions,
                    )
                )
                number += 1
                token_ids += [0] * piece.cells
            else:
                token_ids += piece
    return MediaPrompt(token_ids, media)


def encode(driver: EngineDriver, medium: Medium) -> None:
    """Let the engine have the embeddings of a medium."""
    assert driver.engine.media.put(medium.shape.media_id, _encoder(driver).encode(medium.shape, medium.data))


def _encoder(driver: EngineDriver) -> MediaEncoder:
    encoder: MediaEncoder | None = driver.backend.media
    assert encoder is not None, "the backend has no projector"
    return encoder


def run_prompt(driver: EngineDriver, prompt: MediaPrompt, sequence_id: int = 0, **fields: Any) -> list[int]:
    """Return the greedy output; ``cuts`` and what a first chunk takes may be given."""
    for chunk in prompt.chunks(sequence_id, **{"max_new": 16, "ignore_eos": True, **fields}):
        driver.prefill(chunk)
    driver.decode([sequence_id])
    return driver.output[sequence_id]


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

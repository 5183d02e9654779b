"""Tokenizes prompts with media and encodes media, on threads of its own, so that steps go on."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter
from typing import ParamSpec, TypeVar

from caravan_proto.errors import ShardError
from caravan_proto.messages.media import (
    EncodedMedia,
    MediaShape,
    MediaSpan,
    PromptPart,
    TextPart,
    TokenizedParts,
)
from caravan_shard.checks.media import check_shape, content_bytes
from caravan_shard.media import EncodingError, MediaEncoder, MediaStore, MediumTokens, Slices, SliceSize
from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.service.model_calls import ModelCalls
from caravan_shard.service.text import TextService

P = ParamSpec("P")
T = TypeVar("T")

# While steps use all cores, an encoding gets about a tenth of them.
_NICER = 10

_log = logging.getLogger(__name__)

# Layouts of media of equal shape are equal. Those of a few shapes are kept, since sound takes long.
_KEPT_LAYOUTS = 256
_MOST_PARTS = 1024


class EncoderThread:
    """Runs calls one after another. Used on the event loop.

    OpenMP keeps a team of threads for each thread that ever computed in parallel. As soon as all teams together have
    more threads than there are cores, those of every team hardly spin at a barrier, and the steps of a small model take
    half as long again. So the thread, and with it its team, ends when nothing is left to encode.
    """

    def __init__(self, calls: ModelCalls) -> None:
        self._model_calls = calls
        self._pool: ThreadPoolExecutor | None = None
        self._calls = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Refusal:
        """Return what ``function`` returns, which may use the model, after the calls before it."""
        pool = self._pool = self._pool or ThreadPoolExecutor(1, "media", initializer=_yield_to_steps)
        self._calls += 1
        try:
            return await self._model_calls.run(pool, function, *args, **kwargs)
        finally:
            self._calls -= 1
            if not self._calls and self._pool is pool:
                pool.shutdown(wait=False)
                self._pool = None

    def close(self) -> None:
        """End the thread, after the call that runs. The model's users are waited for before it is freed."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _yield_to_steps() -> None:
    """Let the threads of steps go first. Those that the library starts from this thread have its niceness."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


class MediaService:
    """Runs on the event loop. ``encoder``: None if prompts have text only. Any order of calls is fine."""

    def __init__(self, encoder: MediaEncoder | None, store: MediaStore, text: TextService, calls: ModelCalls) -> None:
        self._encoder = encoder
        self._store = store
        self._text = text
        self._thread = EncoderThread(calls)
        self._layouts: dict[MediaShape, MediumTokens] = {}
        # Media that are being encoded: whoever needs one of them waits for it.
        self._running: dict[bytes, asyncio.Future[EncodedMedia | Refusal]] = {}

    async def tokenize(self, parts: Sequence[PromptPart]) -> TokenizedParts | Refusal:
        """Return the cells of a prompt of these parts."""
        if len(parts) > _MOST_PARTS:
            return bad_request(f"a prompt has <= {_MOST_PARTS} parts. Given: {len(parts)}")
        collected = _Collected()
        for part in parts:
            match part:
                case TextPart():
                    found = await self._text.tokenize(
                        part.text, add_special=part.add_special, parse_special=part.parse_special
                    )
                    if isinstance(found, Refusal):
                        return found
                    collected.add_text(found.token_ids, found.pieces, found.specials)
                case MediaShape():
                    refusal = await self._add_medium(collected, part)
                    if refusal is not None:
                        return refusal
        return TokenizedParts(
            tuple(collected.token_ids), tuple(collected.pieces), tuple(collected.specials), tuple(collected.media)
        )

    async def _add_medium(self, collected: "_Collected", shape: MediaShape) -> Refusal | None:
        layout = await self._layout(shape)
        if isinstance(layout, Refusal):
            return layout
        number = 0
        for piece in layout:
            if isinstance(piece, SliceSize):
                collected.add_slice(shape.media_id, number, piece)
                number += 1
            else:
                found = await self._text.detokenize(piece)
                if isinstance(found, Refusal):
                    return found
                collected.add_text(found.token_ids, found.pieces, found.specials)
        return None

    async def _layout(self, shape: MediaShape) -> MediumTokens | Refusal:
        """Return what a medium of this shape is in a prompt."""
        refusal = check_shape(shape, None if self._encoder is None else self._encoder.facts)
        if refusal is not None or self._encoder is None:
            return refusal or bad_request("this model reads neither images nor audio")
        key = replace(shape, media_id=b"")
        if key not in self._layouts:
            try:
                layout = await self._text.run(self._encoder.tokenize, shape)
            except EncodingError as error:
                return bad_request(str(error))
            if isinstance(layout, Refusal):
                return layout
            largest = max((piece.cells for piece in layout if isinstance(piece, SliceSize)), default=0)
            if largest > self._encoder.facts.max_cells:
                most = self._encoder.facts.max_cells
                return Refusal(
                    ShardError.MEDIA_TOO_LARGE, f"a piece of a medium has <= {most} tokens. This one has {largest}"
                )
            while len(self._layouts) >= _KEPT_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = layout
        return self._layouts[key]

    async def encode(self, shape: MediaShape, data: bytes) -> EncodedMedia | Refusal:
        """Encode a medium, unless its embeddings are here."""
        encoder = self._encoder
        refusal = check_shape(shape, None if encoder is None else encoder.facts)
        if refusal is not None or encoder is None:
            return refusal or bad_request("this model reads neither images nor audio")
        if len(data) != content_bytes(shape):
            return bad_request(f"the content has {content_bytes(shape)} bytes. Given: {len(data)}")
        slices = self._store.find(shape.media_id)
        if slices is not None:
            return _encoded(slices, 0.0)
        running = self._running.get(shape.media_id)
        if running is None:
            running = asyncio.ensure_future(self._encode(encoder, shape, data))
            self._running[shape.media_id] = running
            running.add_done_callback(lambda _: self._running.pop(shape.media_id, None))
        # A caller that leaves does not take it from the others.
        return await asyncio.shield(running)

    async def _encode(self, encoder: MediaEncoder, shape: MediaShape, data: bytes) -> EncodedMedia | Refusal:
        started = perf_counter()
        try:
            slices = await self._thread.run(encoder.encode, shape, data)
        except EncodingError as error:
            return Refusal(ShardError.FORWARD_FAILED, f"a medium cannot be encoded: {error}")
        if isinstance(slices, Refusal):
            return slices
        if not self._store.put(shape.media_id, slices):
            size = sum(one.size_bytes for one in slices)
            return Refusal(
                ShardError.MEDIA_TOO_LARGE,
                f"an encoded medium has <= {self._store.capacity} bytes (--media-cache). Given: {size}",
            )
        seconds = perf_counter() - started
        _log.debug(
            "encoded an image or audio clip", extra={"cells": [one.size.cells for one in slices], "seconds": seconds}
        )
        return _encoded(slices, seconds)

    def close(self) -> None:
        """End the thread, after what is being encoded."""
        self._thread.close()


class _Collected:
    """The columns of a prompt, as far as it was read."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.pieces: list[bytes] = []
        self.specials: list[bool] = []
        self.media: list[MediaSpan] = []

    def add_text(self, token_ids: Sequence[int], pieces: Sequence[bytes], specials: Sequence[bool]) -> None:
        self.token_ids += token_ids
        self.pieces += pieces
        self.specials += specials

    def add_slice(self, media_id: bytes, number: int, size: SliceSize) -> None:
        self.media.append(
            MediaSpan(
                offset=len(self.token_ids),
                media_id=media_id,
                slice_index=number,
                count=size.cells,
                positions=size.positions,
            )
        )
        self.add_text([0] * size.cells, [b""] * size.cells, [True] * size.cells)


def _encoded(slices: Slices, seconds: float) -> EncodedMedia:
    return EncodedMedia(tuple(one.size.cells for one in slices), seconds)

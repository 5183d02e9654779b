"""The bytes of saved conversations.

A line with the format's name; the length of the header (4 bytes, little-endian); the header as JSON; for each
conversation its tokens (int32), which of them were sampled (a byte each), its logits (float32), its cells and its
recurrent state; the pixels and samples of images and audio, whose cells are negative tokens; and the SHA-256 of all
that. The checksum finds damage, not malice: load only your own files, since llama.cpp reads the cells.

The cells of tokens with which several conversations start are saved once, with the first of these conversations.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec
import numpy as np

from caravan.embeddings import Embeddings
from caravan.errors import StateError
from caravan_router.engine.media import content_of
from caravan_scheduler.core.media import SAMPLE_BYTES, Picture, Sound
from caravan_scheduler.core.tokens import common_length
from caravan_shard.arrays import Floats, State
from caravan_shard.backends.base import CellSlice

_MAGIC = b"caravan conversations 1\n"
_LENGTH = struct.Struct("<I")
_CHECKSUM_BYTES = 32

NO_BYTES: State = np.empty(0, np.uint8)
# More is in no file, and numpy can count no more.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedConversation:
    """``logits`` [rows, vocabulary] has no rows if there were none.

    The cells of its first ``held`` tokens are saved: those of the first ``shared`` tokens with the conversation number
    ``source`` of the batch, which comes earlier, and the rest as ``cells``. ``state``: the recurrent state after them,
    empty where there is none. ``first_output``: the first token after which logits are wanted.
    """

    tokens: list[int]
    outputs: Sequence[bool]
    waits: bool
    first_output: int
    logits: Floats
    held: int
    source: int
    shared: int
    cells: State
    state: State = field(default_factory=lambda: NO_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """Conversations of a model. ``cells_fingerprint`` names everything that decides what their cells mean."""

    model: str
    model_fingerprint: str
    cells_fingerprint: str
    vocabulary_size: int
    conversations: Sequence[SavedConversation]
    # The pictures and sounds, the fingerprint of their projector, and the numbers of all of their cells. In what
    # `decode` returns, a token of -1 is the first of these cells, and so on, which `with_cells` replaces.
    media: Sequence[Picture | Sound | Embeddings] = ()
    media_fingerprint: str = ""
    cells: Sequence[int] = ()

    def with_cells(self, cells: Sequence[int]) -> "SavedBatch":
        """Return the batch with these numbers of cells in its tokens. Raises StateError."""
        if not self.media:
            return self
        lowest = min((token for one in self.conversations for token in one.tokens), default=0)
        if -lowest > len(cells):
            raise StateError("the saved conversation has more of its images and audio than there is")
        conversations = [
            replace(one, tokens=[token if token >= 0 else cells[-1 - token] for token in one.tokens])
            for one in self.conversations
        ]
        return replace(self, conversations=conversations, cells=cells)


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Describes a conversation. ``tokens`` and ``rows`` of logits are numbers, ``cells`` and ``state`` are in bytes."""

    tokens: _Count
    waits: bool
    first_output: _Count
    rows: _Count
    held: _Count
    source: _Count
    shared: _Count
    cells: _Count
    state: _Count = 0


class _Medium(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An image has a size in pixels, audio a rate and the number of its samples, embeddings rows of a length."""

    width: _Count = 0
    height: _Count = 0
    sample_rate: _Count = 0
    samples: _Count = 0
    rows: _Count = 0
    row_size: _Count = 0


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    model: str
    model_fingerprint: str
    cells_fingerprint: str
    vocabulary_size: _Count
    conversations: tuple[_Entry, ...]
    media: tuple[_Medium, ...] = ()
    media_fingerprint: str = ""


def find_shared(tokens: list[int], earlier: Sequence[SavedConversation]) -> tuple[int, int]:
    """Return the source that saved most of the cells of ``tokens``, and for how many of the first tokens."""
    source, shared = 0, 0
    for number, other in enumerate(earlier):
        length = common_length(tokens, other.tokens[: other.held])
        if length > shared:
            source, shared = number, length
    return source, shared


def slices_of(batch: SavedBatch) -> list[list[CellSlice]]:
    """Return where the cells that each conversation held are, from its first token on, and then its recurrent state."""
    cells = list[list[CellSlice]]()
    for one in batch.conversations:
        end = one.shared
        mine = (
            [replace(piece, end=min(piece.end, end)) for piece in cells[one.source] if piece.start < end] if end else []
        )
        if one.held > end:
            mine.append(CellSlice(state=one.cells, first=end, start=end, end=one.held))
        cells.append(mine)
    return [[*mine, *_state_of(one)] for one, mine in zip(batch.conversations, cells, strict=True)]


def _state_of(one: SavedConversation) -> list[CellSlice]:
    return [CellSlice(state=one.state, first=one.held, start=one.held, end=one.held)] if one.state.nbytes else []


def encode(batch: SavedBatch) -> bytes:
    """Return the bytes of ``batch``."""
    entries = tuple(
        _Entry(
            tokens=len(one.tokens),
            waits=one.waits,
            first_output=one.first_output,
            rows=len(one.logits),
            held=one.held,
            source=one.source,
            shared=one.shared,
            cells=one.cells.nbytes,
            state=one.state.nbytes,
        )
        for one in batch.conversations
    )
    header = msgspec.json.encode(
        _Header(
            model=batch.model,
            model_fingerprint=batch.model_fingerprint,
            cells_fingerprint=batch.cells_fingerprint,
            vocabulary_size=batch.vocabulary_size,
            conversations=entries,
            media=tuple(map(_medium, batch.media)),
            media_fingerprint=batch.media_fingerprint if batch.media else "",
        )
    )
    places = {number: -1 - place for place, number in enumerate(batch.cells)}
    parts: list[bytes | memoryview] = [_MAGIC, _LENGTH.pack(len(header)), header]
    for one in batch.conversations:
        tokens = [places.get(token, token) for token in one.tokens] if places else one.tokens
        parts += [np.array(tokens, "<i4").tobytes(), bytes(one.outputs), one.logits.tobytes()]
        parts += [one.cells.data, one.state.data]
    parts += [content_of(medium) for medium in batch.media]
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part)
    return b"".join([*parts, checksum.digest()])


def decode(data: bytes) -> SavedBatch:
    """Return the batch that ``data`` holds; its cells are views of ``data``. Raises StateError."""
    if not data.startswith(_MAGIC):
        raise StateError("this is no saved conversation")
    body = memoryview(data)[:-_CHECKSUM_BYTES]
    if hashlib.sha256(body).digest() != data[-_CHECKSUM_BYTES:]:
        raise StateError("the saved conversation is damaged: its checksum is wrong")
    try:
        return _batch(_Parts(body[len(_MAGIC) :]))
    except (_WrongError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise StateError(f"the saved conversation makes no sense: {error}") from None


class _WrongError(Exception):
    """The parts do not fit together."""


class _Parts:
    """Takes one part after another."""

    def __init__(self, body: memoryview) -> None:
        self._rest = body

    def take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes."""
        if size > len(self._rest):
            raise _WrongError("it is too short for what its header says")
        part, self._rest = self._rest[:size], self._rest[size:]
        return part

    def finish(self) -> None:
        """Check that nothing is left."""
        if self._rest:
            raise _WrongError("it is too long for what its header says")


def _batch(parts: _Parts) -> SavedBatch:
    (length,) = _LENGTH.unpack(parts.take(_LENGTH.size))
    header = msgspec.json.decode(parts.take(length), type=_Header)
    conversations: list[SavedConversation] = []
    for entry in header.conversations:
        _check(entry, conversations)
        conversation = _conversation(entry, parts, header.vocabulary_size, has_media=bool(header.media))
        shared = entry.shared
        if shared and conversation.tokens[:shared] != conversations[entry.source].tokens[:shared]:
            raise _WrongError("a conversation shares cells of other tokens")
        conversations.append(conversation)
    media = tuple(_content(medium, parts) for medium in header.media)
    parts.finish()
    return SavedBatch(
        model=header.model,
        model_fingerprint=header.model_fingerprint,
        cells_fingerprint=header.cells_fingerprint,
        vocabulary_size=header.vocabulary_size,
        conversations=conversations,
        media=media,
        media_fingerprint=header.media_fingerprint,
    )


def _medium(medium: Picture | Sound | Embeddings) -> _Medium:
    if isinstance(medium, Embeddings):
        return _Medium(rows=medium.count, row_size=medium.size)
    if isinstance(medium, Picture):
        return _Medium(width=medium.width, height=medium.height)
    return _Medium(sample_rate=medium.sample_rate, samples=medium.count)


def _content(medium: _Medium, parts: _Parts) -> Picture | Sound | Embeddings:
    if medium.rows:
        data = bytes(parts.take(SAMPLE_BYTES * medium.rows * medium.row_size))
        return Embeddings.of_bytes(medium.rows, medium.row_size, data)
    if medium.samples:
        return Sound.of(medium.sample_rate, bytes(parts.take(SAMPLE_BYTES * medium.samples)))
    return Picture.of(medium.width, medium.height, bytes(parts.take(3 * medium.width * medium.height)))


def _conversation(entry: _Entry, parts: _Parts, vocabulary_size: int, *, has_media: bool) -> SavedConversation:
    tokens = np.frombuffer(parts.take(4 * entry.tokens), "<i4")
    if np.any(tokens >= vocabulary_size) or (np.any(tokens < 0) and not has_media):
        raise _WrongError("a token is not in the vocabulary")
    outputs = list(map(bool, parts.take(entry.tokens)))
    logits = np.frombuffer(parts.take(4 * entry.rows * vocabulary_size), np.float32)
    return SavedConversation(
        tokens=tokens.tolist(),
        outputs=outputs,
        waits=entry.waits,
        first_output=entry.first_output,
        # A copy, since a view would keep all of the bytes.
        logits=logits.reshape(entry.rows, vocabulary_size).copy(),
        held=entry.held,
        source=entry.source,
        shared=entry.shared,
        cells=np.frombuffer(parts.take(entry.cells), np.uint8),
        state=np.frombuffer(parts.take(entry.state), np.uint8),
    )


def _check(entry: _Entry, earlier: Sequence[SavedConversation]) -> None:
    """Check that the numbers of ``entry`` fit together, and to the conversations before it."""
    # What waits has at least a token to compute, for its logits.
    computable = entry.tokens - entry.waits
    if entry.held > computable or entry.rows > computable or (entry.waits and entry.first_output > computable):
        raise _WrongError("more is computed than there are tokens")
    if entry.shared and (entry.source >= len(earlier) or entry.shared > min(entry.held, earlier[entry.source].held)):
        raise _WrongError("a conversation shares cells that are not there")

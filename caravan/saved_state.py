"""The bytes of saved conversations.

A line with the format's name; the length of the header (4 bytes, little-endian); the header as JSON; for each
conversation its tokens (int32), which of them were sampled (a byte each), its logits (float32) and its cells; and the
SHA-256 of all that. The checksum finds damage, not malice: load only files of one's own, since llama.cpp reads the
cells.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caravan.errors import StateError
from caravan_shard.arrays import Floats, State

_MAGIC = b"caravan conversations 1\n"
_LENGTH = struct.Struct("<I")
_CHECKSUM_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedConversation:
    """``logits`` [rows, vocabulary] has no rows if there were none; ``cells`` is empty if they could not be saved.

    ``held``: tokens whose cells are saved. ``first_output``: the first token after which logits are wanted.
    """

    tokens: Sequence[int]
    outputs: Sequence[bool]
    waits: bool
    first_output: int
    logits: Floats
    held: int
    cells: State


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """Conversations of a model. ``cells_fingerprint`` names everything that decides what their cells mean."""

    model: str
    model_fingerprint: str
    cells_fingerprint: str
    conversations: Sequence[SavedConversation]


def encode(batch: SavedBatch) -> bytes:
    """Return the bytes of ``batch``."""
    header = {
        "model": batch.model,
        "model_fingerprint": batch.model_fingerprint,
        "cells_fingerprint": batch.cells_fingerprint,
        "conversations": [
            {
                "tokens": len(one.tokens),
                "waits": one.waits,
                "first_output": one.first_output,
                "logits": list(one.logits.shape),
                "held": one.held,
                "cells": one.cells.nbytes,
            }
            for one in batch.conversations
        ],
    }
    text = json.dumps(header).encode()
    parts = [_MAGIC, _LENGTH.pack(len(text)), text]
    for one in batch.conversations:
        parts += [np.array(one.tokens, "<i4").tobytes(), bytes(one.outputs), one.logits.tobytes(), one.cells.tobytes()]
    data = b"".join(parts)
    return data + hashlib.sha256(data).digest()


def decode(data: bytes) -> SavedBatch:
    """Return the batch that ``data`` holds. Raises StateError."""
    if not data.startswith(_MAGIC):
        raise StateError("this is no saved conversation")
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if hashlib.sha256(body).digest() != checksum:
        raise StateError("the saved conversation is damaged: its checksum is wrong")
    start = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack_from(body, len(_MAGIC))
    header = json.loads(body[start : start + length])
    at = start + length
    conversations = []

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return body[at - count : at]

    for one in header["conversations"]:
        rows, size = one["logits"]
        conversations.append(
            SavedConversation(
                tokens=np.frombuffer(take(4 * one["tokens"]), "<i4").tolist(),
                outputs=list(map(bool, take(one["tokens"]))),
                waits=one["waits"],
                first_output=one["first_output"],
                logits=np.frombuffer(take(4 * rows * size), np.float32).reshape(rows, size),
                held=one["held"],
                cells=np.frombuffer(take(one["cells"]), np.uint8),
            )
        )
    return SavedBatch(
        model=header["model"],
        model_fingerprint=header["model_fingerprint"],
        cells_fingerprint=header["cells_fingerprint"],
        conversations=conversations,
    )

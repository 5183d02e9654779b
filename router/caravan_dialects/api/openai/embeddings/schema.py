"""Bodies and replies of ``/v1/embeddings``."""

from typing import Literal

import msgspec

from caravan_dialects.api.generation.marks import NoEffect
from caravan_dialects.api.generation.schema import ModelName
from caravan_dialects.api.openai.schema import Prompt


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter has no vectors. ``dimensions``: if set, the size of the model's vectors."""

    input: Prompt
    model: ModelName = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: NoEffect = None


class Embedding(msgspec.Struct, frozen=True):
    """A vector of length 1. With ``encoding_format`` base64: its float32 numbers in little-endian bytes."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    """One entry per text, in order."""

    object: str
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage

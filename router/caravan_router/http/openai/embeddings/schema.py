"""Bodies of OpenAI's embeddings."""

from typing import Literal

import msgspec

from caravan_router.http.openai.schema import Prompt


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model`` may be anything but an adapter's name. ``dimensions``: as many as the model's vectors have."""

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class Embedding(msgspec.Struct, frozen=True):
    """Of length 1; with ``encoding_format`` base64 the bytes of its float32 numbers, the least significant first."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    """One entry for each text, in their order."""

    object: str
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
